"""The time of a round beside others': a plain all-reduce of FP32, torch's PostLocalSGD, torchft's DiLoCo.

    python -m experiments.bench peers
    python -m experiments.bench peers --quick
    python -m experiments.bench peers --rates 100 0 --methods "saving 0.25, auto" "saving 0.25, tight"
    python -m experiments.bench peers --sites 2 16 --processes 16 --methods "γ 1, owner"
    python -m experiments.bench link          all exchanges and codecs over links of 100 and 1000 Mbit/s

Sites are processes on this machine's loopback, one thread each; with --rates each has a link of that many
Mbit/s of its own (0: unshaped), which needs root, and where torchft can't reach its lighthouse and is left
out. Every method has a model of its own, of parameters of 1024 x 1024 elements, and trains it on noise, so
that each is in its own steady state. The methods take turns, round by round; a round takes as long as on the
slowest site. At the end the weights of all sites are compared, bit for bit.

Processes that share cores and caches need more processor time, whatever they do. With --processes, as many
groups of sites run at once as make so many processes, so that only the number of sites of a group differs.

torchft's DiLoCo runs as it comes: its bucketization loses tensors and its quantization commits no round on
a CPU (docs/benchmarks.md). Rows go to experiments/results/bench/peers.csv or link.csv,
with a plot beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import fmean, median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import loco
from experiments.bench import others
from experiments.bench.measuring import CPU, RESULTS, Row, Table, arguments_of, quantiles, rate_name
from experiments.noise import LR, SAVING, SIDE, SYNC_EVERY, WARM_UP, model_of
from experiments.processes.namespaces import MBIT, Network, why_not
from experiments.processes.progress import Progress
from experiments.processes.sites import Sites
from loco import kernels

NUMEL = [1024, 1 << 22, 1 << 24]
ALL_REDUCE, TORCHFT, OWNER = "all-reduce", "torchft DiLoCo", "γ 1, owner"
SHOWN = {"numel": ">11,.0f", "sites": ">5", "rate_mbit": ">9g", "method": "<21", "wire": "<8", "p50": ">9.5f"}
SHOWN |= {"over_torchft": ">12.2f", "over_all_reduce": ">15.2f", "cpu_s": ">8.4f", "sent_bytes": ">12,.0f"}


class Peer(Protocol):
    """What takes part in this comparison."""

    weights: list[Tensor]  # that it trains; none, if it does not

    def round(self) -> loco.SyncReport | None: ...


class Ours:
    """One of loco's optimizers."""

    def __init__(self, kind: Any, options: Mapping[str, Any], weights: list[torch.nn.Parameter]) -> None:
        self.weights: list[Tensor] = [w.detach() for w in weights]
        self._optimizer = kind(torch.optim.SGD(weights, lr=0.0), **options)

    def round(self) -> loco.SyncReport:
        return self._optimizer.sync()


def _ours(kind: Any, **options: Any) -> Callable[[list[torch.nn.Parameter], str], Ours]:
    return lambda weights, lighthouse: Ours(kind, options, weights)


METHODS: dict[str, Callable[[list[torch.nn.Parameter], str], Peer]] = {
    ALL_REDUCE: others.AllReduce,
    "PostLocalSGD": others.PostLocalSGD,
    TORCHFT: others.TorchftDiLoCo,
    "loco.DiLoCo": _ours(loco.DiLoCo),
    "loco.PulseLoCo": _ours(loco.PulseLoCo),
    "γ 1": _ours(loco.PulseLoCo, **loco.PAPER),
    **{
        f"saving 0.25, {wire}": _ours(loco.PulseLoCo, wire=wire, **SAVING)
        for wire in ("auto", "fast", "tight")
    },
    OWNER: _ours(loco.PulseLoCo, exchange="owner", wire="fast", **loco.PAPER),
    "γ 1, owner, tight": _ours(loco.PulseLoCo, exchange="owner", wire="tight", **loco.PAPER),
    "γ 1, gather, fast": _ours(loco.PulseLoCo, exchange="gather", wire="fast", **loco.PAPER),
    "γ 1, gather, tight": _ours(loco.PulseLoCo, exchange="gather", wire="tight", **loco.PAPER),
    **{f"loco.DiLoCo, {wire}": _ours(loco.DiLoCo, wire=wire) for wire in ("bfloat16", "int8")},
}
USUAL = list(METHODS)[: list(METHODS).index(OWNER)]
# Arguments: all exchanges and codecs over slow links.
OVER_LINKS = ["--table=link", "--numel=4194304", *("--sites", "2", "4", "8")]
OVER_LINKS += [
    *("--rates", "100", "1000", "0"),
    "--methods",
    ALL_REDUCE,
    "loco.DiLoCo",
    "γ 1",
    *list(METHODS)[len(USUAL) :],
]


class Contender:
    """One site: a model for each method.

    Args:
        site: its number.
        methods: their names.
    """

    def __init__(self, site: int, numel: int, methods: list[str], lighthouse: str) -> None:
        # The same noise for each method, so that those of equal arithmetic can be compared.
        self._chance = {name: torch.Generator().manual_seed(1 + site) for name in methods}
        pool = torch.Generator().manual_seed(-1 - site)
        self._pool = torch.randn(2 * min(numel, SIDE * SIDE), generator=pool)
        self._peers: dict[str, Peer] = {}
        self._inner: dict[str, torch.optim.Adam] = {}
        for name in methods:
            weights = model_of(numel)
            self._peers[name] = METHODS[name](weights, lighthouse)
            if self._peers[name].weights:
                self._inner[name] = torch.optim.Adam(weights, lr=LR, fused=True)

    @torch.no_grad()
    def train(self, method: str) -> None:
        """H inner steps, on gradients that no other site draws."""
        inner = self._inner.get(method)
        if inner is None:
            return
        for _ in range(SYNC_EVERY):
            for w in inner.param_groups[0]["params"]:
                most = self._pool.numel() - w.numel()
                first = int(torch.randint(most + 1, (1,), generator=self._chance[method]))
                w.grad = self._pool[first : first + w.numel()].view(w.shape)
            inner.step()
        inner.zero_grad()  # or torchft's hooks would have its optimizer step by it

    def round(self, method: str) -> dict[str, Any]:
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        report = self._peers[method].round()
        found = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        if report is not None:
            found |= {name: getattr(report, name) for name in ("wire", "exchange", "density", "sent_bytes")}
        return found

    def weights(self, method: str) -> list[Tensor]:
        return self._peers[method].weights

    def digest(self, method: str) -> bytes:
        return kernels.digest_of_all(self.weights(method))


def main(arguments: list[str]) -> None:
    parser = arguments_of("peers", __doc__, RESULTS)
    parser.add_argument("--table", default="peers", help="the name of the CSV")
    parser.add_argument("--numel", type=int, nargs="+", default=NUMEL, help="parameters")
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", type=float, nargs="+", help="Mbit/s; 0: unshaped. Default: loopback")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=USUAL, metavar="METHOD")
    parser.add_argument("--processes", type=int, default=0, help="at once; by default one for each site")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="rounds before those that count")
    parser.add_argument("--quick", action="store_true", help="the two smaller sizes, 2 sites, 5 rounds")
    options = parser.parse_args(arguments)
    if options.processes and options.rates is not None:
        parser.error("--processes is for loopback: groups would share the links of --rates")
    if 0 < options.processes < max(options.sites):
        parser.error(f"{max(options.sites)} sites are more than {options.processes} --processes")
    if options.quick:
        options.numel, options.sites, options.rounds = options.numel[:2], options.sites[:1], 5
    if options.rates is not None:
        if (reason := why_not()) is not None:
            sys.exit(f"no links can be shaped: {reason}")
        options.methods = [name for name in options.methods if name != TORCHFT]

    drawn: dict[str, Any] = {"panel": ("numel", "sites", "rate_mbit"), "x": "method", "y": "p50"}
    drawn |= {"factor": 1e3, "label": "ms per round, on the slowest site"}
    table = Table(options.out / f"{options.table}.csv", CPU, SHOWN, **drawn)
    run = {"run": int(time.time())}
    for numel in options.numel:
        for sites in options.sites:
            for rate in options.rates or [None]:
                groups = options.processes // sites or 1
                rows = measure(groups, sites, numel, rate, options.methods, options.warm_up, options.rounds)
                table.add([run | row for row in rows])
    table.close()


def measure(
    groups: int, sites: int, numel: int, rate: float | None, methods: list[str], warm_up: int, rounds: int
) -> list[Row]:
    """A row for each method.

    Args:
        groups: of so many sites, which run at once.
        rate: of each site's link, in Mbit/s; None: loopback.
    """
    network = None if rate is None else Network()
    total = len(methods) * (warm_up + rounds)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(groups))  # left last: its calls end with the sites
        running: list[Sites] = []
        for _ in range(groups):
            lighthouse = others.start_lighthouse(stack, sites) if TORCHFT in methods else ""
            one = Sites(sites, Contender, numel, methods, lighthouse, timeout=600.0, network=network)
            running.append(stack.enter_context(one))

        def call(what: str, name: str) -> list[list[Any]]:
            """-> by group, by site"""
            return list(pool.map(lambda one: one.call(what, name), running))

        called = f"{numel:,} parameters, {sites} sites"
        progress = stack.enter_context(Progress(called, total=total))
        if network is not None:
            network.shape((rate or 0) * MBIT or None)
        seen: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in methods}
        for number in range(warm_up + rounds):
            for name in methods:
                call("train", name)
                found = call("round", name)
                if number >= warm_up:
                    seen[name] += found
                progress.advance(name if rate is None else f"{name}, {rate_name(rate)}")
        for name in methods:
            if any(len(set(digests)) != 1 for digests in call("digest", name)):
                raise RuntimeError(f"{name}: the sites hold different weights")
    cell = {"numel": numel, "sites": sites, "groups": groups, "rate_mbit": rate}
    rows = [cell | {"method": name, "rounds": rounds} | _row(seen[name]) for name in methods]
    medians = {row["method"]: row["p50"] for row in rows}
    for row in rows:
        for column, other in (("over_torchft", TORCHFT), ("over_all_reduce", ALL_REDUCE)):
            row[column] = row["p50"] / medians[other] if other in medians else None
    return rows


def _row(seen: list[list[dict[str, Any]]]) -> Row:
    """Rounds of a method, by site -> one row."""
    slowest = [max(site["seconds"] for site in sites) for sites in seen]
    wires = [sites[0].get("wire") for sites in seen]
    row = {
        **quantiles(slowest),
        "mean": fmean(slowest),
        "cpu_s": median(fmean(site["cpu_s"] for site in sites) for sites in seen),
        "wire": max(wires, key=wires.count),
        "exchange": seen[-1][0].get("exchange"),
    }
    for name in ("density", "sent_bytes"):
        told = [fmean(site[name] for site in sites) for sites in seen if name in sites[0]]
        row[name] = median(told) if told else None
    return row
