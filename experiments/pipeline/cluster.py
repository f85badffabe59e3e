"""The Ray cluster of the actors: one started on this machine for this run, or an existing one."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from experiments.errors import ExperimentError, missing_extra
from experiments.pipeline.config import PipelineConfig

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
except ImportError as error:
    raise missing_extra(error, "pipeline") from None

_KNOCK = 5.0  # seconds in which a cluster answers
_CONTROLLER = "controller"  # actors find it by this name, also after a restart


@contextmanager
def started(config: PipelineConfig, processes: int) -> Iterator[None]:
    """
    Args:
        processes: how many may run at the same time.
    """
    if config.engine == "vllm" and config.address is None and find_spec("vllm") is None:
        raise ExperimentError("engine=vllm needs vllm in this environment: see requirements-vllm.txt")
    if config.address is not None:
        _knock(config.address)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # visible GPUs stay visible
    own: dict[str, Any] = {"include_dashboard": False, "num_cpus": processes}
    if config.address is None:
        # Ray asks for a token by default. Left to itself it keeps one in a file that other users can read.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        ray.init(
            address=config.address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if config.address else own),
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ExperimentError(f"Ray does not start: {str(error).splitlines()[0]}") from error
    try:
        _check(config, processes)
        yield
    except RayTaskError as error:
        raise ExperimentError(f"{type(error.cause).__name__}: {error.cause}") from error
    except RayActorError as error:
        raise ExperimentError(f"a part of the pipeline was lost: {str(error).splitlines()[0]}") from error
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray would try for two minutes, and say so in many lines."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ExperimentError(f"address must be HOST:PORT of a Ray cluster, got {address}")
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK).close()
    except OSError as error:
        raise ExperimentError(
            f"no Ray cluster answers at {address} ({error}): start one with ray start --head --port={port}"
        ) from error


def _check(config: PipelineConfig, processes: int) -> None:
    """Ray would wait forever for a resource that no node has."""
    there = ray.cluster_resources()
    for name in {*config.sites_on, *config.workers_on}:
        if name not in there:
            raise ExperimentError(
                f"no node of the cluster has the resource {name}: start one with "
                f"ray start --address=… --resources='{{\"{name}\": 1}}'"
            )
    if there.get("CPU", 0) < processes:
        raise ExperimentError(
            f"{processes} processes need a CPU each, and the cluster has {there.get('CPU', 0):.0f}: start "
            "nodes with more --num-cpus, or set fewer sites or workers"
        )


class Actors:
    """The actors of one run, which end with it."""

    def __init__(self) -> None:
        self._created: list[Any] = []

    def create(
        self, kind: type, *arguments: Any, lives_again: bool, name: str | None = None, on: str | None = None
    ) -> Any:
        """Start an actor.

        Args:
            lives_again: restart it if its process is lost, and repeat the calls it had not answered.
            on: a resource of the node to place it on.
        """
        lives: dict[str, Any] = {"max_restarts": -1, "max_task_retries": -1} if lives_again else {}
        lives |= {"resources": {on: 0.001}} if on else {}
        actor = ray.remote(num_cpus=1, **lives)(kind).options(name=name).remote(*arguments)
        self._created.append(actor)
        return actor

    def controller(self, kind: type, config: PipelineConfig) -> Any:
        return self.create(kind, config, lives_again=True, name=_CONTROLLER)

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            return  # they end with the connection to Ray; if they were killed, Ray would report each task
        for actor in self._created:
            with suppress(Exception):  # the actor or Ray itself has ended
                ray.kill(actor)


def controller() -> Any:
    return ray.get_actor(_CONTROLLER)


def own_address() -> str:
    """The address at which the rest of the cluster reaches this machine."""
    return ray.util.get_node_ip_address()


def answer_of(asked: Any) -> Any:
    """Wait for one remote call, or for several."""
    return ray.get(asked)
