"""A trainer that has published some versions, and the checkpoints that fresh engines are built on."""

from pathlib import Path

from models import change, changed, save, save_changed

from loco.sync import Publisher


def publish(kind: str, folder: Path, versions: int) -> None:
    """Version 1 is a random checkpoint, and each one after it has other values in a fifth of its elements.

    Checkpoints are in folders named for their versions; what is published is under `url`.
    """
    tensors = save(kind, folder / "1")
    publisher = Publisher(tensors, folder / "url")
    publisher.publish()
    for version in range(2, versions + 1):
        for name, new in changed(tensors, change(tensors, seed=version)).items():
            tensors[name].copy_(new)
        publisher.publish()
        save_changed(folder / "1", folder / str(version), tensors)
