"""Quarantine: three lost workers, or three failures without a success."""

from __future__ import annotations

from nsa_tune.autotune.bench.failures import with_inputs, with_worker
from nsa_tune.autotune.runner.quarantine import Quarantine
from nsa_tune.backend.types.records import Measurement, Status
from tests.records import failed, ok

NO_ROOM = failed("extend:0+1", "mla", "OutOfMemoryError: CUDA out of memory. Tried to allocate")
FAULT = failed("extend:0+1", "mla", "RuntimeError: no")
RIGHT = ok("extend:0+1", "mla")


def out(*rows: Measurement) -> list[str]:
    return [arm.arm for arm in Quarantine(rows).arms]


def test_three_failures_without_a_success_quarantine_an_arm() -> None:
    assert out(FAULT, FAULT) == []
    assert out(FAULT, FAULT, FAULT) == ["mla"]


def test_a_wrong_answer_is_a_failure() -> None:
    wrong = Measurement("prefill", "extend:0+1", "mla", Status.WRONG, error=1.0, reason="wrong")

    assert out(FAULT, wrong, wrong) == ["mla"]


def test_an_arm_that_succeeded_once_is_not_quarantined_for_failing() -> None:
    assert out(RIGHT, *[FAULT] * 9) == []


def test_three_lost_workers_quarantine_an_arm_whatever_succeeded() -> None:
    lost = with_worker(FAULT)

    assert lost.reason == "worker lost: RuntimeError: no"
    assert out(RIGHT, lost, RIGHT, lost) == []
    assert out(RIGHT, lost, RIGHT, lost, RIGHT, lost) == ["mla"]


def test_failures_of_memory_or_inputs_do_not_count() -> None:
    assert out(*[NO_ROOM] * 5) == []
    assert out(*[with_inputs(FAULT)] * 5) == []


def test_arms_and_points_are_counted_separately() -> None:
    assert out(FAULT, FAULT, failed("extend:0+1", "mha", "no")) == []


def test_an_arm_is_reported_once_when_it_is_quarantined() -> None:
    quarantine = Quarantine([FAULT, FAULT])

    (named,) = quarantine.note([FAULT])

    assert (named.point, named.arm, named.reason) == ("prefill", "mla", "RuntimeError: no")
    assert quarantine.note([FAULT]) == []
    assert quarantine.holds("prefill", "mla")
    assert not quarantine.holds("prefill", "mha")
