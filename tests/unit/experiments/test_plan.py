"""Which runs a comparison is made of."""

from copy import copy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.errors import ExperimentError
from experiments.settings.config import CompareConfig, TrainConfig
from experiments.settings.merging import load
from experiments.settings.plan import Run, runs_of
from experiments.settings.rounds import outer_options


def planned(*arguments: str) -> list[Run]:
    return runs_of(load(CompareConfig, list(arguments)))


def test_without_a_word_it_is_the_demos_methods_on_all_trainers() -> None:
    runs = planned()
    assert [(run.label, run.config.method) for run in runs] == [
        ("DDP, tuned", "ddp"),
        ("DiLoCo, tuned", "diloco"),
        ("PULSELoCo, saving 0.25", "pulseloco"),
        ("PULSELoCo, saving 1", "pulseloco"),
    ]
    assert {(run.ranks, run.config.seed) for run in runs} == {(4, 0)}


def test_what_a_run_says_outweighs_what_all_share(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "lr: 1.0e-4\n"
        "arithmetic: {prompts: 5}\n"
        "runs:\n"
        "  Plain: {method: diloco, outer_lr: 1, outer_momentum: 0}\n"
        "  Few: {arithmetic: {group: 3}, lr: 1.0e-5}\n"
    )
    plain, few = planned(f"preset={file}", "runs.Few.gate_gain=7", "steps=80")
    assert (plain.label, plain.config.method, plain.config.lr) == ("Plain", "diloco", 1e-4)
    assert (plain.config.outer_lr, plain.config.outer_momentum) == (1.0, 0.0)
    assert (few.config.method, few.config.lr, few.config.gate_gain) == ("pulseloco", 1e-5, 7.0)
    assert (few.config.arithmetic.prompts, few.config.arithmetic.group) == (5, 3)
    assert plain.config.arithmetic.group == 8
    assert {run.config.steps for run in (plain, few)} == {80}
    assert all(type(run.config) is TrainConfig for run in (plain, few))


UNTOLD = dict.fromkeys(
    ("outer_lr", "outer_momentum", "gate_gain", "gate_margin", "value_steps", "sums_margin")
)
ROUNDS = {"gate": "bf16", "sync_every": 8, "nesterov": True, "overlap": False}


def test_what_a_run_does_not_say_is_locos_to_decide() -> None:
    (run,) = planned("runs.A.saving=0.25")
    assert outer_options(run.config) == ROUNDS | UNTOLD | {"saving": 0.25}
    (late,) = planned("runs.A.saving=1", "overlap=1", "gate_gain=3")
    assert outer_options(late.config) == ROUNDS | UNTOLD | {"saving": 1.0, "gate_gain": 3.0, "overlap": True}
    (constant,) = planned("runs.A.saving=1", "outer_lr=5", "overlap=0.5")
    assert outer_options(constant.config) == ROUNDS | UNTOLD | {
        "saving": 1.0,
        "outer_lr": 5.0,
        "overlap": 0.5,
    }
    (published,) = planned("runs.A.steps=80")
    assert (published.config.outer_lr, published.config.outer_momentum) == (0.7, 0.9)
    assert (published.config.gate_gain, published.config.gate_margin) == (3.5, 0.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["saving=0.25", "method=diloco"], "saving is for method=pulseloco: leave it out with method=diloco"),
        (["saving=100"], "saving must be 0, or from 1/512 to 64"),
        (["saving=0.25", "gate=open"], "there is nothing to save"),
    ],
)
def test_a_number_that_can_mean_nothing_is_refused(arguments: list[str], text: str) -> None:
    with pytest.raises(ExperimentError, match=text):
        planned("runs.A.steps=80", *arguments)


def test_seeds_come_outermost_so_that_an_early_end_leaves_whole_comparisons() -> None:
    runs = planned("seeds=2", "seed=10", "runs.A.method=ddp", "runs.B.seeds=3", "runs.C.seeds=1")
    assert [(run.label, run.config.seed) for run in runs] == [
        *(("A", 10), ("B", 10), ("C", 10)),
        *(("A", 11), ("B", 11)),
        ("B", 12),
    ]


def test_a_run_for_each_choice_of_what_it_lists(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "runs:\n"
        "  α {outer_lr}, lr {lr}: {outer_momentum: 0, over: {outer_lr: [7, 14.0], lr: [1.0e-6, 3.0e-6]}}\n"
        "  k {sparseloco.k} β {sparseloco.decay}:\n"
        "    {method: sparseloco, sparseloco: {decay: 0.9}, over: {sparseloco.k: [16, 64]}}\n"
    )
    runs = planned(f"preset={file}", "seeds=2")
    labels = [f"α {alpha}, lr {lr}" for alpha in (7, 14) for lr in ("1e-06", "3e-06")]
    labels += ["k 16 β 0.9", "k 64 β 0.9"]
    assert [run.label for run in runs] == 2 * labels
    assert [(run.config.outer_lr, run.config.lr) for run in runs[:4]] == [
        *((7.0, 1e-6), (7.0, 3e-6)),
        *((14.0, 1e-6), (14.0, 3e-6)),
    ]
    assert all(run.config.outer_momentum == 0 for run in runs[:4])
    assert [(run.config.sparseloco.k, run.config.sparseloco.decay) for run in runs[4:6]] == [
        (16, 0.9),
        (64, 0.9),
    ]


def test_a_runs_own_seed_is_its_first() -> None:
    runs = planned("seeds=2", "runs.A.seed=5", "runs.B.method=ddp")
    assert [(run.label, run.config.seed) for run in runs] == [("A", 5), ("B", 0), ("A", 6), ("B", 1)]


def test_one_trainer_is_one_process_unless_it_says_otherwise() -> None:
    one, two = planned("runs.One.method=single", "runs.Two.nproc=2")
    assert (one.ranks, two.ranks) == (1, 2)
    with pytest.raises(ExperimentError, match=r"runs\.One: .* use nproc=1"):
        planned("runs.One.method=single", "runs.One.nproc=2")


@pytest.mark.parametrize(
    ("label", "key"),
    [
        ("PULSELoCo", "pulseloco.seed0"),
        ("DiLoCo (α 0.7, μ 0.9)", "diloco-alpha-0.7-mu-0.9.seed0"),
        ("  4 × local / no exchange ", "4-local-no-exchange.seed0"),
    ],
)
def test_a_runs_file_is_named_for_its_label(label: str, key: str) -> None:
    assert Run(label, TrainConfig()).key == key


def test_two_runs_that_would_share_a_file_are_refused() -> None:
    with pytest.raises(ExperimentError, match=r"kept in one file, a-1\.seed0\.json: change a label"):
        runs_of(CompareConfig(runs={"A 1": {}, "a-1": {}}))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["runs.Mine.sync_evry=4"],
            "unknown key 'runs.Mine.sync_evry'; did you mean 'runs.Mine.sync_every'?",
        ),
        (["runs.Mine.steps=many"], "runs.Mine.steps: Value 'many' of type 'str' could not be converted"),
        (["runs.Mine=4"], "runs.Mine holds keys, write runs.Mine.…=…"),
        (["runs.Mine.transformer=4"], "runs.Mine.transformer holds keys, write runs.Mine.transformer.…=…"),
        (["runs.Mine.lr=0"], "runs.Mine: lr must be > 0, got 0.0"),
        (["runs.Mine.steps=100"], "runs.Mine: steps must be a multiple of sync_every"),
        (["runs.Mine.ranks_per_site=4"], "runs.Mine: at least two sites are needed"),
        (["runs.Mine.seeds=0"], "runs.Mine: seeds must be a whole number of at least 1, got 0"),
        (["runs.Mine.seeds=two"], "runs.Mine: seeds must be a whole number of at least 1, got 'two'"),
        (["runs.Mine.nproc=null"], "runs.Mine: nproc must be at least 1, got None"),
        (["runs.Mine.nproc=0"], "runs.Mine: nproc must be at least 1, got 0"),
        (["runs={'α {alpha}': {}}"], "runs.α {alpha}: {alpha} in the label is no setting"),
        (["runs={Mine: {over: {lr: 1e-6}}}"], "runs.Mine: over lists values by setting, such as over: {"),
        (["runs={Mine: {over: {lr: [1, 2]}}}"], "runs.Mine: runs need names of their own, write {lr} into"),
    ],
)
def test_a_runs_mistake_is_told_with_its_label(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        planned(*arguments)
    assert str(caught.value).startswith(sentence)


OTHER: dict[str, Any] = {
    "seed": 1,
    "device": "cpu",
    "nproc": 2,
    "task": "text",
    "model": "hf",
    "path": "folder",
    "parameters": "bfloat16",
    "method": "ddp",
    "gate": "fp16",
    "betas": (0.8, 0.9),
    "nesterov": False,
    "value_steps": 16,
    "error_feedback": False,
    "wire": "float32",
    "exchange": "dense",
}


def changed(config: Any, name: str) -> Any:
    """`config` with another value for one of its fields, which may be of a part: `arithmetic.group`.
    Not checked: a single value need not fit the others."""
    first, _, rest = name.partition(".")
    value = getattr(config, first)
    if rest:
        other = changed(value, rest)
    elif first in OTHER:
        other = OTHER[first]
    elif isinstance(value, bool):
        other = not value
    elif isinstance(value, int | float):
        other = value + 1
    elif isinstance(value, tuple):
        other = (*value, "other")
    elif isinstance(value, dict):
        other = {**value, "other": 1}
    else:
        other = f"{value}, or another"
    assert other != value
    found = copy(config)
    object.__setattr__(found, first, other)
    return found


def names(kind: Any) -> list[str]:
    found = []
    for item in fields(kind):
        inner = item.default_factory
        found += [f"{item.name}.{name}" for name in names(inner)] if is_dataclass(inner) else [item.name]
    return found


@pytest.mark.parametrize("name", names(TrainConfig))
def test_names_ports_and_patience_decide_nothing_and_all_else_does(name: str) -> None:
    run = Run("A", TrainConfig(nproc=4))
    other = Run("B", changed(run.config, name))
    assert run.same_as(run.stored())
    assert run.same_as(other.stored()) == (name in ("name", "port", "timeout_s", "save_every", "resume"))
    assert other.same_as(run.stored()) == run.same_as(other.stored())


def test_a_setting_that_is_gone_is_not_the_same() -> None:
    run = Run("A", TrainConfig(nproc=4))
    assert not run.same_as(run.stored() | {"forgotten": 1})
    assert run.same_as(run.stored() | {"forgotten": None, "forgotten_switch": False})
    assert not run.same_as(run.stored() | {"arithmetic": run.stored()["arithmetic"] | {"forgotten": 1}})


@pytest.mark.parametrize("name", ["clip", "arithmetic.group"])
def test_a_setting_that_was_not_there_yet_counts_as_its_default(name: str) -> None:
    run = Run("A", TrainConfig(nproc=4))
    older = run.stored()
    first, _, rest = name.partition(".")
    del (older[first] if rest else older)[rest or first]
    assert run.same_as(older)
    assert not Run("A", changed(run.config, name)).same_as(older)
