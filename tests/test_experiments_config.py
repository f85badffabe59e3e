"""Configuration: what is asked for is what comes out, and mistakes are answered with a sentence."""

import dataclasses
from pathlib import Path

import pytest

from experiments.compare import methods_of
from experiments.config import CompareConfig, RunConfig, TrainConfig, check_world, load, to_yaml
from experiments.errors import ExperimentError


def test_defaults_yaml_and_arguments_are_merged_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 1.0e-4\nmodel: {dim: 64, layers: 2}\nbetas: [0.8, 0.9]\n")
    config = load(TrainConfig, [f"config={file}", "model.dim=32", "method=diloco"])
    assert (config.lr, config.betas, config.method) == (1e-4, (0.8, 0.9), "diloco")
    assert (config.model.dim, config.model.layers, config.model.heads) == (32, 2, 4)
    assert type(config) is TrainConfig


def test_the_resolved_config_reads_back_as_the_same(tmp_path: Path) -> None:
    config = load(CompareConfig, ["methods=[diloco,pulseloco]", "port=29777", "data.adapt_on=[json]"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load(CompareConfig, [f"config={file}"]) == config


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(TrainConfig, []).steps = 8  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("kind", [TrainConfig, CompareConfig])
@pytest.mark.parametrize("file", sorted(Path("configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_file_in_configs_loads_by_its_short_name(kind: type[RunConfig], file: Path) -> None:
    assert load(kind, [f"config={file.stem}"]) == load(kind, [f"config={file}"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sync_evry=4"], "unknown key 'sync_evry'; did you mean 'sync_every'?"),
        (["model.dmi=4"], "unknown key 'model.dmi'; did you mean 'model.dim'?"),
        (["warm_stat.steps=4"], "unknown key 'warm_stat'; did you mean 'warm_start'?"),
        (["method=pulsloco"], "unknown method 'pulsloco'; did you mean 'pulseloco'?"),
        (["config=two_site"], "no config file 'two_site'; did you mean 'two_sites'?"),
        (["pulseloco"], "arguments are written key=value, got 'pulseloco'"),
        (["--steps=8"], "arguments are written key=value, got '--steps=8'"),
        (["steps=many"], "steps: Value 'many' of type 'str' could not be converted to Integer"),
        (["model=3"], "model holds keys, write model.…=…"),
        (["lr=0"], "lr must be > 0, got 0.0"),
        (["port=99999"], "port must be between 1 and 65535, got 99999"),
        (["outer_momentum=1.5"], "outer_momentum must be in [0, 1), got 1.5"),
        (["value_steps=12"], "value_steps must be None or a power of two from 2 to 256, got 12"),
        (["gate_margin=-1"], "gate_margin must be 0, or > 0 and finite in FP32, got -1.0"),
        (["model.heads=3"], "model.dim must be a multiple of model.heads, got 128 and 3"),
    ],
)
def test_a_mistake_is_answered_with_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load(TrainConfig, arguments)
    assert str(caught.value) == sentence


def test_broken_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("steps: 8\nmodel: {dim: 32\n")
    with pytest.raises(ExperimentError, match=r"broken.yaml, line 3 is not valid YAML"):
        load(TrainConfig, [f"config={file}"])


def test_steps_that_end_between_rounds_are_refused_except_for_ddp() -> None:
    with pytest.raises(ExperimentError, match=r"got 100, use 96 or 104"):
        load(TrainConfig, ["steps=100"])
    with pytest.raises(ExperimentError, match=r"eval_every .* got 3, use 8"):
        load(TrainConfig, ["eval_every=3"])
    assert load(TrainConfig, ["steps=100", "eval_every=3", "method=ddp"]).steps == 100


def test_a_world_must_divide_into_at_least_two_sites() -> None:
    config = load(TrainConfig, ["ranks_per_site=2"])
    check_world(config, 4, launch_line="…")
    with pytest.raises(ExperimentError, match="launch a multiple of 2"):
        check_world(config, 3, launch_line="…")
    with pytest.raises(ExperimentError, match="launch with `torchrun this`"):
        check_world(config, 2, launch_line="torchrun this")


def test_compare_runs_ddp_once_and_the_others_with_both_outer_optimizers() -> None:
    names = [str(method) for method in methods_of(load(CompareConfig, []))]
    assert names == [
        "DDP",
        "DiLoCo (α 0.7, μ 0.9)",
        "PULSELoCo (α 0.7, μ 0.9)",
        "DiLoCo (α 1, μ 0)",
        "PULSELoCo (α 1, μ 0)",
    ]
    assert len(methods_of(load(CompareConfig, ["config=plain_averaging"]))) == 3
