"""The manifest of one rank's part of a checkpoint: what it is of, in a file that a person can read."""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from ..logs import Progress
from ..members.view import SiteTopology
from ..round.outer.state import check_same, digest_of
from ..version import VERSION
from .formats import opened
from .protocol import Saveable
from .reshard import same_model

_logger = logging.getLogger(__name__)
NAME = "manifest.json"
_MOST_BYTES = 1 << 25  # of the manifest: of a hundred thousand parameters
_MOST_SITES, _MOST_RANKS = 1 << 16, 1 << 20


class Position(NamedTuple):
    """Where in a training a checkpoint was saved."""

    round: int  # rounds done
    local_step: int  # inner steps since; where rounds overlap there may have been a boundary among them

    @staticmethod
    def of(own: Mapping[str, Any]) -> "Position":
        """Of what a state dict has under "loco"."""
        return Position(own["round"], own.get("steps_since_round", own["local_step"]))

    def __str__(self) -> str:
        return f"round {self.round}" + (f", step {self.local_step}" if self.local_step else "")


@dataclass(frozen=True, kw_only=True)
class RankManifest:
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
    format: str  # of the data files: "torch", or "dcp" of earlier versions
    files: dict[str, dict[str, Any]]  # by name: bytes, sha256
    loco: str  # the version that wrote it

    @property
    def position(self) -> Position:
        return Position(self.round, self.local_step)

    @property
    def rank(self) -> int:
        return self.site * self.ranks_per_site + self.rank_in_site

    def write(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        if len(text) > _MOST_BYTES:
            raise ValueError(f"a {NAME} may have {_MOST_BYTES} bytes, and this one has {len(text)}")
        (folder / NAME).write_text(text, encoding="utf-8")

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

    def open(self, folder: Path, name: str) -> BufferedReader:
        """A data file; a ValueError if it is none of those that were written, or has another size."""
        if name not in self.files:
            raise ValueError(f"{folder / NAME} does not list {name}, which is to be read")
        file = opened(folder / name)
        found, written = os.fstat(file.fileno()).st_size, self.files[name]["bytes"]
        if found != written:
            file.close()
            raise ValueError(f"{folder / name} has {found} bytes, but {written} were written")
        return file

    def check_whole(self, folder: Path) -> None:
        """A ValueError if a data file is not what was written."""
        for name, expected in self.files.items():
            with self.open(folder, name) as file:
                if _sha256(file) != expected["sha256"]:
                    raise ValueError(f"{folder / name} is not what was written (its SHA-256 differs)")

    def check(self) -> None:
        """A ValueError if a field is not what could have been written."""
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), get_origin(field.type) or field.type
            if type(value) is not kind or (kind is str and len(value) > 1000):
                raise ValueError(f"{field.name} is {value!r:.100}")
            if kind is int and not 0 <= value < 1 << 32:
                raise ValueError(f"{field.name} is {value}")
        sites, each = self.num_sites, self.ranks_per_site
        if sites > _MOST_SITES or sites * each > _MOST_RANKS or self.world != sites * each:
            raise ValueError(f"{self.world} ranks, of {sites} sites of {each} ranks")
        if self.site >= sites or self.rank_in_site >= each:
            raise ValueError(
                f"rank {self.rank_in_site} of site {self.site}, of {sites} sites of {each} ranks"
            )
        if not all(type(one) is list for one in self.parameters):
            raise ValueError("parameters are not a list of lists")
        for name, of in self.files.items():
            if Path(name).name != name or not name.isprintable():
                raise ValueError(f"it names a file outside its folder: {name!r}")
            if type(of) is not dict or type(of["bytes"]) is not int or type(of["sha256"]) is not str:
                raise ValueError(f"it does not say what {name} is")
        if _nests(vars(self), 16):
            raise ValueError("it nests more than 16 deep")


def manifest_of(state: Mapping[str, Any], *, save: str, folder: Path) -> RankManifest:
    """The manifest of an optimizer's state whose data files lie in `folder`."""
    own = state["loco"]
    described = {
        field.name: own[field.name] for field in dataclasses.fields(RankManifest) if field.name in own
    }
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())
    }
    described["local_step"] = Position.of(own).local_step
    described |= {"save": save, "format": "torch", "files": files, "digest": digest_of(own["anchor"])}
    described["loco"] = VERSION
    return RankManifest(**described, world=own["num_sites"] * own["ranks_per_site"])


def site_name(topology: SiteTopology) -> str:
    """The name of a site that comes and goes; "" for a site that is known by its number."""
    return topology.seat().get("name", "")


def read_manifest(folder: Path) -> RankManifest:
    """The manifest of a complete folder: all data files are there, with the sizes that were written. A
    ValueError or an OSError says what is damaged."""
    try:
        with opened(folder / NAME) as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        told = json.loads(text)
        # Another version of loco may have written more.
        known = {field.name for field in dataclasses.fields(RankManifest)}
        manifest = RankManifest(**{name: value for name, value in told.items() if name in known})
        manifest.check()
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {NAME}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / NAME} is damaged ({error})") from error
    for name in manifest.files:
        try:
            manifest.open(folder, name).close()
        except FileNotFoundError:
            raise ValueError(f"{folder / name} is missing") from None
    return manifest


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return _sha256(file)


def _sha256(file: BufferedReader) -> str:
    descriptor = file.fileno()
    size, what = os.fstat(descriptor).st_size, f"checking {file.name}"
    with Progress(_logger, what, size, lambda: os.lseek(descriptor, 0, os.SEEK_CUR)):
        return hashlib.file_digest(file, "sha256").hexdigest()


def _nests(value: Any, depth: int) -> bool:
    """Whether dicts and lists lie more than so deep in each other."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_nests(one, depth - 1) for one in inside)
