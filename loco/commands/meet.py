"""The command line: python -m loco meet HOST:PORT

Hosts the store at which sites meet (LOCO_AT), so that none of them has to. Ends with 0 when it is stopped by
SIGTERM, 130 by Ctrl-C, and 2 with a sentence if it can't start.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from ..coordination.hosted_store import host_at
from ..coordination.store_client import host_and_port
from .ended import ended


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loco meet",
        description="Host the store at which the sites of a run meet. It lies in memory: if this ends, "
        "sites that come and go wait until it is back, and sites that stay the same end, to resume from "
        "their checkpoints. Runs that overlap in time need an address each.",
    )
    parser.add_argument("address", metavar="HOST:PORT", help="where to listen, e.g. 0.0.0.0:29510")
    options = parser.parse_args(arguments)
    return ended(parser.prog, lambda: _host(options.address))


def _host(address: str) -> int:
    host, port = host_and_port(address)
    if host_at(host, port) is None:
        raise ValueError(f"{address} is not an address of this machine, or is in use")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as a container is stopped
    print(f"sites can meet at port {port} (LOCO_AT=<this machine>:{port}); Ctrl-C ends it", flush=True)
    threading.Event().wait()
    return 0
