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

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.bench import coding, plain_codes, wire_speed
from experiments.bench.floors import Floor, floor
from experiments.bench.measuring import append, arguments_of, close
from experiments.noise import Noise, simulate
from experiments.recording import Recording
from loco import kernels
from loco.kernels import Entries, Gate, Known
from loco.wire.codecs import SPARSE, WHOLE

LRS = (1.5e-8, 7.5e-8, 1.5e-7, 3e-7, 1e-6, 2e-6, 3e-6)  # densities of 0.1, 0.5, 1, 2, 6.5, 12 and 17%
ECONOMIES: tuple[dict[str, Any], ...] = ({"value_steps": 16}, {"value_steps": 8, "margin": 0.5})
RECORDED = (Path("experiments/results/recorded"), Path("runs/recorded"))
FLOOR, FLOOR_M = "floor", "floor, m known too"
# Every row has all of these; what does not apply is empty.
COLUMNS = (
    *("data", "lr", "value_steps", "margin", "numel", "density", "of", "by", "entries"),
    *("bytes", "bytes_per_entry", "below_fp32", "blind_bits", "place_bits", "sign_bits", "value_bits"),
    *wire_speed.COLUMNS,
)


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
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    options = parser.parse_args(arguments)
    lrs = options.lrs or (LRS[4:5] if options.quick else LRS)
    numel = options.numel or (1 << 18 if options.quick else 1 << 21)
    timed = options.speed_numel or (1 << 20 if options.quick else 1 << 24)
    if not kernels.packs_fast():
        parser.exit(1, "the tight code is not compiled here: there is nothing to measure\n")

    torch.set_num_threads(1)
    table, device = options.out / "wire.csv", torch.device("cpu")
    for data in all_data(lrs, numel, quick=options.quick):
        rows = list(measure(data))
        if data.name == "noise":
            rows += wire_speed.measure(data.known, data.sites[0], timed, options.repeats)
        rows = [_row(data, row) for row in rows]
        for row in rows:
            show(row)
        append(table, rows, device)
    close(table)


def all_data(lrs: tuple[float, ...], numel: int, *, quick: bool) -> Iterator[Data]:
    for lr in lrs:
        known, sites = simulate(Noise(lr=lr, numel=numel))
        yield Data("noise", lr, known, sites)
    # A gate without these fields has no economies: there is nothing to measure then.
    fields = {field.name for field in dataclasses.fields(Gate)}
    economies = [Gate(**economy) for economy in ECONOMIES] if "value_steps" in fields else []
    if not economies:
        print("this version's gate has no value_steps: no rows for economies")
    for gate in economies:
        for lr in (1e-6,) if quick else (1e-6, 3e-6):
            known, sites = simulate(Noise(lr=lr, numel=numel, gate=gate))
            yield Data("noise, " + wording(gate), lr, known, sites)
    for folder, kind in zip(RECORDED, ("excerpt", "recording"), strict=True):
        for path in sorted(folder.glob("*.npz")):
            recording = Recording.load(path)
            yield Data(f"{kind} {path.stem}", recording.about["lr"], recording.known, recording.sites)


def wording(gate: Gate) -> str:
    """A gate's economies, for people."""
    margin = f", margin {gate.margin:g}" if gate.margin else ""
    return f"1/{getattr(gate, 'value_steps', None)} ulp{margin}"


def measure(data: Data) -> Iterator[dict[str, Any]]:
    """Bytes of the sites' entries and of their sums, by every code, beside the floors."""
    known = data.known
    numel = known.anchor.numel()
    sums = kernels.add_up(data.sites, numel)
    for of, parts in (("entries", data.sites), ("sums", [sums])):
        entries = sum(part.values.numel() for part in parts)

        row = partial(_size_row, of, entries, numel * len(parts))
        for codec in SPARSE.values():
            coded = [body for part in parts for body in coding.checked(codec, known, part)]
            yield row(codec.name, sum(body.raw.numel() for body in coded))
        yield row(WHOLE.name, 4 * numel * len(parts))
        for name, size in plain_codes.sizes(parts).items():
            yield row(name, size)
        for name, momentum in ((FLOOR, False), (FLOOR_M, True)):
            if momentum and known.momentum is None:
                continue
            found = sum((floor(known, part, momentum=momentum) for part in parts), Floor(0, 0, 0, 0))
            bits = {f"{kind}_bits": bits / entries for kind, bits in found._asdict().items()}
            yield row(name, found.total / 8) | bits


def _size_row(of: str, entries: int, numel: int, by: str, size: float) -> dict[str, Any]:
    return {
        "of": of,
        "by": by,
        "density": entries / numel,
        "entries": entries,
        "bytes": round(size),
        "bytes_per_entry": size / entries,
        "below_fp32": 4 * numel / size,
    }


def _row(data: Data, row: dict[str, Any]) -> dict[str, Any]:
    gate = data.known.gate
    about = {
        "data": data.name,
        "lr": data.lr,
        "value_steps": getattr(gate, "value_steps", None),
        "margin": gate.margin,
        "numel": data.known.anchor.numel(),
    }
    return {name: (about | row).get(name, "") for name in COLUMNS}


def show(row: dict[str, Any]) -> None:
    name = f"{row['of']}, {row['by']}"
    start = f"{row['data']:<38} {row['lr']:>7.2g} {row['density']:>7.2%}  {name:<42}"
    if row["bytes"] != "":
        split = ""
        if row["place_bits"] != "":
            bits = [f"{row[f'{kind}_bits']:.2f}" for kind in ("blind", "place", "sign", "value")]
            split = "  bits: {} place blind, {} place + {} sign + {} value".format(*bits)
        print(f"{start} {row['bytes_per_entry']:>6.3f} B {row['below_fp32']:>7.1f}x{split}", flush=True)
        return
    for work in ("encode", "decode"):
        elements, entries = (row[f"timed_{of}"] / row[f"{work}_p50"] / 1e6 for of in ("numel", "entries"))
        roof = row[f"{work}_share_of_roof"]
        share = f", {roof:.0%} of the roof" if roof != "" else ""
        print(f"{start} {work} {elements:,.0f} M elements/s, {entries:,.1f} M entries/s{share}", flush=True)
