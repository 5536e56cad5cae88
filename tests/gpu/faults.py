"""A made-up point for a GPU, whose arms write out of bounds, trip an assertion, or never end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Arm, Point, Setting
from tests.autotune.fake_point import RunnableCase, runnable

Launch = Callable[[], torch.Tensor]
_WARM = 8
"""Launches after which an arm is checked, captured and sampled a few times."""


@triton.jit
def _stray(out, launches, warm):  # type: ignore[no-untyped-def]
    """Writes far out of bounds from launch number `warm` on."""
    count = tl.load(launches)
    tl.store(launches, count + 1)
    away = tl.where(count >= warm, 1 << 44, 0).to(tl.int64)
    tl.store(out + away, tl.load(out))


@triton.jit
def _spin(out, launches, flag, warm):  # type: ignore[no-untyped-def]
    """Waits for a flag that nobody sets from launch number `warm` on."""
    count = tl.load(launches)
    tl.store(launches, count + 1)
    seen = tl.where(count >= warm, 0, 1)
    while seen == 0:
        seen = tl.load(flag, volatile=True)
    tl.store(out, tl.load(out))


def _inputs(case: RunnableCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = torch.full((1,), float(case.batch.q_tokens), device="cuda")
    launches, flag = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    return out, launches, flag


def _fine(case: RunnableCase) -> Launch:
    out, _, _ = _inputs(case)
    return lambda: out * 1.0


def _strays(warm: int) -> Callable[[RunnableCase], Launch]:
    def build(case: RunnableCase) -> Launch:
        out, launches, _ = _inputs(case)

        def run() -> torch.Tensor:
            _stray[(1,)](out, launches, warm)
            return out

        return run

    return build


def _hangs(warm: int) -> Callable[[RunnableCase], Launch]:
    def build(case: RunnableCase) -> Launch:
        out, launches, flag = _inputs(case)

        def run() -> torch.Tensor:
            _spin[(1,)](out, launches, flag, warm)
            return out

        return run

    return build


def _asserts(case: RunnableCase) -> Launch:
    out, _, _ = _inputs(case)
    index = torch.full((1,), 99, device="cuda")
    return lambda: out[index]


def _too_big(case: RunnableCase) -> Launch:
    return lambda: torch.ones(2**43, dtype=torch.uint8, device="cuda").float()


def _point(batches: int, **builds: Callable[[RunnableCase], Launch]) -> dict[str, Point]:
    point = runnable("fast", batches=batches)
    builds = {"fine": _fine, "also fine": _fine} | builds
    arms: tuple[Arm, ...] = tuple(
        replace(point.arms[0], name=name, build=build, guards=()) for name, build in builds.items()
    )

    def grid(setting: Setting) -> list[Batch]:
        return [Batch.decode([10 * (i + 1)]) for i in range(batches)]

    return {"runnable": replace(point, arms=arms, grid=grid)}


FINE = _point(400)
STRAYS = _point(4, strays=_strays(0), asserts=_asserts)
LATE = _point(1, strays=_strays(_WARM), hangs=_hangs(_WARM))
HANGS = _point(2, hangs=_hangs(0))
MEMORY = _point(2, **{"too big": _too_big})
