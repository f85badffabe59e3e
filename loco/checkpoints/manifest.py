"""The manifest of one rank's part of a checkpoint: what it is of, in a file that a person can read."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..members.view import SiteTopology
from ..round.state import check_same, digest_of
from .protocol import Saveable
from .reshard import same_model

NAME = "manifest.json"


class Position(NamedTuple):
    """Where in a training a checkpoint was saved."""

    round: int  # rounds done
    local_step: int  # inner steps since

    def __str__(self) -> str:
        return f"round {self.round}" + (f", step {self.local_step}" if self.local_step else "")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    round: int
    local_step: int
    save: str  # the same on all ranks that saved together, and in no other save
    world: int
    num_sites: int
    ranks_per_site: int
    site: int
    rank_in_site: int
    name: str = ""  # of a site that comes and goes, whose number may be another one each time
    settings: dict[str, Any]
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

    def refusal(self, optimizer: Saveable) -> str:
        """How this training differs from the one that it is of; "" if any rank of this one may have saved
        it."""
        topology = optimizer.topology
        try:
            check_same("name", self.name, site_name(topology))
            check_same("ranks_per_site", self.ranks_per_site, topology.ranks_per_site)
            check_same("settings", self.settings, vars(optimizer.settings))
            check_same("parameters", self.parameters, optimizer.outer_state.parameters.describe())
        except ValueError as error:
            mine = optimizer.outer_state.parameters.describe()
            divides = self.ranks_per_site, self.parameters
            if divides == (topology.ranks_per_site, mine) or not same_model(self.parameters, mine):
                return str(error)
            return f"{error}. If only the sharding has changed, load(optimizer, reshard=True) loads it"
        return ""

    def check_whole(self, folder: Path) -> None:
        """A ValueError if a data file is not what was written."""
        for name, expected in self.files.items():
            if sha256(folder / name) != expected["sha256"]:
                raise ValueError(f"{folder / name} is not what was written (its SHA-256 differs)")


def manifest_of(state: Mapping[str, Any], *, save: str, format: str, folder: Path) -> Manifest:
    """The manifest of an optimizer's state whose data files lie in `folder`."""
    from loco import __version__  # which is set once loco has imported this

    own = state["loco"]
    described = {field.name: own[field.name] for field in dataclasses.fields(Manifest) if field.name in own}
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())
    }
    described |= {"save": save, "format": format, "files": files, "digest": digest_of(own["anchor"])}
    described["loco"] = __version__
    return Manifest(**described, world=own["num_sites"] * own["ranks_per_site"])


def site_name(topology: SiteTopology) -> str:
    """The name of a site that comes and goes; "" for a site that is known by its number."""
    return topology.seat().get("name", "")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete folder: all data files are there, with the sizes that were written. A
    ValueError says what is damaged."""
    try:
        told = json.loads((folder / NAME).read_text(encoding="utf-8"))
        # Another version of loco may have written more.
        known = {field.name for field in dataclasses.fields(Manifest)}
        manifest = Manifest(**{name: value for name, value in told.items() if name in known})
        sizes = {str(name): int(of["bytes"]) for name, of in manifest.files.items()}
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {NAME}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / NAME} is damaged ({error})") from error
    for name, size in sizes.items():
        path = folder / name
        if Path(name).name != name:
            raise ValueError(f"{folder / NAME} names a file outside its folder: {name}")
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, but {size} were written")
    return manifest


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
