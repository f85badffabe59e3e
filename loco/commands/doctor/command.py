"""The command line: python -m loco doctor [--parameters 7B] [--limit MB] [--patience SECONDS] [--json FILE]

Started on every site, it meets the others as a training does and says what a training would meet. Ends with 0
if nothing was found, 1 with what was found, 130 by Ctrl-C, and 2 with a sentence if it was started wrongly.
"""

import argparse
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ...errors import LocoError
from ...members.fixed import FixedSites
from ...members.sites import Sites
from ..ended import ended
from . import report
from .examination import examine
from .facts import Facts, own_facts

FOUND = 1  # the exit status
_PATIENCE = 120.0  # seconds
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_DESCRIPTION = """\
Find out what a training between sites would meet, before it is started.

Start it on every site at about the same time, with the variables that the training will have:

    export LOCO_SITES=3 LOCO_AT=10.0.0.1:29510     # on all machines; also LOCO_PORTS and so on, if used
    LOCO_SITE=berlin python -m loco doctor --parameters 7B

It meets as a training does, over the same ports and links, and every site prints the same report:

  sites   host, address, versions, kernels (compiled or not), GPUs, cores, and how far clocks are apart
  links   round trip and rate of each pair of sites in either direction, alone; then what each site can send
          while all send to all, which is what a round does
  rounds  what a round of a model of so many parameters will take with each of some settings

and at its end "ready", or what was found, each with what to do: a port that is closed (in either direction),
a name that is taken, versions that differ, a compiler or Triton that is missing, a clock that is wrong.

A site of several ranks may be started by torchrun, as its training is: its ranks then share the links as they
do in a round. Otherwise one process for each site is enough."""
_EPILOG = """\
exit status: 0 nothing was found, 1 something was, 2 it was started wrongly

It takes less than a minute. Transfers grow until one takes about a second, so a link carries what it can in a
few seconds. On a metered link choose a small --limit."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loco doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parameters",
        metavar="N",
        type=_count,
        default=_count("7B"),
        help="of the model whose rounds are predicted: 7B, 350M, 1000000 (default: 7B)",
    )
    parser.add_argument(
        "--limit",
        metavar="MB",
        type=float,
        default=1000.0,
        help="megabytes that each site may send, but for transfers of 64 kB; the least of all sites' counts "
        "(default: 1000)",
    )
    parser.add_argument(
        "--patience",
        metavar="SECONDS",
        type=float,
        help=f"how long to wait for the other sites (default: LOCO_PATIENCE, or {_PATIENCE:g})",
    )
    parser.add_argument("--json", metavar="FILE", help="write what was measured there, too")
    options = parser.parse_args(arguments)
    if not options.limit > 0:
        parser.error(f"--limit must be > 0, got {options.limit:g}")
    return ended(parser.prog, lambda: _examine(options))


def _examine(options: argparse.Namespace) -> int:
    logging.basicConfig(format="%(message)s")  # what is waited for
    # With a lighthouse the sites would meet elsewhere; and all are to come, however few are enough later.
    if os.environ.get("LOCO_LIGHTHOUSE"):
        raise ValueError(
            "a lighthouse does not tell who all sites are: for the doctor leave LOCO_LIGHTHOUSE out, and set "
            "LOCO_AT to an address of one of them, the same on all sites"
        )
    os.environ.pop("LOCO_AT_LEAST", None)
    patience = options.patience or (None if os.environ.get("LOCO_PATIENCE") else _PATIENCE)
    mine = own_facts(os.environ.get("LOCO_SITE", "?"))
    try:
        with _warnings() as warned:
            sites = Sites(patience=patience)
        mine = replace(mine, problems=(*mine.problems, *(f"{mine.name}: {text}" for text in warned)))
        try:
            problems = _with_all(sites, mine, options)
        finally:
            sites.close()
    except LocoError as error:
        problems = [str(error), *mine.problems]
    if os.environ.get("RANK", "0") == "0":  # the others would say the same
        print(report.verdict(problems), flush=True)
    return FOUND if problems else 0


def _with_all(sites: Sites, mine: Facts, options: argparse.Namespace) -> Sequence[str]:
    """What was found once all sites have met."""

    def say(text: str) -> None:
        if sites.rank_in_site == 0:  # the others would say the same
            print(text, flush=True)

    found = examine(sites, mine, parameters=options.parameters, limit=options.limit, say=say)
    say(report.text(found))
    if options.json and sites.rank_in_site == 0:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found.as_json(), file, indent=1)
    return found.problems


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the sites warn of when they have met: not as it comes, but as findings."""
    said: list[str] = []
    logger, handler = logging.getLogger(FixedSites.__module__), logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    before, logger.propagate = logger.propagate, False
    try:
        yield said
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


def _count(text: str) -> int:
    """7B, 350M or 1000000."""
    unit = _SUFFIXES.get(text[-1:].upper(), 0.0)
    try:
        count = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        count = 0.0
    if not 1 <= count < 1e15:
        raise argparse.ArgumentTypeError(f"a number of parameters is like 7B, 350M or 1000000; got {text!r}")
    return round(count)
