"""A Ray worker as the run sees it, with calls that a test answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from nsa_tune import MachineUnfit, UsageError, __version__
from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.cluster import executor as module
from nsa_tune.autotune.cluster.executor import RayExecutor
from nsa_tune.autotune.cluster.worker import RayWorker
from nsa_tune.autotune.worker.executor import DeviceLost, JobUpdate, wait_until_ready
from nsa_tune.autotune.worker.isolated import Deadlines
from nsa_tune.autotune.worker.messages import (
    CannotContinue,
    MeasureBatch,
    MeasureCeilings,
    Ready,
    Setup,
)
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from tests.autotune.fake_point import MANY
from tests.records import DEVICE, KEY

READY = Ready(
    Setting(profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, DEVICE), KEY, "GPU-1", node="a1"
)
SETUP = Setup("cpu", "tiny", None, "fp8", (), "tests.autotune.fake_point:MANY")
POINT = MANY["runnable"]
JOB = Job(POINT, Batch.decode([10]), POINT.arms)
GONE = ActorUnavailableError("Socket closed", b"1" * 16)


class Call:
    """A reference of Ray's, with what was asked."""

    def __init__(self, asked: tuple[Any, ...]) -> None:
        self.asked = asked
        self.answer: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.answer


class Method:
    def __init__(self, name: str, calls: list[Call]) -> None:
        self.name, self.calls = name, calls

    def remote(self, *arguments: Any) -> Call:
        self.calls.append(Call((self.name, *arguments)))
        return self.calls[-1]


class Worker:
    """A handle of an actor; the test answers its calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.ready, self.measure, self.go_on = (
            Method(name, self.calls) for name in ("ready", "measure", "go_on")
        )

    @property
    def asked(self) -> Any:
        return self.calls[-1].asked

    def answers(self, answer: Any) -> None:
        call = self.calls[-1].answer
        if isinstance(answer, Exception):
            call.set_exception(answer)
        else:
            call.set_result(answer)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(ray, "get", lambda call: call.answer.result())
    monkeypatch.setattr(ray, "kill", lambda handle: None)
    monkeypatch.setattr(module, "_ASK_EVERY_S", 0.0)
    return Worker()


Make = Callable[..., RayExecutor]


@pytest.fixture
def executor(worker: Worker) -> RayExecutor:
    return RayExecutor("worker 1", worker, {"a1": "host-a"}, patience_s=100.0)


def test_a_worker_is_ready_when_it_says_so(worker: Worker, executor: RayExecutor) -> None:
    assert executor.arrival() is None
    assert executor.connection is not None
    assert not executor.connection.poll()

    worker.answers(READY)

    assert executor.connection.poll()
    ready = wait_until_ready(executor)
    assert (ready.unit, ready.node, ready.key) == ("GPU-1", "host-a", KEY)


def test_a_cpu_is_named_after_its_node(worker: Worker, executor: RayExecutor) -> None:
    worker.answers(Ready(READY.setting, KEY, "cpu", node="a1"))

    assert wait_until_ready(executor).unit == "host-a/cpu"


def test_a_job_goes_on_until_it_is_finished(worker: Worker, executor: RayExecutor) -> None:
    worker.answers(READY)
    wait_until_ready(executor)
    executor.begin(JOB)
    names = tuple(arm.name for arm in JOB.arms)
    assert worker.asked == ("measure", MeasureBatch("runnable", JOB.batch, names))
    assert executor.advance() is None

    worker.answers(JobUpdate(replaced="it crashed"))
    update = executor.advance()
    assert update is not None
    assert (update.replaced, executor.job) == ("it crashed", JOB)
    assert worker.asked == ("go_on",)

    worker.answers(JobUpdate(finished=True))
    executor.advance()
    assert executor.job is None


def test_the_ceilings_are_asked_for(worker: Worker, executor: RayExecutor) -> None:
    worker.answers(READY)
    wait_until_ready(executor)

    executor.begin_ceilings()

    assert worker.asked == ("measure", MeasureCeilings())


def test_a_worker_that_is_lost_is_asked_until_ray_has_made_a_new_one(
    worker: Worker, executor: RayExecutor
) -> None:
    worker.answers(READY)
    wait_until_ready(executor)
    executor.begin(JOB)
    worker.answers(GONE)
    with pytest.raises(DeviceLost, match="its Ray worker died, or its node is gone"):
        executor.advance()
    assert executor.job is None

    assert executor.arrival() is None
    worker.answers(GONE)
    assert executor.arrival() is None
    assert executor.arrival() is None
    worker.answers(READY)
    assert executor.arrival() is not None


def test_a_worker_that_was_made_anew_between_two_jobs_is_asked_what_it_is(
    worker: Worker, executor: RayExecutor
) -> None:
    worker.answers(READY)
    wait_until_ready(executor)
    executor.begin(JOB)
    worker.answers(RayWorker(SETUP, Deadlines(), __version__).measure(worker.asked[1]))

    with pytest.raises(DeviceLost, match="made anew"):
        executor.advance()

    assert executor.arrival() is None
    assert worker.asked == ("ready",)


def test_a_worker_that_ray_gives_up_is_left_out(worker: Worker, executor: RayExecutor) -> None:
    for _ in range(2):
        worker.answers(ActorDiedError())
        assert executor.arrival() is None
        assert executor.arrival() is None
    worker.answers(ActorDiedError())

    with pytest.raises(MachineUnfit, match="died, or its node is gone"):
        executor.arrival()


def test_an_error_of_the_worker_is_raised_here(worker: Worker, executor: RayExecutor) -> None:
    worker.answers(CannotContinue(UsageError("3 local heads do not divide 128")))

    with pytest.raises(UsageError, match="3 local heads"):
        executor.arrival()


def test_a_bug_in_the_worker_costs_only_this_device(worker: Worker, executor: RayExecutor) -> None:
    worker.answers(RayTaskError("ready", "Traceback\nOSError: no torch", OSError("no torch")))

    with pytest.raises(MachineUnfit, match="its Ray worker failed: OSError: no torch"):
        executor.arrival()


def test_a_worker_without_room_is_left_out_after_a_while(worker: Worker) -> None:
    executor = RayExecutor("worker 1", worker, {}, patience_s=0.0)

    with pytest.raises(MachineUnfit, match="Ray has found no room for it in 0 s"):
        executor.arrival()


def test_an_answer_after_the_end_disturbs_nobody(worker: Worker, executor: RayExecutor) -> None:
    executor.close()
    executor.close()

    worker.answers(READY)


def test_a_node_with_another_version_is_left_out_by_name() -> None:
    answer = RayWorker(SETUP, Deadlines(), "0.0.1").ready()

    assert isinstance(answer, CannotContinue)
    assert re.fullmatch(
        rf"nsa-tune {__version__} is installed on \S+, and 0.0.1 where the run began; .*",
        str(answer.error),
    )
