"""Rows of failures: what their reasons say."""

from __future__ import annotations

from nsa_tune.autotune.bench.failures import held_elsewhere, may_pass_later, out_of_memory
from tests.records import failed, ok

NO_ROOM = failed("extend:0+1", "mla", "OutOfMemoryError: CUDA out of memory. Tried to allocate")
FAULT = failed("extend:0+1", "mla", "RuntimeError: no")
RIGHT = ok("extend:0+1", "mla")


def test_an_arm_may_succeed_later_when_other_processes_held_the_memory() -> None:
    elsewhere = held_elsewhere(NO_ROOM, 30 * 2**30)

    assert elsewhere.reason.startswith("other processes hold 30.0 GiB; OutOfMemoryError")
    assert may_pass_later(elsewhere)
    assert out_of_memory(elsewhere)
    assert not may_pass_later(NO_ROOM)


def test_every_message_of_missing_memory_is_recognised() -> None:
    for reason in (
        "MemoryError: ", "OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
    ):  # fmt: skip
        assert out_of_memory(failed("extend:0+1", "mla", reason))
    assert not out_of_memory(FAULT)
    assert not out_of_memory(RIGHT)
