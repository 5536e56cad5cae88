"""The Ray worker: an actor that measures on the one device that Ray has reserved for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from socket import gethostname
from typing import TypeVar

import ray

from nsa_tune import __version__
from nsa_tune._errors import MachineUnfit, NsaTuneError
from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.bench.registry import points_in
from nsa_tune.autotune.worker.executor import JobUpdate, wait_until_ready
from nsa_tune.autotune.worker.isolated import Deadlines, IsolatedExecutor
from nsa_tune.autotune.worker.messages import (
    CannotContinue,
    MeasureBatch,
    MeasureCeilings,
    Ready,
    Setup,
)

T = TypeVar("T")
_POLL_S = 0.25


class RayWorker:
    """One device, measured by a process of its own below this one.

    An arm that crashes ends that process, not the actor. If the actor itself dies, Ray makes a new
    one, here or on another node. Each method returns an error that the driver is to raise.
    """

    def __init__(self, setup: Setup, deadlines: Deadlines, version: str) -> None:
        """`version` is that of the nsa-tune which asks."""
        self._version = version
        self._setup = setup
        self._deadlines = deadlines
        self._executor: IsolatedExecutor | None = None

    def ready(self) -> Ready | CannotContinue:
        """Start measuring, and say on which device. `Ready.node` is the node's id."""
        return _or_error(self._start)

    def measure(self, request: MeasureBatch | MeasureCeilings) -> JobUpdate | CannotContinue | None:
        """Begin to measure, and return the first news.

        None when Ray has made this actor anew since the last job: its device may be another one,
        which `ready` is to say first.
        """
        if self._executor is None:
            return None
        return _or_error(lambda: self._begin(request))

    def go_on(self) -> JobUpdate | CannotContinue:
        """The next news of what was begun."""
        return _or_error(self._news)

    def _start(self) -> Ready:
        if self._version != __version__:
            raise MachineUnfit(
                f"nsa-tune {__version__} is installed on {gethostname()}, and {self._version} "
                "where the run began; install the same version on both"
            )
        _undo_ray_threads()
        if self._executor is None:
            self._executor = IsolatedExecutor(self._setup, self._deadlines)
        node = ray.get_runtime_context().get_node_id()
        return replace(wait_until_ready(self._executor), node=node)

    def _begin(self, request: MeasureBatch | MeasureCeilings) -> JobUpdate:
        assert self._executor is not None, "`ready` comes before `measure`"
        if isinstance(request, MeasureCeilings):
            self._executor.begin_ceilings()
        else:
            profile = wait_until_ready(self._executor).setting.profile
            points = points_in(self._setup.registry, self._setup.points, profile)
            point = next(point for point in points if point.name == request.point)
            arms = tuple(point.arm(name) for name in request.arms)
            self._executor.begin(Job(point, request.batch, arms))
        return self._news()

    def _news(self) -> JobUpdate:
        assert self._executor is not None, "`ready` comes before `go_on`"
        while (update := self._executor.advance()) is None:
            if self._executor.connection is not None:
                wait([self._executor.connection], _POLL_S)
        return update


def _or_error(call: Callable[[], T]) -> T | CannotContinue:
    try:
        return call()
    except NsaTuneError as error:
        return CannotContinue(error)


def _undo_ray_threads() -> None:
    """Let torch choose its threads as it does without Ray, which sets them to the CPUs reserved."""
    reserved = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
    if os.environ.get("OMP_NUM_THREADS") == str(max(int(reserved), 1)):
        del os.environ["OMP_NUM_THREADS"]
