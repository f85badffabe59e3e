"""What a person reads."""

from collections.abc import Sequence
from statistics import median

from .examination import Examination
from .facts import Facts
from .links import rate_of, rate_text
from .methods import MEASURED_SITES
from .network import Network
from .rounds import Prediction


def text(found: Examination) -> str:
    """All but the verdict."""
    parts = ["", _sites_table(found.sites, found.clocks), ""]
    if found.network is not None:
        names, ranks = [one.name for one in found.sites], found.ranks
        sites = f"{len(names)} sites of {'one rank' if ranks == 1 else f'{ranks} ranks'}"
        parts += [
            _links_table(names, found.network),
            _together_line(found.network, ranks),
            f"(this rank has sent {_bytes(found.sent_bytes)} to find out)",
            "",
            f"a round of {found.parameters:,} parameters, {sites}:",
            _rounds_table(found.rounds, ranks=ranks),
            _ASSUMED,
            "",
        ]
    return "\n".join(parts)


def _sites_table(sites: Sequence[Facts], offsets: Sequence[float]) -> str:
    """
    Args:
        offsets: seconds by which each one's clock is ahead; none, if they were not measured.
    """
    versions = ("loco", "torch", "triton", "Python")
    rows: list[Sequence[str]] = [("site", "host", "address", *versions, "kernels", "cores", "GPUs", "clock")]
    for k, one in enumerate(sites):
        where, versions = (one.name, one.host, one.address), (one.loco, one.torch, one.triton, one.python)
        clock = f"{offsets[k]:+,.3f} s" if offsets else "?"
        rows.append((*where, *versions, one.kernels, str(one.cores), _gpus(one), clock))
    return _table(rows)


def _links_table(names: Sequence[str], network: Network) -> str:
    rows: list[Sequence[str]] = [("link", "round trip: median, least", "there", "back")]
    for (a, b), trips in sorted(network.round_trips.items()):
        there, back = (rate_text(network.rates[pair]) for pair in ((a, b), (b, a)))
        took = f"{1e3 * median(trips):.3g} ms, {1e3 * min(trips):.3g} ms"
        rows.append((f"{names[a]} – {names[b]}", took, there, back))
    return _table(rows)


def _together_line(network: Network, ranks: int) -> str:
    size, seconds = network.together[-1]
    rate = rate_text(rate_of(network.together) * ranks)
    each = f"{_bytes(size * ranks)} from each, {seconds:.2f} s"
    return f"all at once, as in a round: each site sends {rate} to the others together ({each})"


def _rounds_table(predictions: Sequence[Prediction], *, ranks: int) -> str:
    parts = ("encode", "link", "code", "waits", "apply")
    rows: list[Sequence[str]] = [("setting", "code, exchange", "a site sends", "takes", *parts)]
    for one in predictions:
        seconds = [_seconds(one.seconds[part]) for part in parts]
        sent = _bytes(one.sent_bytes * ranks)
        rows.append((one.method, f"{one.wire}, {one.exchange}", sent, _seconds(one.total), *seconds))
    return _table(rows)


_ASSUMED = (
    f"Sent is what models of 0.8M parameters sent with AdamW at 1e-6 and H 8 on {MEASURED_SITES} sites "
    f"(docs/results.md, docs/frontier.md).\nWider models, larger learning rates and longer rounds send more, "
    f"up to what DiLoCo does: `last_report` of a run says what yours\nsends. link: bytes and TCP's slow "
    f"start; code: what can't be done meanwhile; waits: for round trips."
)


def verdict(problems: Sequence[str]) -> str:
    if not problems:
        return "ready: nothing was found that is in the way of a training"
    found = f"{len(problems)} finding{'s' if len(problems) > 1 else ''}:"
    return "\n".join([found, *(f"{k}. {problem}" for k, problem in enumerate(problems, 1))])


def _gpus(one: Facts) -> str:
    kinds = [f"{one.gpus.count(kind)} × {kind}" for kind in dict.fromkeys(one.gpus)]
    return ", ".join(kinds) or "none"


def _bytes(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds:.3f} s"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
