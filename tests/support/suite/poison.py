"""Memory that is read before it is written, made to show: `make poison`.

Fresh memory usually holds zeros, or what the last owner left, and a program that reads it passes its tests on
most days. Two fillings bring that out:

- glibc fills what malloc returns: every float is negative and huge, every signed integer is negative. It
  reads GLIBC_TUNABLES when a process starts, so the caller sets it, and child processes inherit it.
- torch fills what `torch.empty` and its kin return: floats are NaN, integers are the largest. It hides
  glibc's filling of tensors, so half of the tests, chosen by chance, have it, in this process and on ranks.
"""

import os

import torch
import torch.utils.deterministic


def is_wanted() -> bool:
    return "glibc.malloc.perturb" in os.environ.get("GLIBC_TUNABLES", "")


def fill_tensors(wanted: bool) -> None:
    """In this process, from now on."""
    torch.use_deterministic_algorithms(wanted)  # without which torch fills nothing
    torch.utils.deterministic.fill_uninitialized_memory = wanted  # pyright: ignore[reportAttributeAccessIssue]


def are_tensors_filled() -> bool:
    return torch.are_deterministic_algorithms_enabled()
