"""A trainer that has published some versions, and the checkpoints that fresh engines are built on."""

from pathlib import Path

import torch
from models import change, changed, save, save_changed
from torch import Tensor

from loco.sync import Publisher

LR = 1.2e-6  # at which a step of noise changes 1% of BF16 weights N(0, 0.02), and the first few up to 2.5%


def publish(kind: str, folder: Path, versions: int) -> None:
    """Version 1 is a random checkpoint, and each one after it has other values in a fifth of its elements.

    Checkpoints are in folders named for their versions; what is published is under `url`.
    """
    tensors = save(kind, folder / "1")
    publisher = Publisher(tensors, folder / "url", dtype=lambda name, tensor: tensor.dtype)
    publisher.publish()
    for version in range(2, versions + 1):
        for name, new in changed(tensors, change(tensors, seed=version)).items():
            tensors[name].copy_(new)
        publisher.publish()
        save_changed(folder / "1", folder / str(version), tensors)


class NoisyTrainer:
    """Publishes each step of an Adam whose gradients are noise. Version 1 is the checkpoint in folder `1`."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._folder, self.weights = folder, save(kind, folder / "1")
        self._noise = torch.Generator().manual_seed(0)
        self._masters = {name: self._in_its_cell(tensor) for name, tensor in self.weights.items()}
        self._adam = torch.optim.Adam(self._masters.values(), lr=LR)
        self._publisher = Publisher(self._masters, folder / "url")
        self._publisher.publish()

    def _in_its_cell(self, tensor: Tensor) -> Tensor:
        """FP32 values, each somewhere among those that are rounded to the BF16 one."""
        off_center = torch.rand(tensor.shape, generator=self._noise) - 0.5
        return tensor.float() * (1 + off_center * 2**-8)

    def step(self) -> float:
        """-> which share of the weights it changes"""
        for master in self._masters.values():
            master.grad = torch.randn(master.shape, generator=self._noise)
        self._adam.step()
        self.weights = {name: master.bfloat16() for name, master in self._masters.items()}
        return self._publisher.publish().entries / sum(one.numel() for one in self.weights.values())

    def save(self, name: str) -> None:
        """The weights as they are now, as a checkpoint in a folder of this name."""
        save_changed(self._folder / "1", self._folder / name, self.weights)
