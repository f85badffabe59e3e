"""How all ranks load a checkpoint whose parameters were sharded otherwise, together or not at all."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import CheckpointError
from ..round.outer.state import check_same
from .directory import CheckpointDirectory
from .protocol import Saveable
from .rank_manifest import Position, RankManifest, site_name
from .reshard import resharded, same_model
from .restore import Resumed, in_flight, load_together, read_folder, read_together, together


@dataclass(frozen=True)
class ReshardedLoad:
    """A call of `Checkpoints.load` with `reshard`: see there."""

    optimizer: Saveable
    directory: CheckpointDirectory

    def run(self, label: str) -> tuple[Resumed | None, set[str]]:
        """-> what was loaded, and the names of all saves that are of this training."""
        optimizer = self.optimizer
        own: dict[tuple[Position, str], list[RankManifest]] = {}

        def look(note: dict[str, Any]) -> None:
            found, _ = self.directory.whole(of_all_ranks=True)
            for manifest in found:
                self._check(manifest)
                if manifest.site == optimizer.topology.site:
                    own.setdefault((manifest.position, manifest.save), []).append(manifest)
            note["saves"] = [[*m.position, m.save] for m in found]
            note["whole"] = [
                [*position, save] for (position, save), m in own.items() if len(m) == m[0].ranks_per_site
            ]

        _, notes = together(optimizer.topology.rendezvous, f"looking for checkpoints to reshard{label}", look)
        names = {save for note in notes for *_, save in note["saves"]}
        of_all = [one for one in notes[0]["whole"] if all(one in note["whole"] for note in notes)]
        if not of_all and not names:
            return None, names
        if not of_all:
            raise CheckpointError(
                f"{self.directory.folder} holds no checkpoint of which every rank sees the files of all "
                f"ranks of its site: share the folder among the ranks of a site"
            )
        for round, local_step, save in sorted(of_all, reverse=True):
            position = Position(round, local_step)
            ranks = sorted(manifest.rank for manifest in own[position, save])
            read = partial(self._read, position, ranks)
            trees, is_whole = read_together(optimizer.topology.rendezvous, position, read)
            if is_whole and any(tree["optimizer"]["loco"].get("ahead") is not None for tree in trees):
                raise in_flight(position)  # on all ranks: those of all sites have crossed the same boundary
            if is_whole:
                make = partial(resharded, trees, optimizer.outer_state)
                return load_together(optimizer, position, make), names
        raise CheckpointError(f"{self.directory.folder} holds no checkpoint that is whole on all ranks")

    def _read(self, position: Position, ranks: list[int], note: dict[str, Any]) -> list[dict[str, Any]]:
        note["damaged"] = ""
        try:
            return [read_folder(self.directory.path(position, rank)) for rank in ranks]
        except CheckpointError as error:
            note["damaged"] = str(error)
            return []

    def _check(self, manifest: RankManifest) -> None:
        """A ValueError if that is not of this training, or of another number of sites."""
        topology, mine = self.optimizer.topology, self.optimizer.outer_state.parameters.describe()
        check_same("name", manifest.name, site_name(topology))
        check_same("num_sites", manifest.num_sites, topology.seat()["num_sites"])
        check_same("settings", manifest.settings, vars(self.optimizer.settings))
        if not same_model(manifest.parameters, mine):
            check_same("parameters", [p[:3] for p in manifest.parameters], [p[:3] for p in mine])
