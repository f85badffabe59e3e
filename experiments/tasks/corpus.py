"""Text that every machine with Python has: the standard library's own source, as bytes.

The warm start learns from the library's code. Post-training then adapts to folders that the warm start
has never seen (by default `pydoc_data`, which is prose: the language reference), and the last part of
those is kept for evaluation. Which bytes a rank reads in a step is a pure function of (seed, rank,
step), so every method of a comparison sees the same batches in the same order.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.errors import ExperimentError
from experiments.settings.tasks import TextConfig

# Installed, generated, or missing from some distributions of Python: the text should be the same
# wherever the same Python is.
_LEFT_OUT = {
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__", "__phello__"),
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils"),
    *("encodings", "ensurepip", "venv"),
}


@dataclass(frozen=True)
class Corpus:
    warm: Tensor  # [bytes] uint8, what the warm start reads
    adapt: Tensor  # [bytes] uint8, what post-training reads
    held_out: Tensor  # [bytes] uint8, what every evaluation reads


def load_corpus(config: TextConfig) -> Corpus:
    """Read the three texts, files in the order of their names. Raises `ExperimentError`."""
    root = Path(config.stdlib or sysconfig.get_path("stdlib"))
    if not (root / "argparse.py").is_file():
        raise ExperimentError(
            f"the Python standard library's source is the training text, and {root} does not hold it: "
            "point text.stdlib at a folder that has argparse.py and its siblings"
        )
    adapt = b"".join(_read(root / folder, config) for folder in config.adapt_on)
    warm = b"".join(
        path.read_bytes() if path.is_file() else _read(path, config)
        for path in sorted(root.iterdir())
        if path.name not in _LEFT_OUT and path.name not in config.adapt_on
        if path.suffix == ".py" or path.is_dir()
    )
    cut = int(len(adapt) * (1 - config.eval_share))
    return Corpus(*(_as_tensor(text) for text in (warm, adapt[:cut], adapt[cut:])))


def batch(text: Tensor, *, size: int, context: int, seed: int, rank: int, ranks: int, step: int) -> Tensor:
    """The sequences of one rank in one step, [size, context + 1] uint8, out of that rank's share."""
    share = len(text) // ranks
    first = rank * share
    generator = np.random.default_rng([seed, rank, step])
    starts = generator.integers(first, first + _room(share, context), size=size)
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()])


def evaluation_batches(text: Tensor, *, sequences: int, context: int, size: int = 16) -> list[Tensor]:
    """`sequences` fixed windows spread evenly over `text`, in batches of `size`."""
    starts = np.linspace(0, _room(len(text), context) - 1, sequences).astype(int)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()])
    return list(windows.split(size))


def _room(length: int, context: int) -> int:
    room = length - context
    if room < 1:
        raise ExperimentError(
            f"the text is too short: a rank's share has {length} bytes, a sequence needs {context + 1}"
        )
    return room


def _read(folder: Path, config: TextConfig) -> bytes:
    files = [
        path
        for path in sorted(folder.rglob("*.py"))
        if not _LEFT_OUT.intersection(path.relative_to(folder).parts)
    ]
    if folder.name in config.adapt_on and not files:
        raise ExperimentError(f"text.adapt_on names '{folder.name}', and {folder} holds no Python source")
    return b"".join(path.read_bytes() for path in files)


def _as_tensor(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
