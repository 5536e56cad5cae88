"""Rows of failures: what their reasons say."""

from __future__ import annotations

from nsa_tune.autotune.bench.failures import out_of_memory
from tests.records import failed, ok


def test_every_message_of_missing_memory_is_recognised() -> None:
    for reason in (
        "MemoryError: ", "OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
    ):  # fmt: skip
        assert out_of_memory(failed("extend:0+1", "mla", reason))
    assert not out_of_memory(failed("extend:0+1", "mla", "RuntimeError: no"))
    assert not out_of_memory(ok("extend:0+1", "mla"))
