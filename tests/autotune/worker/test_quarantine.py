"""Quarantine: three lost workers, or three failures without a success."""

from __future__ import annotations

from nsa_tune.autotune.worker.quarantine import (
    Quarantine,
    for_inputs,
    held_elsewhere,
    out_of_memory,
    passing,
    with_worker,
)
from nsa_tune.backend.types.records import Measurement, Status
from tests.records import failed, ok

NO_ROOM = failed("extend:0+1", "mla", "OutOfMemoryError: CUDA out of memory. Tried to allocate")
FAULT = failed("extend:0+1", "mla", "RuntimeError: no")
RIGHT = ok("extend:0+1", "mla")


def out(*rows: Measurement) -> list[str]:
    return [arm.arm for arm in Quarantine(rows).arms]


def test_three_failures_without_a_success_are_enough() -> None:
    assert out(FAULT, FAULT) == []
    assert out(FAULT, FAULT, FAULT) == ["mla"]


def test_a_wrong_answer_is_a_failure() -> None:
    wrong = Measurement("prefill", "extend:0+1", "mla", Status.WRONG, error=1.0, reason="wrong")

    assert out(FAULT, wrong, wrong) == ["mla"]


def test_an_arm_that_succeeded_once_may_go_on_failing() -> None:
    assert out(RIGHT, *[FAULT] * 9) == []


def test_three_lost_workers_are_enough_whatever_else_succeeded() -> None:
    lost = with_worker(FAULT)

    assert lost.reason == "worker lost: RuntimeError: no"
    assert out(RIGHT, lost, RIGHT, lost) == []
    assert out(RIGHT, lost, RIGHT, lost, RIGHT, lost) == ["mla"]


def test_memory_and_inputs_speak_of_the_batch_and_not_of_the_arm() -> None:
    assert out(*[NO_ROOM] * 5) == []
    assert out(*[for_inputs(FAULT)] * 5) == []


def test_arms_and_points_are_counted_apart() -> None:
    assert out(FAULT, FAULT, failed("extend:0+1", "mha", "no")) == []


def test_an_arm_is_named_once_when_it_goes_out() -> None:
    quarantine = Quarantine([FAULT, FAULT])

    (named,) = quarantine.note([FAULT])

    assert (named.point, named.arm, named.reason) == ("prefill", "mla", "RuntimeError: no")
    assert quarantine.note([FAULT]) == []
    assert quarantine.holds("prefill", "mla")
    assert not quarantine.holds("prefill", "mha")


def test_memory_that_somebody_else_holds_passes() -> None:
    elsewhere = held_elsewhere(NO_ROOM, 30 * 2**30)

    assert elsewhere.reason.startswith("other processes hold 30.0 GiB; OutOfMemoryError")
    assert passing(elsewhere)
    assert out_of_memory(elsewhere)
    assert not passing(NO_ROOM)


def test_every_way_to_say_that_memory_is_short_is_understood() -> None:
    for reason in (
        "MemoryError: ", "OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
    ):  # fmt: skip
        assert out_of_memory(failed("extend:0+1", "mla", reason))
    assert not out_of_memory(FAULT)
    assert not out_of_memory(RIGHT)
