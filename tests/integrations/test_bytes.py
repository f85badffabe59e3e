"""What sites under the Trainer send is their rounds and nothing else, as the kernel counts it."""

import time
from itertools import pairwise
from typing import Any

import pytest
from sites import launch_worlds
from test_trainer import BATCH, STEPS, H, arguments
from tiny import dataset, llama, site_tokens
from transformers import Trainer, TrainerCallback

from experiments.training.ledger import TcpBytes, tcp_bytes
from loco.integrations.transformers import LocoCallback


class Count(TrainerCallback):
    """Notes the kernel's count at the end of each step, and what the round in it reported."""

    def __init__(self, rounds: LocoCallback) -> None:
        self._rounds = rounds
        self.noted: list[tuple[float, TcpBytes, int]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        handle, counted = self._rounds.handle, tcp_bytes()
        assert handle is not None
        assert counted is not None
        report = handle.last_report if handle.local_step == 0 else None
        self.noted.append((time.monotonic(), counted, 0 if report is None else report.sent_bytes))


def counted_site(folder: str) -> list[tuple[float, TcpBytes, int]]:
    rounds = LocoCallback(sync_every=H)
    count = Count(rounds)
    rows = dataset(site_tokens(BATCH * STEPS))
    trainer = Trainer(llama(), arguments(folder), train_dataset=rows, callbacks=[rounds, count])
    trainer.train()
    return count.noted


@pytest.mark.skipif(tcp_bytes() is None, reason="needs a kernel that counts each socket's bytes")
def test_the_kernel_counts_the_rounds_bytes_and_heartbeats(tmp_path: Any) -> None:
    dense = 4 * sum(p.numel() for p in llama().parameters())
    for [noted] in launch_worlds(counted_site, str(tmp_path)):
        assert sum(reported > 0 for *_, reported in noted) >= STEPS // H
        # At the end of the last round the other site may have closed its connections to this one's store, and
        # the kernel has forgotten what was sent over them.
        for (began, before, _), (ended, after, reported) in pairwise(noted[:-1]):
            other = (after - before).sent - reported
            # Around a round the length before each message, the verdict, and what a heartbeat takes.
            assert 0 <= other < (4000 if reported else 0) + 1000 * (1 + ended - began)
            assert other < dense / 10
