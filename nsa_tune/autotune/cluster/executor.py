"""The executor of a Ray worker: the driver's side of one device of the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.worker.executor import DeviceLost, Executor, JobUpdate
from nsa_tune.autotune.worker.messages import (
    CannotContinue,
    MeasureBatch,
    MeasureCeilings,
    Ready,
)

_ASK_EVERY_S = 0.5
"""How often a worker that is being restarted is asked again."""
_MOST_DEATHS = 3
"""Answers in a row that Ray has given the worker up, which it also says while it restarts it."""


class RayExecutor(Executor):
    """One whose device belongs to a Ray worker.

    Ray restarts a worker that died, where there is room. Its job is not repeated by Ray: it is lost
    with the device, so that the run gives it to whichever device is free first.

    Args:
        name: what to call it before its device is known.
        worker: handle of a `RayWorker`.
        node_names: by Ray's ids. It may grow.
        patience_s: time for Ray to find room for the worker.
    """

    def __init__(
        self, name: str, worker: Any, node_names: Mapping[str, str], patience_s: float
    ) -> None:
        self.name = name
        self._worker = worker
        self._node_names = node_names
        self._patience_s = patience_s
        self._call: Any = None
        """Ray's reference to what the worker was asked last; None when it has answered."""
        self._bell, self._ring = Pipe(duplex=False)
        self._asked_at = self._waiting_since = monotonic()
        self._deaths = 0
        self.job: Job | None = None
        self._ask(worker.ready.remote())

    @property
    def connection(self) -> Connection | None:
        """It gets a byte for each answer."""
        return self._bell

    def arrival(self) -> Ready | None:
        """As in `Executor`; it may take `patience_s`.

        Raises:
            MachineUnfit: when Ray has found no room for the worker in time, or has given it up.
            NsaTuneError: what the worker found wrong with the request or the machine.
        """
        if self._call is None and monotonic() - self._asked_at >= _ASK_EVERY_S:
            self._ask(self._worker.ready.remote())
        try:
            answer = self._answer()
        except DeviceLost as loss:
            self._deaths += 1
            if self._deaths == _MOST_DEATHS:
                raise MachineUnfit(str(loss)) from loss
            return None
        if answer is None:
            if monotonic() - self._waiting_since > self._patience_s:
                raise MachineUnfit(
                    f"Ray has found no room for it in {self._patience_s:.0f} s; see `ray status`"
                )
            return None
        assert isinstance(answer, Ready)
        self._deaths = 0
        return self._named(answer)

    def begin(self, job: Job) -> None:
        self.job = job
        arms = tuple(arm.name for arm in job.arms)
        self._ask(self._worker.measure.remote(MeasureBatch(job.point.name, job.batch, arms)))

    def begin_ceilings(self) -> None:
        self._ask(self._worker.measure.remote(MeasureCeilings()))

    def advance(self) -> JobUpdate | None:
        try:
            answer = self._answer()
        except DeviceLost:
            self.job, self._waiting_since, self._deaths = None, monotonic(), 0
            raise
        if answer is None:
            return None
        assert isinstance(answer, JobUpdate)
        if answer.finished:
            self.job = None
        else:
            self._ask(self._worker.go_on.remote())
        return answer

    def close(self) -> None:
        """Ray frees the device."""
        if not self._ring.closed:
            ray.kill(self._worker)
            self._ring.close()
            self._bell.close()

    def _ask(self, call: Any) -> None:
        """Have the bell ring when Ray has the answer of `call`."""
        self._call, self._asked_at = call, monotonic()
        ring = self._ring

        def answered(_: object) -> None:
            with suppress(OSError):
                ring.send_bytes(b".")

        call.future().add_done_callback(answered)

    def _answer(self) -> Ready | JobUpdate | None:
        """The worker's answer; None while there is none.

        Raises:
            DeviceLost: when the worker is gone.
            NsaTuneError: what the worker sent instead.
        """
        if not self._bell.poll():
            return None
        self._bell.recv_bytes()
        call, self._call = self._call, None
        try:
            answer: Ready | JobUpdate | CannotContinue | None = ray.get(call)
        except (RayActorError, ActorUnschedulableError) as error:
            raise DeviceLost(_cause(error)) from error
        except RayTaskError as error:
            raise MachineUnfit(f"its Ray worker failed: {last_line(error)}") from error
        if answer is None:
            raise DeviceLost("its Ray worker died, and is made anew")
        if isinstance(answer, CannotContinue):
            raise answer.error
        return answer

    def _named(self, ready: Ready) -> Ready:
        """`ready` with the node's name in place of its id, and in the name of a CPU."""
        node = self._node_names.get(ready.node, ready.node)
        unit = f"{node}/cpu" if ready.unit == "cpu" else ready.unit
        return replace(ready, node=node, unit=unit)


def _cause(error: Exception) -> str:
    """What Ray says of a worker that is gone; of an error while it was made, only the error."""
    if "creation task" in str(error):
        return f"its Ray worker cannot be made: {last_line(error)}"
    return "its Ray worker died, or its node is gone"


def last_line(error: Exception) -> str:
    """The last line of an error's text, which says what the node itself raised."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in reversed(lines) if line), type(error).__name__)
