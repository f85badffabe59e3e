"""A loop of Accelerate's: prepare, accumulate, clip_grad_norm_, save_state, load_state."""

import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from claims import (
    ended_alike,
    evaluated_theta,
    learned_separately,
    resumed,
    same_training,
    sent_its_rounds_only,
)
from sites import launch_worlds
from tiny import Told, as_one_rank, finish, llama, look, reduce_gradients, site_tokens, tokens, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import loco
from loco.integrations.accelerate import attach

STEPS, BATCH, PIECES, H = 10, 4, 2, 4


def accelerate_site(folder: str, mixed_precision: str = "no", resume: bool = False) -> Told:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PIECES, mixed_precision=mixed_precision)
    model = llama()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = site_tokens(BATCH * PIECES * STEPS * accelerator.num_processes)
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = attach(accelerator, optimizer, sync_every=H)
    checkpoint = f"{folder}/{os.environ['LOCO_SITE']}"
    if resume:
        accelerator.load_state(checkpoint)
        loader = accelerator.skip_first_batches(loader, 6 * PIECES)
    told = watch(handle)
    losses = []
    for k, (rows,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=rows, labels=rows).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if not resume and k == 6 * PIECES - 1:
            handle.eval()
            losses.append(loss_of(model))
            look(told, handle)
            handle.train()
            accelerator.save_state(checkpoint)
    handle.sync()
    told.more["losses"] = losses
    return finish(told, handle)


def plain_site(mixed_precision: str, shards: bool = False) -> Told:
    model = llama()
    model.train()
    topology = loco.Sites()
    net, rank, size = as_one_rank(model, shards=shards)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = loco.PulseLoCo(inner, sync_every=H, topology=topology)
    told = watch(optimizer)
    losses = []
    batches = iter(site_tokens(BATCH * PIECES * STEPS * size).split(BATCH)[rank::size])
    for step in range(STEPS):
        for k in range(PIECES):
            rows = next(batches)
            reduce_gradients(net, k == PIECES - 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
                loss = net(input_ids=rows, labels=rows).loss
            (loss / PIECES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step == 5 and size == 1:  # a rank of several has a part of θ
            shown = llama()
            nn.utils.vector_to_parameters(optimizer.outer_state.anchor, shown.parameters())
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
                losses.append(loss_of(shown))
    optimizer.sync()
    told.more["losses"] = losses
    return finish(told, optimizer)


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    rows = tokens(7, 8)
    return float(model(input_ids=rows, labels=rows).loss)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_it_does_what_a_plain_loop_does_evaluates_theta_and_resumes(
    mixed_precision: str, tmp_path: Path
) -> None:
    (berlin,), (paris,) = launch_worlds(accelerate_site, str(tmp_path), mixed_precision)
    learned_separately(berlin, paris)
    ended_alike(berlin, paris)
    sent_its_rounds_only(berlin, paris, rounds=3)
    assert berlin.more == paris.more
    for told in (berlin, paris):
        evaluated_theta(told)
    for found, expected in zip((berlin, paris), launch_worlds(plain_site, mixed_precision), strict=True):
        same_training(found, expected[0])
        assert found.more == expected[0].more
    again = launch_worlds(accelerate_site, str(tmp_path), mixed_precision, True)
    for found, whole in zip(again, (berlin, paris), strict=True):
        resumed(found[0], whole, after=6)
