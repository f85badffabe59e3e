"""Configuration: what is asked for is what comes out, and mistakes are answered with a sentence."""

import dataclasses
from pathlib import Path

import pytest

from experiments.errors import ExperimentError
from experiments.pipeline.compare import PipelineCompareConfig
from experiments.settings.config import CompareConfig, RunConfig, TrainConfig, check_world
from experiments.settings.merging import load, to_yaml


def test_defaults_yaml_and_arguments_are_merged_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 1.0e-4\ntransformer: {dim: 64, layers: 2}\nbetas: [0.8, 0.9]\n")
    config = load(TrainConfig, [f"preset={file}", "transformer.dim=32", "method=diloco"])
    assert (config.lr, config.betas, config.method) == (1e-4, (0.8, 0.9), "diloco")
    assert (config.transformer.dim, config.transformer.layers, config.transformer.heads) == (32, 2, 4)
    assert type(config) is TrainConfig


def test_several_presets_are_merged_in_their_order(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("lr: 1.0e-4\nsteps: 80\nruns: {A: {method: ddp, lr: 1.0e-3}}\n")
    second.write_text("lr: 1.0e-5\nruns: {A: {lr: 1.0e-2}, B: {method: diloco}}\n")
    config = load(CompareConfig, [f"preset={first}", "clip=2", f"preset={second}"])
    assert (config.lr, config.steps, config.clip) == (1e-5, 80, 2.0)
    assert config.runs == {"A": {"method": "ddp", "lr": 1e-2}, "B": {"method": "diloco"}}
    assert load(CompareConfig, [f"preset={second}", f"preset={first}"]).lr == 1e-4


def test_an_argument_outweighs_every_preset_wherever_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 1.0e-4\n")
    assert load(TrainConfig, ["lr=1e-3", f"preset={file}"]).lr == 1e-3


def test_the_resolved_config_reads_back_as_the_same(tmp_path: Path) -> None:
    runs = ["runs.A.method=ddp", "runs.B.arithmetic.prompts=3"]
    config = load(CompareConfig, [*runs, "port=29777", "text.adapt_on=[json]", "lr=1.23456789012e-6"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load(CompareConfig, [f"preset={file}"]) == config


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(TrainConfig, []).steps = 8  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("file", sorted(Path("configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_file_in_configs_loads_by_its_short_name(file: Path) -> None:
    kind: type[RunConfig] = PipelineCompareConfig if file.stem.startswith("pipeline_") else CompareConfig
    assert load(kind, [f"preset={file.stem}"]) == load(kind, [f"preset={file}"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sync_evry=4"], "unknown key 'sync_evry'; did you mean 'sync_every'?"),
        (["transformer.dmi=4"], "unknown key 'transformer.dmi'; did you mean 'transformer.dim'?"),
        (["warm_stat.steps=4"], "unknown key 'warm_stat'; did you mean 'warm_start'?"),
        (["method=pulsloco"], "unknown method 'pulsloco'; did you mean 'pulseloco'?"),
        (["preset=two_site"], "no preset 'two_site'; did you mean 'two_sites'?"),
        (["preset=nothere.yaml"], "there is no file nothere.yaml"),
        (["pulseloco"], "arguments are written key=value, got 'pulseloco'"),
        (["--steps=8"], "arguments are written key=value, got '--steps=8'"),
        (["steps=many"], "steps: Value 'many' of type 'str' could not be converted to Integer"),
        (["transformer=3"], "transformer holds keys, write transformer.…=…"),
        (["lr=0"], "lr must be > 0, got 0.0"),
        (["port=99999"], "port must be between 1 and 65535, got 99999"),
        (["outer_momentum=1.5"], "outer_momentum must be in [0, 1), got 1.5"),
        (["value_steps=12"], "value_steps must be None or a power of two from 1 to 256, got 12"),
        (["gate_margin=-1"], "gate_margin must be 0, or > 0 and finite in FP32, got -1.0"),
        (
            ["transformer.heads=3"],
            "transformer.dim must be a multiple of transformer.heads, got 128 and 3",
        ),
        (["task=arithmetics"], "unknown task 'arithmetics'; did you mean 'arithmetic'?"),
        (["parameters=float16"], "unknown parameters 'float16'; did you mean 'bfloat16'?"),
        (["sparseloco.average=site"], "unknown sparseloco.average 'site'; did you mean 'sites'?"),
        (["arithmetic.group=0"], "arithmetic.group must be at least 1, got 0"),
        (["warmup=-1"], "warmup must be at least 0, got -1"),
        (["model=hf"], "model=hf and path=<folder of the model> belong together"),
        (["path=folder"], "model=hf and path=<folder of the model> belong together"),
        (
            ["model=hf", "path=a", "task=text"],
            "the text task reads bytes: model=hf needs task=prompts, task=gym or task=arithmetic",
        ),
    ],
)
def test_a_mistake_is_answered_with_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load(TrainConfig, arguments)
    assert str(caught.value) == sentence


def test_broken_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("steps: 8\ntransformer: {dim: 32\n")
    with pytest.raises(ExperimentError, match=r"broken.yaml, line 3 is not valid YAML"):
        load(TrainConfig, [f"preset={file}"])


def test_a_preset_must_hold_keys(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("- steps\n- lr\n")
    with pytest.raises(ExperimentError, match=r"list.yaml"):
        load(TrainConfig, [f"preset={file}"])


@pytest.mark.parametrize("method", ["pulseloco", "ddp"])
def test_steps_that_end_between_rounds_are_refused(method: str) -> None:
    """DDP has no rounds, and takes its rollouts as often as the others do."""
    with pytest.raises(ExperimentError, match=r"got 100, use 96 or 104"):
        load(TrainConfig, ["steps=100", f"method={method}"])
    with pytest.raises(ExperimentError, match=r"eval_every .* got 3, use 8"):
        load(TrainConfig, ["eval_every=3", f"method={method}"])


def test_one_trainer_runs_alone() -> None:
    config = load(TrainConfig, ["method=single"])
    check_world(config, 1, launch_line="…")
    with pytest.raises(ExperimentError, match="there are 4 processes: use nproc=1"):
        check_world(config, 4, launch_line="…")


def test_a_world_must_divide_into_at_least_two_sites() -> None:
    config = load(TrainConfig, ["ranks_per_site=2"])
    check_world(config, 4, launch_line="…")
    with pytest.raises(ExperimentError, match="launch a multiple of 2"):
        check_world(config, 3, launch_line="…")
    with pytest.raises(ExperimentError, match="launch with `torchrun this`"):
        check_world(config, 2, launch_line="torchrun this")
