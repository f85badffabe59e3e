# Each target makes .venv when it is missing, installs what requirements.txt pins, then does its job.
# PYTHON picks the interpreter .venv is made with (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test check poison lint bench gpu clean
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
	$(BIN)/python -m experiments.compare

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
	rm -rf .venv build *.egg-info runs
