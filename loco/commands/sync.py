"""The command line: python -m loco sync serve DIR …, and ls, stat, verify, export, pull URL …

Ends with 0 when it is done, or a server is stopped by SIGTERM; 1 if `verify` found damage; 130 by Ctrl-C; and
2 with a sentence if it can't.
"""

import argparse
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ..sync.archive import Archive, Version
from ..sync.storage.headers import TOKEN_VARIABLE
from ..sync.storage.server import DEFAULT_PORT, serve
from .ended import ended

_FILES = 4096  # open at once: connections and what they read
_DAMAGED = 1  # the exit status


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loco sync", description="Weights for inference workers.")
    commands = parser.add_subparsers(metavar="command", required=True)
    _add_serve(commands.add_parser("serve", help="serve a store over HTTP, or relay another one"))
    _add(commands, "ls", _list, "list the versions of a store, a line each")
    _add(commands, "stat", _stat, "say what a store holds, in a few lines")
    _add(commands, "verify", _verify, "read every file, and bring memory to every version in turn")
    exporting = _add(commands, "export", _export, "write a version's weights to a file of safetensors")
    exporting.add_argument("file", metavar="FILE", type=Path, help="to write, e.g. model.safetensors")
    exporting.add_argument("--version", metavar="N", type=int, help="by default the newest")
    pulling = _add(commands, "pull", _pull, "copy what another store lacks, e.g. to a local folder")
    pulling.add_argument("to", metavar="DIR", help="a folder, or the URL of a store that can be written")
    options = parser.parse_args(arguments)
    return ended(parser.prog, lambda: options.run(options))


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    what: str,
) -> argparse.ArgumentParser:
    """A command about the store at a URL."""
    parser = commands.add_parser(name, help=what)
    parser.description = f"{what[0].upper()}{what[1:]}. A server may ask for the token in {TOKEN_VARIABLE}."
    parser.add_argument("url", metavar="URL", help="a folder, s3://…, or the http:// address of `sync serve`")
    parser.add_argument(
        "--key-file", metavar="FILE", type=Path, help="with the key that seals the versions, if there is one"
    )
    parser.set_defaults(run=run)
    return parser


def _archive(options: argparse.Namespace) -> Archive:
    return Archive(options.url, key=options.key_file.read_bytes() if options.key_file else None)


def _list(options: argparse.Namespace) -> int:
    for version in _archive(options).versions():
        print(_line(version))
    return 0


def _line(version: Version) -> str:
    kind = "anchor" if version.is_anchor else "patch"
    changed = "" if version.changed is None else f", {version.changed:,} elements changed"
    by = f", by {len(version.manifests)} publishers" if len(version.manifests) > 1 else ""
    return f"version {version.number}: {kind}, {version.bytes:,} bytes{changed}{by}"


def _stat(options: argparse.Namespace) -> int:
    archive = _archive(options)
    versions = archive.versions()
    first, last = versions[0], versions[-1]
    layout = archive.layout(last)
    anchors = [version.number for version in versions if version.is_anchor]
    print(f"versions: {len(versions)}, from {first.number} to {last.number}")
    print(f"anchors:  {', '.join(map(str, anchors)) or 'none'}")
    print(f"bytes:    {sum(version.bytes for version in versions):,}")
    print(f"weights:  {len(layout)} tensors of {sum(t.numel() for t in layout.values()):,} elements")
    print(f"training: {last.manifests[0].training}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    damaged = list(_archive(options).verify(lambda what: print(what, flush=True)))
    for sentence in damaged:
        print(sentence, file=sys.stderr)
    print("all is what was published" if not damaged else f"{len(damaged)} are damaged")
    return _DAMAGED if damaged else 0


def _export(options: argparse.Namespace) -> int:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ValueError("export needs safetensors: pip install safetensors") from error
    version, weights = _archive(options).tensors(options.version)
    save_file(weights, options.file, {"format": "pt", "loco_version": str(version)})
    print(f"version {version}: {len(weights)} tensors in {options.file}")
    return 0


def _pull(options: argparse.Namespace) -> int:
    copied = _archive(options).copy_to(options.to, lambda path: print(path, flush=True))
    print(f"{copied} files are new in {options.to}")
    return 0


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = f"Serve a store over HTTP. Clients need the token in {TOKEN_VARIABLE}, if it is set."
    parser.add_argument("folder", metavar="DIR", help="the files, or where a relay keeps what it downloaded")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="0: any free one (default: %(default)s)"
    )
    parser.add_argument(
        "--upstream", metavar="URL", help="relay this store: one download for all who ask here"
    )
    parser.add_argument("--writable", action="store_true", help="let clients write and delete files")
    parser.add_argument("--certfile", metavar="PEM", help="speak HTTPS, with this certificate")
    parser.add_argument(
        "--keyfile", metavar="PEM", help="the certificate's key, if it is in a file of its own"
    )
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _FILES)), hard))  # for many clients
    with serve(
        options.folder,
        options.host,
        options.port,
        upstream=options.upstream,
        writable=options.writable,
        certfile=options.certfile,
        keyfile=options.keyfile,
    ) as server:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as a container is stopped
        print(f"serving {options.folder} at {server.url}", flush=True)
        threading.Event().wait()
    return 0
