"""The text, and which bytes of it a rank reads."""

from pathlib import Path

import pytest
import torch

from experiments.errors import ExperimentError
from experiments.settings.tasks import TextConfig
from experiments.tasks.corpus import batch, evaluation_batches, load_corpus

TEXT = torch.arange(4000, dtype=torch.int32).remainder(251).to(torch.uint8)


def draw(**changed: int) -> torch.Tensor:
    place = {"seed": 0, "rank": 1, "ranks": 4, "step": 7} | changed
    return batch(TEXT, size=3, context=16, **place)


def test_a_batch_is_a_pure_function_of_seed_rank_and_step() -> None:
    first = draw()
    torch.rand(3)  # whatever else draws random numbers
    assert first.shape == (3, 17)
    assert torch.equal(first, draw())
    for changed in ({"seed": 1}, {"rank": 2}, {"step": 8}):
        assert not torch.equal(first, draw(**changed)), changed


def test_ranks_read_disjoint_shares() -> None:
    text = torch.arange(200, dtype=torch.uint8)  # a byte's value tells its place
    for rank in range(4):
        for step in range(50):
            seen = batch(text, size=4, context=9, seed=0, rank=rank, ranks=4, step=step)
            assert seen.min() >= 50 * rank
            assert seen.max() < 50 * (rank + 1)


def test_the_evaluation_reads_the_same_windows_from_both_ends() -> None:
    windows = torch.cat(evaluation_batches(TEXT, sequences=37, context=16))
    assert windows.shape == (37, 17)
    assert torch.equal(windows[0], TEXT[:17])
    assert torch.equal(windows[-1], TEXT[-17:])


def test_what_is_adapted_to_and_evaluated_on_is_not_in_the_warm_start() -> None:
    corpus = load_corpus(TextConfig(adapt_on=("json",)))
    warm = corpus.warm.numpy().tobytes()
    marker = b"class JSONDecodeError(ValueError)"
    assert marker in corpus.adapt.numpy().tobytes() + corpus.held_out.numpy().tobytes()
    assert marker not in warm
    assert b"class ArgumentParser(" in warm
    assert len(corpus.held_out) / (len(corpus.held_out) + len(corpus.adapt)) == pytest.approx(0.2, abs=0.01)


def test_the_text_does_not_depend_on_the_order_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "pydoc_data").mkdir()
    for name in ("zlast.py", "argparse.py", "middle.py"):  # made in this order
        (tmp_path / name).write_text(name)
    (tmp_path / "pydoc_data" / "topics.py").write_text("0123456789")
    corpus = load_corpus(TextConfig(stdlib=str(tmp_path)))
    assert corpus.warm.numpy().tobytes() == b"argparse.pymiddle.pyzlast.py"
    assert corpus.adapt.numpy().tobytes() == b"01234567"
    assert corpus.held_out.numpy().tobytes() == b"89"


def test_a_missing_standard_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"point text\.stdlib at a folder"):
        load_corpus(TextConfig(stdlib=str(tmp_path)))
    with pytest.raises(ExperimentError, match="holds no Python source"):
        load_corpus(TextConfig(adapt_on=("no_such_folder",)))


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(ExperimentError, match="a rank's share has 1000 bytes, a sequence needs 1001"):
        batch(TEXT, size=1, context=1000, seed=0, rank=0, ranks=4, step=1)
