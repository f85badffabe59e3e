"""What an entry costs on the wire, and how fast the codecs are.

    python -m experiments.bench wire
    python -m experiments.bench wire --quick

Entries are those of noise at several densities (experiments/noise.py) and of recorded rounds of real training
(experiments/results/recorded/). Bytes are those of the frames' bodies, of four sites' entries and of their
sums; a frame's header is not counted. Speeds are of one core, given frames as an exchange cuts them; shares
are of the roof, the bytes that a codec must move, over the bandwidth of a plain copy in the same minute.

Nothing is timed before every codec's bytes have come back as the same entries, bit for bit. Rows go to
runs/bench/wire.csv, with a plot beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.bench.measuring import CPU, Row, Table, arguments_of, quantiles, seconds
from experiments.noise import Sent, simulate
from loco import kernels
from loco.kernels import BLOCK, Entries, Gate, Known
from loco.wire.codecs import FAST, SPARSE, Codec
from loco.wire.framing import Frames

LRS = (1.5e-8, 7.5e-8, 1.5e-7, 3e-7, 1e-6, 2e-6, 3e-6)  # densities of 0.1, 0.5, 1, 2, 6.5, 12 and 17%
ECONOMIES = (Gate(value_steps=16), Gate(value_steps=8, margin=0.5))
RECORDED = Path(__file__).parents[1] / "results/recorded"
ONE_PIECE = "fast, one piece"  # without what each frame costs in Python
SHOWN = {"data": "<38", "lr": ">8.2g", "density": ">8.2%", "of": "<7", "by": "<15"}
SHOWN |= {"bytes_per_entry": ">15.3f", "below_fp32": ">10.1f", "encode_p50": ">10.4f", "decode_p50": ">10.4f"}


class Body(NamedTuple):
    """Of a frame."""

    codec: Codec  # that was used: entries that are not for the one asked for go by another
    raw: Tensor
    entries: int


def encode(codec: Codec, known: Known, entries: Entries) -> Iterator[Body]:
    """Frame by frame, as an exchange does it between its messages."""
    for at in _spans(known.numel):
        part, some = known.part(at), entries.cut(at)
        used, body = codec, codec.encode(some, part)
        if body is None:
            used, body = FAST, FAST.encode(some, part)
        yield Body(used, body, some.values.numel())


def decode(bodies: Sequence[Body], known: Known) -> Iterator[Entries]:
    for at, body in zip(_spans(known.numel), bodies, strict=True):
        yield body.codec.decode(body.raw, body.entries, known.part(at))


def _spans(numel: int) -> list[slice]:
    frames = Frames.of(numel)
    return [frames.span(slice(0, numel), number) for number in range(frames.count)]


def checked(codec: Codec, known: Known, entries: Entries) -> list[Body]:
    """The bodies, which have come back as the same entries; or the end."""
    bodies = list(encode(codec, known, entries))
    back = Entries.join(list(decode(bodies, known)))
    for sent, got in zip(entries, back, strict=True):
        assert sent is not None
        assert got is not None
        if sent.shape != got.shape or not torch.equal(sent.view(torch.uint8), got.view(torch.uint8)):
            sys.exit(f"what the {codec.name} codec brings back is not what was sent: nothing was measured")
    return bodies


def recorded(path: Path) -> tuple[float, Sent]:
    """A recorded round -> its learning rate, θ and m before it, and what each site sent."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "about"}
        about = json.loads(str(file["about"]))
    gate = Gate(**about["gate"] | {"dtype": getattr(torch, about["gate"]["dtype"])})
    sites = []
    for site in range(about["sites"]):
        starts = torch.nn.functional.pad(arrays[f"counts{site}"].long().cumsum(0), (1, 0))
        sites.append(Entries(starts, arrays[f"offsets{site}"], arrays[f"values{site}"]))
    return about["lr"], Sent(Known(arrays["anchor"], arrays.get("momentum"), gate), sites)


def main(arguments: list[str]) -> None:
    parser = arguments_of("wire", __doc__)
    parser.add_argument("--quick", action="store_true", help="one density, small sizes")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    if not kernels.packs_fast():
        parser.exit(1, "the tight codec is not compiled here: there is nothing to measure\n")
    torch.set_num_threads(1)
    drawn = {"panel": ("of",), "x": "density", "y": "bytes_per_entry", "line": ("data", "by")}
    table = Table(options.out / "wire.csv", CPU, SHOWN, **drawn)
    for name, lr, sent in all_data(options.quick):
        rows = sizes(sent)
        if name == "noise":
            rows += speeds(sent, 1 << 20 if options.quick else 1 << 24, options.repeats)
        table.add([{"data": name, "lr": lr, "numel": sent.known.numel} | row for row in rows])
    table.close()


def all_data(quick: bool) -> Iterator[tuple[str, float, Sent]]:
    numel = 1 << 18 if quick else 1 << 21
    for lr in LRS[4:5] if quick else LRS:
        yield "noise", lr, simulate(numel, lr)
    for gate in ECONOMIES:
        name = f"noise, 1/{gate.value_steps} ulp, margin {gate.margin:g}"
        yield name, 1e-6, simulate(numel, 1e-6, gate=gate)
    for path in sorted(RECORDED.glob("*.npz")):
        yield f"recorded {path.stem}", *recorded(path)


def _row(of: str, by: str, density: float, bytes_per_entry: float | None = None, **times: float) -> Row:
    """Every row has the same columns; what does not apply is empty."""
    below = None if bytes_per_entry is None else 4 / density / bytes_per_entry
    row: Row = {"of": of, "by": by, "density": density}
    row |= {"bytes_per_entry": bytes_per_entry, "below_fp32": below}
    for work in ("encode", "decode"):
        row |= {f"{work}_{name}": times.get(f"{work}_{name}") for name in ("p20", "p50", "p80", "of_roof")}
    return row


def sizes(sent: Sent) -> list[Row]:
    """Bytes of the sites' entries and of their sums, by every codec."""
    known, rows = sent.known, []
    for of, parts in (("entries", sent.sites), ("sums", [kernels.add_up(sent.sites, sent.known.numel)])):
        entries = sum(part.values.numel() for part in parts)
        for codec in SPARSE.values():
            size = sum(body.raw.numel() for part in parts for body in checked(codec, known, part))
            density = entries / (known.numel * len(parts))
            rows.append(_row(of, codec.name, density, size / entries))
    return rows


def speeds(sent: Sent, numel: int, repeats: int) -> list[Row]:
    """How fast a core codes and reads about `numel` elements: the first site's, as often as it takes."""
    copies = max(numel // sent.known.numel, 1)
    momentum = None if sent.known.momentum is None else sent.known.momentum.repeat(copies)
    known = Known(sent.known.anchor.repeat(copies), momentum, sent.known.gate)
    entries = Entries.join([sent.sites[0]] * copies)
    numel, k = known.numel, entries.values.numel()
    # Of an entry's 5 bytes and a block's start and count: encode reads and writes them; decode reads and
    # checks them, and writes the starts.
    moved = {"encode": 10 * k + 9 * numel / BLOCK, "decode": 5 * k + 9 * numel / BLOCK}
    before, rows = _copy_bytes_per_s(numel, repeats), []
    body = FAST.encode(entries, known)
    for name, codec in (*SPARSE.items(), (ONE_PIECE, FAST)):
        bodies = checked(codec, known, entries)
        calls: dict[str, Callable[[], object]] = {
            "encode": lambda codec=codec: list(encode(codec, known, entries)),
            "decode": lambda bodies=bodies: list(decode(bodies, known)),
        }
        if name == ONE_PIECE:
            calls["encode"] = lambda: FAST.encode(entries, known)
            calls["decode"] = lambda: FAST.decode(body, k, known)
        took = {work: quantiles(seconds(call, CPU, repeats)) for work, call in calls.items()}
        times = {f"{work}_{q}": time for work, found in took.items() for q, time in found.items()}
        rows.append((name, times))
    # Other work on the machine only ever slows a copy down.
    copy = max(before, _copy_bytes_per_s(numel, repeats))
    for name, times in rows:
        if name != "tight":
            times |= {f"{work}_of_roof": moved[work] / times[f"{work}_p50"] / copy for work in moved}
    return [_row("speed", name, k / numel, **times) for name, times in rows]


def _copy_bytes_per_s(numel: int, repeats: int) -> float:
    """Read and written."""
    source, target = torch.ones(numel), torch.zeros(numel)
    return 8 * numel / median(seconds(lambda: target.copy_(source), CPU, repeats))
