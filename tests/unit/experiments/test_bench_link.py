"""The link benchmark: its arithmetic, and that it leaves no process and no network behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from processes import gone
from selection import BASELINES, INTERRUPTIONS

from experiments.bench.processes.namespaces import MBIT, Network, why_not
from experiments.bench.processes.sites import Sites
from experiments.bench.projection import Model
from experiments.bench.simulation.crowd import Classes, Crowd, by_class
from experiments.bench.simulation.simulator import (
    GOODPUT,
    Code,
    Setting,
    Work,
    gather_bytes,
    gather_seconds,
    owner_bytes,
    owner_seconds,
    ring_bytes,
    ring_seconds,
)
from loco.wire.framing import MOST

FLOAT32 = Code(sizes={1.0: 4.0})
needs_networks = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


# ---- arithmetic ----


def test_a_ring_sends_what_is_known() -> None:
    at = Setting(sites=4, numel=1_000_000, rate=100 * MBIT)
    assert ring_bytes(at) == 6_000_000  # 2 · 3/4 · 4 bytes
    assert ring_seconds(at, steps=8) == pytest.approx(8 * 6e6 / (12.5e6 * GOODPUT))


@pytest.mark.parametrize("sites", [2, 4, 16])
def test_dense_diloco_takes_its_bytes_over_the_rate(sites: int) -> None:
    at = Setting(sites=sites, numel=50 * sites * MOST, rate=1000 * MBIT)
    assert owner_bytes(FLOAT32, at) == pytest.approx(ring_bytes(at), rel=1e-3)
    # Of a slice's 50 frames the first few sums wait for their entries, with nothing else to send.
    assert owner_seconds(FLOAT32, at) == pytest.approx(ring_bytes(at) / (125e6 * GOODPUT), rel=0.1)


def test_a_pipeline_costs_the_slower_of_coding_and_sending() -> None:
    coding = Work(parameter=1e-9)
    code = Code(sizes={0.05: 2.0, 0.5: 2.0}, seal=coding, open=coding)
    at = Setting(sites=4, numel=125 * MOST, rate=100 * MBIT, density=0.1)
    sending, alone = gather_bytes(code, at) / (at.rate * GOODPUT), 4 * at.numel * 1e-9
    assert gather_seconds(code, at) == pytest.approx(max(sending, alone), rel=0.01)
    fast_link = replace(at, rate=1e15)
    assert gather_seconds(code, fast_link) == pytest.approx(alone, rel=0.01)
    two_cores = replace(fast_link, cores=2.0)
    assert gather_seconds(code, two_cores) == pytest.approx(alone / 2, rel=0.01)


def test_gathering_grows_with_the_sites_and_owner_reducing_does_not() -> None:
    code = Code(sizes={0.05: 2.0, 0.5: 2.0})
    few, many = (Setting(sites=s, numel=64 * MOST, rate=1e8, density=0.06, union=0.2) for s in (4, 64))
    assert gather_seconds(code, many) / gather_seconds(code, few) == pytest.approx(63 / 3, rel=0.01)
    assert owner_bytes(code, many) / owner_bytes(code, few) == pytest.approx((63 / 64) / (3 / 4), rel=0.01)


def test_sites_that_send_the_same_elements_have_a_small_union() -> None:
    alike = Classes(np.array([0.1, 0.9]), np.array([1.0, 0.0]))
    assert alike.density() == pytest.approx(0.1)
    assert alike.union(256) == pytest.approx(0.1)
    independent = Classes(np.array([1.0]), np.array([0.1]))
    assert independent.union(2) == pytest.approx(0.19)


def test_unions_by_class_are_those_of_simulated_sites() -> None:
    crowd = Crowd(8, 60_000, rounds=4)
    classes = by_class(crowd)
    for few in (2, 4, 8):
        simulated = crowd.sums(few).values.numel() / crowd.numel
        assert classes.union(few) == pytest.approx(simulated, rel=0.06)
        assert 1 - (1 - classes.density()) ** few > 1.1 * simulated  # what independent elements would say


@pytest.mark.check(BASELINES)
def test_a_measurement_predicts_bytes_of_any_number_of_sites(tmp_path: Path) -> None:
    model = Model.of(tmp_path, 1 << 15, again=True)
    few, many = (model.setting(sites, 1e6, 100 * MBIT) for sites in (2, 256))
    assert few.density < few.union < many.union < 1
    assert model.bytes("owner", "tight", many) < model.bytes("dense", "float32", many)
    assert model.bytes("gather", "tight", many) > model.bytes("owner", "tight", many)


# ---- what is left behind ----


class Idle:
    def __init__(self, site: int) -> None:
        self.site = site

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        if self.site == 1:
            raise ValueError("on purpose")
        time.sleep(60)


def hub_of(sites: Sites) -> "subprocess.Popen[bytes]":
    assert sites.network is not None
    return sites.network._hub


PROGRAM = """
import signal
import time
from experiments.bench.processes.namespaces import Network
from experiments.bench.processes.sites import Sites
from test_bench_link import Idle, hub_of

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background ignores it
    with Sites(2, Idle, network=Network()) as sites:
        print(*sites.call("pid"), hub_of(sites).pid, flush=True)
        time.sleep(60)
"""


@pytest.mark.root
@needs_networks
def test_nothing_is_left_after_a_run() -> None:
    with Sites(2, Idle, network=Network()) as sites:
        pids = [*sites.call("pid"), hub_of(sites).pid]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert gone(pids)


@pytest.mark.root
@needs_networks
def test_nothing_is_left_after_an_error() -> None:
    pids: list[int] = []

    def fail() -> None:
        with Sites(2, Idle, network=Network()) as sites:
            pids.extend([*sites.call("pid"), hub_of(sites).pid])
            sites.call("fail")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert len(pids) == 3
    assert gone(pids)


@pytest.mark.check(INTERRUPTIONS)
@pytest.mark.root
@needs_networks
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(how: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join(str(Path(__file__).parents[k]) for k in (0, 2, 3))
    with subprocess.Popen(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        # As a terminal does: to the whole group of processes. The others only to the one.
        (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
        process.wait(timeout=60)
    assert gone(pids)
