"""What an entry costs on the wire, beside what it must cost at least; and how fast the codes are.

    python -m experiments.bench wire
    python -m experiments.bench wire --quick

Entries are those of noise at seven densities (experiments/noise.py) and of recorded rounds of real training
(experiments/record.py): the excerpts in experiments/results/recorded/, and whole recordings if runs/recorded/
has some. Bytes are those of the frames' bodies, of four sites' entries and of their sums; a frame's header is
not counted. Speeds are of one core, given frames as an exchange cuts them; shares are of the roof, the bytes
that a code must move, over the bandwidth of a plain copy in the same minute.

Nothing is timed before every code's bytes have come back as the same entries, bit for bit. Rows go to
runs/bench/wire.csv, with a plot beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from experiments.bench.codes import coding
from experiments.bench.codes.floors import Floor, floor
from experiments.bench.measuring import CPU, Row, Table, arguments_of, quantiles, seconds
from experiments.noise import Noise, simulate
from experiments.recording import Recording
from loco import kernels
from loco.kernels import BLOCK, Entries, Gate, Known
from loco.wire.codecs import FAST, SPARSE, WHOLE

LRS = (1.5e-8, 7.5e-8, 1.5e-7, 3e-7, 1e-6, 2e-6, 3e-6)  # densities of 0.1, 0.5, 1, 2, 6.5, 12 and 17%
ECONOMIES = (Gate(value_steps=16), Gate(value_steps=8, margin=0.5))
RECORDED = {"excerpt": Path("experiments/results/recorded"), "recording": Path("runs/recorded")}
FLOORS = {"floor": False, "floor, m known too": True}
ONE_PIECE = "fast, one piece"  # without what each frame costs in Python
_WORKS = ("encode", "decode")
# Every row has all of these; what does not apply is empty.
COLUMNS = (
    *("data", "lr", "value_steps", "margin", "numel", "density", "of", "by", "entries"),
    *("bytes", "bytes_per_entry", "below_fp32", "blind_bits", "place_bits", "sign_bits", "value_bits"),
    *("timed_numel", "timed_entries", "copy_bytes_per_s"),
    *(f"{work}_{q}" for work in _WORKS for q in ("p20", "p50", "p80")),  # seconds
    *(f"{work}_share_of_roof" for work in _WORKS),
)
SHOWN = {
    "data": "<38",
    "lr": ">8.2g",
    "density": ">8.2%",
    "of": "<7",
    "by": "<31",
    "bytes_per_entry": ">15.3f",
}
SHOWN |= {"below_fp32": ">10.1f", "encode_p50": ">10.4f", "decode_p50": ">10.4f"}


class Data(NamedTuple):
    name: str
    lr: float
    known: Known
    sites: list[Entries]


def main(arguments: list[str]) -> None:
    parser = arguments_of("wire", __doc__)
    parser.add_argument("--quick", action="store_true", help="few densities, small sizes")
    parser.add_argument("--lrs", type=float, nargs="+", help="learning rates of the noise")
    parser.add_argument("--numel", type=int, help="elements of noise; 2M")
    parser.add_argument("--speed-numel", type=int, help="elements that are timed; 16M")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    lrs = options.lrs or (LRS[4:5] if options.quick else LRS)
    numel = options.numel or (1 << 18 if options.quick else 1 << 21)
    timed = options.speed_numel or (1 << 20 if options.quick else 1 << 24)
    if not kernels.packs_fast():
        parser.exit(1, "the tight code is not compiled here: there is nothing to measure\n")

    torch.set_num_threads(1)
    table = Table(options.out / "wire.csv", CPU, SHOWN)
    for data in all_data(lrs, numel, quick=options.quick):
        rows = list(sizes(data))
        if data.name == "noise":
            rows += speeds(data.known, data.sites[0], timed, options.repeats)
        gate = data.known.gate
        about = {"data": data.name, "lr": data.lr, "value_steps": gate.value_steps, "margin": gate.margin}
        about["numel"] = data.known.numel
        table.add([dict.fromkeys(COLUMNS) | about | row for row in rows])
    table.close()


def all_data(lrs: tuple[float, ...], numel: int, *, quick: bool) -> Iterator[Data]:
    for lr in lrs:
        yield Data("noise", lr, *simulate(Noise(lr=lr, numel=numel)))
    for gate in ECONOMIES:
        margin = f", margin {gate.margin:g}" if gate.margin else ""
        for lr in (1e-6,) if quick else (1e-6, 3e-6):
            found = simulate(Noise(lr=lr, numel=numel, gate=gate))
            yield Data(f"noise, 1/{gate.value_steps} ulp{margin}", lr, *found)
    for kind, folder in RECORDED.items():
        for path in sorted(folder.glob("*.npz")):
            recording = Recording.load(path)
            yield Data(f"{kind} {path.stem}", recording.about["lr"], recording.known, recording.sites)


def sizes(data: Data) -> Iterator[Row]:
    """Bytes of the sites' entries and of their sums, by every code, beside the floors."""
    known = data.known
    numel = known.numel
    for of, parts in (("entries", data.sites), ("sums", [kernels.add_up(data.sites, numel)])):
        entries, all_of = sum(part.values.numel() for part in parts), numel * len(parts)
        found: dict[str, tuple[float, Row]] = {}
        for codec in SPARSE.values():
            coded = [body for part in parts for body in coding.checked(codec, known, part)]
            found[codec.name] = sum(body.raw.numel() for body in coded), {}
        found[WHOLE.name] = 4 * all_of, {}
        found |= {name: (size, {}) for name, size in coding.plain_sizes(parts).items()}
        for name, momentum in FLOORS.items():
            if not momentum or known.momentum is not None:
                bits = sum((floor(known, part, momentum=momentum) for part in parts), Floor(0, 0, 0, 0))
                by_kind = {f"{kind}_bits": value / entries for kind, value in bits._asdict().items()}
                found[name] = bits.total / 8, by_kind
        for by, (size, bits) in found.items():
            row = {"of": of, "by": by, "density": entries / all_of, "entries": entries, "bytes": round(size)}
            yield row | {"bytes_per_entry": size / entries, "below_fp32": 4 * all_of / size} | bits


def speeds(known: Known, entries: Entries, numel: int, repeats: int) -> Iterator[Row]:
    """How fast a core codes and reads about `numel` elements: the given ones, as often as it takes."""
    copies = max(numel // known.numel, 1)
    if copies > 1 and known.numel % BLOCK:
        raise ValueError(f"only whole blocks can be tiled, got {known.numel} elements")
    momentum = None if known.momentum is None else known.momentum.repeat(copies)
    known = Known(known.anchor.repeat(copies), momentum, known.gate)
    entries = Entries.join([entries] * copies)
    numel, k = known.numel, entries.values.numel()
    # Of an entry's 5 bytes and a block's start and count: encode reads and writes them; decode reads and
    # checks them, and writes the starts.
    moved = {"encode": 10 * k + 9 * numel / BLOCK, "decode": 5 * k + 9 * numel / BLOCK}

    before, rows = _copy_bytes_per_s(numel, repeats), []
    body = FAST.encode(entries, known)
    for name, codec in (*SPARSE.items(), (ONE_PIECE, FAST)):
        bodies = coding.checked(codec, known, entries)
        calls: tuple[Callable[[], object], ...] = (
            lambda codec=codec: list(coding.encode(codec, known, entries)),
            lambda bodies=bodies: list(coding.decode(bodies, known)),
        )
        if name == ONE_PIECE:
            calls = (lambda: FAST.encode(entries, known), lambda: FAST.decode(body, k, known))
        row: dict[str, Any] = {"of": "speed", "by": name, "density": k / numel}
        row |= {"timed_numel": numel, "timed_entries": k}
        for work, call in zip(_WORKS, calls, strict=True):
            row |= {f"{work}_{q}": time for q, time in quantiles(seconds(call, CPU, repeats)).items()}
        rows.append(row)
    # Other work on the machine only ever slows a copy down.
    copy = max(before, _copy_bytes_per_s(numel, repeats))
    for row in rows:
        if row["by"] != "tight":
            row |= {f"{work}_share_of_roof": moved[work] / row[f"{work}_p50"] / copy for work in _WORKS}
        yield row | {"copy_bytes_per_s": copy}


def _copy_bytes_per_s(numel: int, repeats: int) -> float:
    """Read and written."""
    source, target = torch.ones(numel), torch.zeros(numel)
    return 8 * numel / median(seconds(lambda: target.copy_(source), CPU, repeats))
