"""A fake point whose arms kill their process, block it, or return wrong output."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import sleep

import torch

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Arm, Point
from tests.autotune.fake_point import ARMS, RunnableCase, runnable

Launch = Callable[[], torch.Tensor]
_TWICE = 2
"""Calls until an arm is checked and warm; the next one is a sample."""


def _segfaults(case: RunnableCase) -> Launch:
    return lambda: torch.tensor([ctypes.string_at(0)[0]])


def _exits(case: RunnableCase) -> Launch:
    def run() -> torch.Tensor:
        sys.stderr.write("Assertion failed (kernel.cu:67): smem_size <= limit\n\n")
        os._exit(1)

    return run


def _exits_as_a_library(case: RunnableCase) -> Launch:
    def build() -> torch.Tensor:
        ctypes.CDLL(None).exit(1)
        raise AssertionError("exit returned")

    return build


def _hangs(case: RunnableCase) -> Launch:
    def run() -> torch.Tensor:
        sleep(3600)
        return torch.zeros(1)

    return run


def _eats_memory(case: RunnableCase) -> Launch:
    def run() -> torch.Tensor:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (2**34, hard))
        try:
            return torch.tensor([float(len(bytearray(2**35)))])
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    return run


def _does_not_compile(case: RunnableCase) -> Launch:
    raise SyntaxError("the compiler says no")


def _late(fault: Callable[[], object]) -> Callable[[RunnableCase], Launch]:
    """An arm that passes its check and calls `fault` when it is timed."""

    def build(case: RunnableCase) -> Launch:
        calls = iter(range(_TWICE))

        def run() -> torch.Tensor:
            if next(calls, None) is None:
                fault()
            return torch.tensor([float(case.batch.q_tokens)])

        return run

    return build


def _raise() -> None:
    raise RuntimeError("an illegal address")


def _for_many(case: RunnableCase) -> Launch:
    if case.batch.q_tokens > 2:
        return _segfaults(case)
    return ARMS["fast"](case)


_FAULTY = {
    "segfaults": _segfaults,
    "exits": _exits,
    "library exits": _exits_as_a_library,
    "hangs": _hangs,
    "eats memory": _eats_memory,
    "does not compile": _does_not_compile,
    "late segfault": _late(lambda: ctypes.string_at(0)),
    "late error": _late(_raise),
    "for many": _for_many,
}


def _point(*names: str, batches: int) -> dict[str, Point]:
    point = runnable("fast", "slow", batches=batches)
    grid = [Batch.decode([10 * (i + 1)] * min(i + 1, 4)) for i in range(batches)]
    arms = [replace(point.arms[0], guards=()), point.arms[1], *_arms(names)]
    return {"runnable": replace(point, arms=tuple(arms), grid=lambda setting: grid)}


def _arms(names: tuple[str, ...]) -> Iterator[Arm]:
    pattern = runnable("slow").arms[0]
    for name in names:
        yield replace(pattern, name=name, build=(ARMS | _FAULTY)[name], guards=())


FAULTS = _point(
    "segfaults", "nan", "exits", "wrong", "raises", "library exits", "does not compile",
    "eats memory", batches=4,
)  # fmt: skip
HANG = _point("hangs", batches=1)
LATE = _point("late segfault", "late error", batches=1)
SOMETIMES = _point("for many", batches=6)
