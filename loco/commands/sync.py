"""The command line: python -m loco sync serve DIR [--host HOST] [--port PORT] [--upstream URL] [--writable]
                                              [--certfile PEM [--keyfile PEM]]

Ends with 0 when it is stopped by SIGTERM, 130 by Ctrl-C, and 2 with a sentence if it can't start.
"""

import argparse
import resource
import signal
import sys
import threading
from collections.abc import Sequence

from ..sync.storage.bearer import TOKEN_VARIABLE
from ..sync.storage.server import DEFAULT_PORT, serve
from .ended import ended

_FILES = 4096  # open at once: connections and what they read


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loco sync", description="Weights for inference workers.")
    commands = parser.add_subparsers(metavar="command", required=True)
    _add_serve(commands.add_parser("serve", help="serve a store over HTTP, or relay another one"))
    options = parser.parse_args(arguments)
    return ended(parser.prog, lambda: options.run(options))


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
