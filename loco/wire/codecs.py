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
    """What others need to know of a codec: they ask for these properties, never which codec it is.

    Attributes:
        id: names the codec in a frame's header.
        name: what users and reports call it.
        exact: what is decoded is what was encoded, bit for bit.
        sizes_are_known: a body holds every element of its frame, and its size follows from their number.
            Other codecs hold the entries that are sent, with their positions, and must be exact.
        in_place: a body is the values as they lie in memory.
        known_on_host: entries are coded relative to θ and m, which must be in host memory.
        entry_bytes: what an entry is assumed to take until a round has shown it.
        fallback: codes the entries that this codec declines, and all entries where this codec is not `quick`.
    """

    id: int
    name: str
    exact: bool = True
    sizes_are_known: bool = False
    in_place: bool = False
    known_on_host: bool = False
    entry_bytes: float = 4.0
    fallback: "Codec | None" = None

    @property
    def quick(self) -> bool:
        """Whether `wire="auto"` may choose it on this machine."""
        return True

    def encode(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor | None:
        """The body. None: these entries are for the fallback.

        Args:
            ahead: bytes of room in front of it; 0 for a codec whose sizes are known.
        """
        ...

    def decode(self, body: Tensor, count: int, known: Known) -> Entries: ...

    def most_bytes(self, count: int, numel: int) -> int:
        """No body with this many entries is larger."""
        ...


class Whole(Codec):
    """Every value as FP32, 4 bytes each; no positions."""

    id, name = 0, "float32"
    sizes_are_known = in_place = True

    def encode(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor:
        return _whole_values(entries, known, ahead).view(torch.uint8)

    def decode(self, body: Tensor, count: int, known: Known) -> Entries:
        _check_size(body, 4 * count, count, known)
        return Entries.whole(_finite(body.view(torch.float32)))

    def most_bytes(self, count: int, numel: int) -> int:
        return 4 * numel


class Fast(Codec):
    """The values, 4 bytes each; their offsets inside blocks of 256 elements, 1 byte each; then how many
    entries each block has, 1 byte each, or 2 bytes each if a block sends all its 256.

    Every block's part can be found and read on its own, by many threads or a GPU.
    """

    id, name, entry_bytes = 1, "fast", 5.1

    def encode(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor:
        return kernels.write_blocks(entries, ahead)

    def decode(self, body: Tensor, count: int, known: Known) -> Entries:
        try:
            return kernels.read_blocks(body, count, known.numel)
        except MalformedError as error:
            raise WireError(str(error)) from error

    def most_bytes(self, count: int, numel: int) -> int:
        return 5 * count + 2 * -(-numel // BLOCK)


FAST = Fast()


class Tight(Codec):
    """About 2.3 bytes an entry, coded given the θ and m that both ends hold (kernels/reference_tight.py).

    Worked by the host's cores.
    """

    id, name, entry_bytes = 2, "tight", 2.4
    known_on_host = True
    fallback = FAST

    @property
    def quick(self) -> bool:
        return kernels.packs_fast()

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


class Bfloat16(Codec):
    """Every value rounded to BF16, 2 bytes each."""

    id, name, exact = 3, "bfloat16", False
    sizes_are_known = True

    def encode(self, entries: Entries, known: Known, ahead: int = 0) -> Tensor:
        values = _whole_values(entries, known, ahead)
        return kernels.reference.cast(values, torch.bfloat16).view(torch.uint8)

    def decode(self, body: Tensor, count: int, known: Known) -> Entries:
        _check_size(body, 2 * count, count, known)
        return Entries.whole(_finite(body.view(torch.bfloat16).float()))

    def most_bytes(self, count: int, numel: int) -> int:
        return 2 * numel


class Int8(Codec):
    """Every value as a multiple of 1/127 of the largest in its block of 256: that of each block, as FP32;
    then 1 byte each."""

    id, name, exact = 4, "int8", False
    sizes_are_known = True

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


# By name: those of entries (`PulseLoCo(wire=…)`), and those of every element (`DiLoCo(wire=…)`).
SPARSE: dict[str, Codec] = {}
DENSE: dict[str, Codec] = {}
CODECS: dict[int, Codec] = {}  # by id


def register(codec: Codec) -> None:
    """Let this rank send by a codec, and read it: on all ranks, before they build optimizers.

    Raises:
        ValueError: its id or its name is taken, or it can't be used.
    """
    if not 0 <= codec.id <= 255 or codec.id in CODECS:
        raise ValueError(f"a codec's id must be from 0 to 255 and new, got {codec.id} for {codec.name!r}")
    if codec.name in ("auto", *SPARSE, *DENSE):
        raise ValueError(f"a codec's name must be new, got {codec.name!r}")
    if not (codec.exact or codec.sizes_are_known):
        raise ValueError(f"codec {codec.name!r} of entries must be exact: what it loses, no residual keeps")
    (DENSE if codec.sizes_are_known else SPARSE)[codec.name] = codec
    CODECS[codec.id] = codec


WHOLE, TIGHT = Whole(), Tight()
for _codec in (FAST, TIGHT, WHOLE, Bfloat16(), Int8()):
    register(_codec)


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
