"""What a rank's part of a checkpoint says of itself, in a file that a person can read."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..members.fixed import Topology
from ..round.loop import OuterLoop
from ..round.state import check_same, digest_of, identity
from ..wire.header import VERSION

NAME = "manifest.json"


class Position(NamedTuple):
    """Where in a training a checkpoint was taken."""

    round: int  # rounds done
    local_step: int  # inner steps since

    def __str__(self) -> str:
        return f"round {self.round}" + (f", step {self.local_step}" if self.local_step else "")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    round: int
    local_step: int
    save: str  # the same on all ranks that saved together, and on no others
    world: int
    num_sites: int
    ranks_per_site: int
    site: int
    rank_in_site: int
    name: str = ""  # of a site that comes and goes, which its number does not tell
    settings: dict[str, Any]
    wire_version: int
    parameters: list[Any]  # names, shapes and dtypes
    digest: str  # of this rank's slice of θ
    format: str  # of the data files
    files: dict[str, dict[str, Any]]  # by name: bytes, sha256
    loco: str  # the version that wrote it

    @property
    def position(self) -> Position:
        return Position(self.round, self.local_step)

    @property
    def rank(self) -> int:
        return self.site * self.ranks_per_site + self.rank_in_site

    def write(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / NAME).write_text(text + "\n", encoding="utf-8")

    def check_belongs(self, outer: OuterLoop) -> None:
        """Refuse what is not of this training, whichever of its ranks saved it.

        Raises:
            ValueError: says what differs.
        """
        check_same("wire version", self.wire_version, VERSION)
        check_same("name", self.name, name_of(outer.topology))
        check_same("ranks_per_site", self.ranks_per_site, outer.topology.ranks_per_site)
        check_same("settings", self.settings, vars(outer.settings))
        check_same("parameters", self.parameters, outer.parameters.describe())

    def check_whole(self, folder: Path) -> None:
        """The data files are what was written.

        Raises:
            ValueError: one is not, or is missing.
        """
        for name, expected in self.files.items():
            if sha256(folder / name) != expected["sha256"]:
                raise ValueError(f"{folder / name} is not what was written (its SHA-256 differs)")


def manifest_of(
    outer: OuterLoop, state: Mapping[str, Any], *, save: str, format: str, folder: Path
) -> Manifest:
    """Of a state of `outer` whose data files lie in `folder`."""
    from loco import __version__  # which is set once loco has imported this

    who, mine = identity(outer), state["loco"]
    return Manifest(
        round=mine["round"],
        local_step=mine["local_step"],
        save=save,
        world=who["num_sites"] * who["ranks_per_site"],
        **who,
        settings=mine["settings"],
        wire_version=VERSION,
        digest=digest_of(mine["anchor"]),
        format=format,
        files={
            path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in sorted(folder.iterdir())
        },
        loco=__version__,
    )


def name_of(topology: Topology) -> str:
    """What a manifest calls this site; "" if its number says who it is."""
    return topology.seat().get("name", "")


def read_manifest(folder: Path) -> Manifest:
    """A rank's folder, found to be complete: all files are there, with their sizes.

    Raises:
        ValueError: it is damaged; says how.
        OSError: it can't be read.
    """
    try:
        manifest = Manifest(**json.loads((folder / NAME).read_text(encoding="utf-8")))
        sizes = {str(name): int(of["bytes"]) for name, of in manifest.files.items()}
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {NAME}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / NAME} is damaged ({error})") from error
    for name, size in sizes.items():
        path = folder / name
        if Path(name).name != name:
            raise ValueError(f"{folder / NAME} names a file outside of its folder: {name}")
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, and {size} were written")
    return manifest


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
