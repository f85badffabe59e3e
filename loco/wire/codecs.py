"""How entries become bytes: the body of a frame. docs/wire.md gives the same to the byte.

A codec turns the entries of one run of elements into a uint8 tensor and back, on the tensors' device.
Decoding trusts nothing: what no encoder would have written is a WireError, and no more memory is taken than
a whole run of elements needs.
"""

from typing import Protocol

import torch
from torch import Tensor

from loco import kernels
from loco.kernels import BLOCK, Entries, Known, MalformedError

from ..errors import WireError


class Codec(Protocol):
    id: int  # names the codec in a frame's header
    name: str
    exact: bool  # whether what is decoded is what was encoded, bit for bit

    def encode(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor | None:
        """The body. None: these entries are not for this codec.

        Args:
            ahead: bytes of room in front of it, which only a sparse codec leaves.
        """
        ...

    def decode(self, body: Tensor, count: int, known: Known) -> Entries: ...

    def most_bytes(self, count: int, numel: int) -> int:
        """No body with this many entries is larger."""
        ...


class Whole:
    """Every value as FP32, 4 bytes each; no positions."""

    id, name, exact = 0, "float32", True

    def encode(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor:
        return _whole_values(entries, known, ahead).view(torch.uint8)

    def decode(self, body: Tensor, count: int, known: Known) -> Entries:
        _check_size(body, 4 * count, count, known)
        return Entries.whole(_finite(body.view(torch.float32)))

    def most_bytes(self, count: int, numel: int) -> int:
        return 4 * numel


class Fast:
    """The values, 4 bytes each; their offsets inside blocks of 256 elements, 1 byte each; then how many
    entries each block has, 1 byte each, or 2 bytes each if a block sends all its 256.

    Every block's part can be found and read on its own, by many threads or a GPU.
    """

    id, name, exact = 1, "fast", True

    def encode(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor:
        return kernels.write_blocks(entries, ahead)

    def decode(self, body: Tensor, count: int, known: Known) -> Entries:
        try:
            return kernels.read_blocks(body, count, known.numel)
        except MalformedError as error:
            raise WireError(str(error)) from error

    def most_bytes(self, count: int, numel: int) -> int:
        return 5 * count + 2 * -(-numel // BLOCK)


class Tight:
    """About 2.3 bytes an entry, coded given the θ and m that both ends hold (kernels/reference_tight.py).

    Worked by the host's cores.
    """

    id, name, exact = 2, "tight", True

    def encode(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor | None:
        numel = known.numel
        alone = entries.cut(slice(0, numel))  # or all that they share memory with would leave a GPU with them
        body = kernels.pack(alone.to("cpu"), known.to("cpu"), ahead)
        if body is None or body.numel() - ahead > self.most_bytes(alone.length, numel):
            return None  # so few entries that they are not worth the tables, or so odd that there was no room
        return body.to(entries.values.device)

    def decode(self, body: Tensor, count: int, known: Known) -> Entries:
        try:
            return kernels.unpack(body.cpu(), count, known.to("cpu")).to(body.device)
        except MalformedError as error:
            raise WireError(str(error)) from error

    def most_bytes(self, count: int, numel: int) -> int:
        return FAST.most_bytes(count, numel)


class Bfloat16:
    """Every value rounded to BF16, 2 bytes each."""

    id, name, exact = 3, "bfloat16", False

    def encode(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor:
        values = _whole_values(entries, known, ahead)
        return kernels.reference.cast(values, torch.bfloat16).view(torch.uint8)

    def decode(self, body: Tensor, count: int, known: Known) -> Entries:
        _check_size(body, 2 * count, count, known)
        return Entries.whole(_finite(body.view(torch.bfloat16).float()))

    def most_bytes(self, count: int, numel: int) -> int:
        return 2 * numel


class Int8:
    """Every value as a multiple of 1/127 of the largest in its block of 256: that of each block, as FP32;
    then 1 byte each."""

    id, name, exact = 4, "int8", False

    def encode(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor:
        values = _whole_values(entries, known, ahead)
        blocks = -(-values.numel() // BLOCK)
        padded = torch.nn.functional.pad(values, (0, blocks * BLOCK - values.numel())).view(blocks, BLOCK)
        largest = padded.abs().amax(1) if blocks else values
        steps = torch.where(largest > 0, largest, 1.0)[:, None]
        scaled = (padded / steps * 127).round_().to(torch.int8)
        return torch.cat([largest.view(torch.uint8), scaled.view(-1)[: values.numel()].view(torch.uint8)])

    def decode(self, body: Tensor, count: int, known: Known) -> Entries:
        blocks = -(-count // BLOCK)
        _check_size(body, count + 4 * blocks, count, known)
        largest = body[: 4 * blocks].view(torch.float32).repeat_interleave(BLOCK)[:count]
        return Entries.whole(_finite(body[4 * blocks :].view(torch.int8).float() / 127 * largest))

    def most_bytes(self, count: int, numel: int) -> int:
        return numel + 4 * -(-numel // BLOCK)


WHOLE, FAST, TIGHT = Whole(), Fast(), Tight()
SPARSE: dict[str, Codec] = {codec.name: codec for codec in (FAST, TIGHT)}
DENSE: dict[str, Codec] = {codec.name: codec for codec in (WHOLE, Bfloat16(), Int8())}
CODECS: dict[int, Codec] = {codec.id: codec for codec in (*SPARSE.values(), *DENSE.values())}


def _whole_values(entries: Entries, known: Known, ahead: int) -> Tensor:
    """Every element's value: zero where nothing is sent, which adds nothing."""
    assert not ahead
    if entries.starts is None:
        return entries.values
    values = torch.zeros(known.numel, dtype=torch.float32, device=entries.values.device)
    values[entries.indices()] = entries.values[slice(*entries.ends)]
    return values


def _check_size(body: Tensor, size: int, count: int, known: Known) -> None:
    if count != known.numel or body.numel() != size:
        raise WireError(f"{body.numel()} bytes can't hold {count} of {known.numel} entries")


def _finite(values: Tensor) -> Tensor:
    if not kernels.all_finite(values):
        raise WireError("a value is infinite or NaN")
    return values
