"""From a command line to ranks that train, and from every mistake to one sentence.

A program either runs as one of torchrun's ranks (`RANK` is set), or it launches its own ranks through
torchrun's Python interface (`nproc=4`). Either way a mistake ends in one sentence on stderr: the first
rank's, not every rank's traceback, which are in the ranks' logs.

Exit status: 0 when all is done; 1 after any error, upon which torchrun restarts all ranks (`--max-restarts`);
130 after Ctrl-C. A rank that is killed ends with its signal, as ever, and one whose launcher was killed ends.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Generic

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

import loco
from experiments.errors import ExperimentError
from experiments.processes.logs import RankLog
from experiments.processes.orphans import die_with_parent
from experiments.settings.merging import load, to_yaml
from experiments.settings.rounds import C

NOTHING_WRITTEN = "no results were written"
_OWN_LAUNCH = "LOCO_LAUNCHED_BY_EXPERIMENTS"  # of the parent, which will say what went wrong: its id
_PATIENCE = 5.0  # seconds
_INTERRUPTED = 130  # what shells report after Ctrl-C
_log: RankLog | None = None  # of this process, if it is a rank
_WARM_START_PATIENCE = timedelta(minutes=30)  # the other ranks wait while rank 0 pre-trains


@dataclass(frozen=True, kw_only=True)
class Program(Generic[C]):
    """What `python -m module key=value…` is made of."""

    module: str
    about: str
    config: type[C]
    prepare: Callable[[C], Any]  # finds mistakes before anything is launched; raises ExperimentError
    worlds: Callable[[C], list[int]]  # numbers of ranks to launch, one after the other
    work: Callable[[C, torch.device], None]  # what every rank does
    finish: Callable[[C], None] = lambda _: None  # what one process does at the end
    interrupted: Callable[[C], str] = lambda _: NOTHING_WRITTEN  # what Ctrl-C leaves
    folder: Callable[[C], Path] | None = None  # of the results; the ranks' logs go to its logs/

    def left_by(self, config: C | None) -> str:
        """What Ctrl-C leaves; without a configuration nothing had begun."""
        return NOTHING_WRITTEN if config is None else self.interrupted(config)


def main(program: Program[C]) -> int:
    """Run `program` with the command line's arguments; returns the exit status."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(f"{program.about}\nKeys and their defaults:\n\n{to_yaml(program.config())}")
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # see experiments/__init__.py
    config = None
    try:
        if "RANK" in os.environ:
            return _be_a_rank(program, arguments)
        config = load(program.config, arguments)
        line = f"torchrun --nproc-per-node 4 -m {program.module} {' '.join(arguments)}".rstrip()
        if config.nproc is None:
            raise ExperimentError(
                f"several processes are needed to exchange anything, and this is one: launch with "
                f"`{line}`, or add nproc=4 to let this command launch them"
            )
        program.prepare(config)
        for world in program.worlds(config):
            _launch(program.module, arguments, nproc=world, port=config.port)
        program.finish(config)
        return 0
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SignalException):
        print(f"\ninterrupted: all ranks were stopped, {program.left_by(config)}", file=sys.stderr)
        return _INTERRUPTED


def _launch(module: str, arguments: list[str], *, nproc: int, port: int | None) -> None:
    """Run the same command once per rank, through torchrun's own agent, and wait."""
    port = _free_port(port)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # gloo logs what an exception says too
    # Else malloc gives the memory of each step back and asks for it again: a fifth of a rank's time.
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 30))
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 25))
    os.environ[_OWN_LAUNCH] = str(os.getpid())
    logging.disable()  # the agent logs what it does about a failure; the sentence says what failed
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="loco",
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0},
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
    )
    # A rank dies of SIGTERM without a word. The agent passes on the signal it is stopped by, so Ctrl-C is
    # turned into that one here.
    signal.signal(signal.SIGINT, _stop)
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        raise ExperimentError(_first_cause(error.failures)) from error


def _stop(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the stopping
    raise SignalException("Ctrl-C", signal.SIGTERM)


def _free_port(wanted: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise ExperimentError(
                f"port {wanted} cannot be used ({error.strerror}): choose another one, or leave port out"
            ) from error
        return int(probe.getsockname()[1])


def _first_cause(failures: dict[int, ProcessFailure]) -> str:
    """The sentence of the rank that failed first; a lost connection is never the cause."""
    sentences = []
    for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp):
        message: Any = failure.message  # declared a str; `_leave` wrote a dict
        if isinstance(message, dict):
            sentences.append((message["consequence"], message["message"]))
        elif failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            sentences.append((False, f"rank {rank} was killed by {name}"))
        else:
            sentences.append((True, f"rank {rank} ended with status {failure.exitcode}"))
    return min(sentences, key=lambda sentence: sentence[0])[1]


def _be_a_rank(program: Program[C], arguments: list[str]) -> int:
    global _log
    rank = int(os.environ["RANK"])
    # A launcher that is killed can't stop its ranks, and they would train on.
    launcher = os.environ.get(_OWN_LAUNCH)
    die_with_parent(None if launcher is None else int(launcher))
    if rank != 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # dies without a word: rank 0 speaks for all
    config = None
    try:
        config = load(program.config, arguments)
        if program.folder is not None:
            _log = RankLog(program.folder(config) / "logs", rank)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if _OWN_LAUNCH not in os.environ:  # torchrun decides
            config = dataclasses.replace(config, nproc=world)
        program.prepare(config)
        device = _device(config.device)
        _join(device)
        program.work(config, device)
        if rank == 0 and _OWN_LAUNCH not in os.environ:
            program.finish(config)
    except ExperimentError as error:
        return _leave(str(error), shared=True)
    except loco.LocoError as error:
        return _leave(str(error), shared=True, consequence=_is_lost_connection(error))
    except KeyboardInterrupt:
        return _leave(f"interrupted: {program.left_by(config)}", shared=True, status=_INTERRUPTED)
    except Exception as error:
        if _is_lost_connection(error):
            return _leave("the connection to another rank was lost", shared=True, consequence=True)
        # Not a mistake of the user's: the traceback is wanted, once.
        text = f"rank {rank}: {type(error).__name__}: {error}"
        return _leave(f"{traceback.format_exc()}{text}" if rank == 0 else text, shared=False)
    dist.destroy_process_group()
    return 0


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ExperimentError("device=cuda needs a GPU, and torch sees none here")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _backend(device: torch.device) -> str:
    """NCCL refuses two ranks on one GPU; gloo takes their messages through the host's memory."""
    if device.type == "cpu":
        return "gloo"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "cpu:gloo,cuda:nccl" if ranks <= torch.cuda.device_count() else "cpu:gloo,cuda:gloo"


def _join(device: torch.device) -> None:
    if "MASTER_ADDR" not in os.environ:
        raise ExperimentError(
            "RANK is set but MASTER_ADDR is not, so this process cannot find the others: "
            "launch with torchrun, or unset RANK and add nproc=4"
        )
    try:
        store, rank, world = next(rendezvous("env://", timeout=_WARM_START_PATIENCE))
        # torchrun's restarts keep the store, where the addresses of the ranks that died would be found.
        store = PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            _backend(device), store=store, rank=rank, world_size=world, timeout=_WARM_START_PATIENCE
        )
    except (ValueError, RuntimeError) as error:  # torch's DistNetworkError is a RuntimeError
        address = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
        reason = str(error).splitlines()[0]
        raise ExperimentError(
            f"the ranks could not meet at {address} ({reason}): launch with torchrun, "
            "and give two launches on one machine different ports (--master-port)"
        ) from error


def _is_lost_connection(error: BaseException) -> bool:
    return isinstance(error, loco.TransportError | dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error) or "onnection" in str(error))
    )


def _leave(sentence: str, *, shared: bool, consequence: bool = False, status: int = 1) -> int:
    """Tell the parent and, unless it will repeat it, the person; then go without waiting for anyone.

    `shared`: every rank has met the same, so rank 0 speaks. `consequence`: of another rank's failure.
    """
    sentence = sentence.strip()
    if _log is not None:
        _log.ended(sentence)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun prints `py_callstack` in its summary: the sentence serves better than a traceback.
        extra = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        message = {"message": sentence, "consequence": consequence, "extraInfo": extra}
        with open(file, "w", encoding="utf-8") as target:
            json.dump({"message": message}, target)
    rank = os.environ["RANK"]
    if consequence or (shared and rank != "0"):
        # The launcher stops all ranks when the first one leaves: let the one that knows more be it.
        time.sleep(_PATIENCE)
    if _OWN_LAUNCH not in os.environ and (rank == "0" or not shared):
        print(f"error: {sentence}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # The process group's own shutdown would wait for ranks that are gone.
    os._exit(status)
