"""Decodes downloaded files, one on top of the other, into the changes that they make."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import Changes, MalformedError

from .errors import DamagedError
from .versions.anchors import unpack_anchor
from .versions.reader import Download
from .weights.publisher_memory import PublisherMemory

SLICE = 32 * kernels.PART  # elements that are decoded together where weights have to be copied


def decoded(memory: PublisherMemory, downloads: list[Download]) -> list[tuple[torch.dtype, Changes]]:
    """The changes that some files, one after the other, make to the weights in memory. Writes nothing.

    One patch for weights that lie in rows in host memory takes memory for its changes alone. Otherwise the
    weights are copied slice by slice.

    Raises:
        DamagedError: a file is of other weights.
    """
    _check_formats(memory, downloads)
    if len(downloads) == 1 and downloads[0].step.file.base is not None:
        direct = {format: memory.direct(format) for format in downloads[0].bodies}
        if all(pieces is not None for pieces in direct.values()):
            return [
                (f, _unpack(downloads[0], f, pieces)) for f, pieces in direct.items() if pieces is not None
            ]
    found = []
    for format, first, fresh in decoded_slices(memory, downloads):
        held = memory.read(format, first, first + fresh.numel())
        changes = kernels.find_changes([held], [fresh])
        # Copies, or what was reserved for as many changes as weights would be kept with them.
        found.append((format, Changes(changes.positions + first, changes.bits.clone())))
    return found


def decoded_slices(
    memory: PublisherMemory, downloads: list[Download]
) -> Iterator[tuple[torch.dtype, int, Tensor]]:
    """The weights that some files lead to: format, first element, and elements from there on."""
    _check_formats(memory, downloads)
    for format in memory.layout.formats if downloads else ():
        numel = memory.numel(format)
        anchor = downloads[0].step.file.base is None
        parts = _anchor_parts(downloads[0], format, numel) if anchor else None
        patches = [one for one in downloads if one.step.file.base is not None and format in one.bodies]
        changed = [0] * len(patches)
        for first in range(0, numel, SLICE):
            last = min(first + SLICE, numel)
            if parts is None:
                fresh = memory.read(format, first, last).clone()
            else:
                fresh = torch.cat(list(islice(parts, -(-(last - first) // kernels.PART))))
            for k, one in enumerate(patches):
                changes = _unpack(one, format, [fresh], (numel, first, last))
                changed[k] += changes.positions.numel()
                kernels.swap_bits([fresh], changes)
            yield format, first, fresh
        if parts is not None:
            list(parts)  # what is left over is an error
        for one, count in zip(patches, changed, strict=True):
            _check_count(one, format, count)


def _check_formats(memory: PublisherMemory, downloads: list[Download]) -> None:
    for one in downloads:
        for format in one.bodies.keys() - memory.layout.formats:
            raise DamagedError(one.step.file.path, f"has {format}, of which there are no weights")


def _unpack(
    one: Download, format: torch.dtype, pieces: list[Tensor], of: tuple[int, int, int] | None = None
) -> Changes:
    raw = one.bodies[format][1]
    try:
        changes = kernels.unpack_patch(pieces, raw if of is None else kernels.split_patch(raw, *of))
    except MalformedError as error:
        raise DamagedError(one.step.file.path, f"is no patch of these weights: {error}") from error
    if of is None:
        _check_count(one, format, changes.positions.numel())
    return changes


def _check_count(one: Download, format: torch.dtype, changed: int) -> None:
    if changed != one.bodies[format][0].entries:
        raise DamagedError(one.step.file.path, "changes another number of elements than its publisher says")


def _anchor_parts(one: Download, format: torch.dtype, numel: int) -> Iterator[Tensor]:
    if format not in one.bodies:
        raise DamagedError(one.step.file.path, f"has no {format}")
    try:
        yield from unpack_anchor(one.bodies[format][1].numpy().data, numel, format)
    except MalformedError as error:
        raise DamagedError(one.step.file.path, f"is no anchor of these weights: {error}") from error
