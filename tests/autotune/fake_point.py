"""A fake point that a CPU runs in milliseconds, with arms that fail on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log2
from random import Random
from time import sleep

import torch

from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import (
    Arm,
    Case,
    FeatureFunctions,
    Guard,
    Limit,
    Point,
    Question,
    Setting,
)

Build = Callable[["RunnableCase"], Callable[[], torch.Tensor]]
_ANY = frozenset(KVLayout)


@dataclass
class RunnableCase:
    """A case whose right output is the number of new tokens."""

    batch: Batch
    tolerance = 0.01

    def error_of(self, output: torch.Tensor) -> float:
        """NaN where the output is: not every case makes that infinite."""
        return abs(float(output[0]) - self.batch.q_tokens) / self.batch.q_tokens


RunnablePoint = Point


def _right(seconds: float) -> Build:
    def build(case: RunnableCase) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            sleep(seconds)
            return torch.tensor([float(case.batch.q_tokens)])

        return run

    return build


def _wrong(case: RunnableCase) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor([case.batch.q_tokens * 1.5])


def _nan(case: RunnableCase) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor([float("nan")])


def _raises(case: RunnableCase) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        raise RuntimeError("the kernel\n\tsays no")

    return run


def _few(setting: Setting) -> Limit:
    del setting
    return lambda batch: "more than 4 sequences" if batch.batch_size > 4 else None


_FEATURES = FeatureFunctions(
    ("q_tokens",), lambda batch: (batch.q_tokens,), lambda batch: (log2(batch.q_tokens),)
)

ARMS = {
    "fast": _right(0.0001),
    "slow": _right(0.0004),
    "wrong": _wrong,
    "nan": _nan,
    "raises": _raises,
}


def _case(batch: Batch, setting: Setting, device: torch.device) -> Case:
    return RunnableCase(batch)


def _sample(setting: Setting, random: Random) -> Batch:
    return Batch.decode([random.randint(1, 100)])


def runnable(*arms: str, batches: int = 6) -> Point:
    """A decode point with the named arms; its grid has `batches` batches, the last of which is
    one that a guard of the first arm forbids."""
    few = (Guard("few", "formula", "made up", _few),)
    built = tuple(
        Arm(name, ARMS[name], _ANY, guards=few if i == 0 else ()) for i, name in enumerate(arms)
    )
    grid = [Batch.decode([10 * (i + 1)] * min(i + 1, 5)) for i in range(batches)]
    return Point(
        name="runnable",
        modes=frozenset({Mode.DECODE}),
        arms=built,
        questions=(Question("runnable", {name: (name,) for name in arms}),),
        features=lambda setting: _FEATURES,
        grid=lambda setting: grid,
        case=_case,
        sample=_sample,
    )


TWO_ARMS = {"runnable": runnable("fast", "slow")}
"""6 batches: 4 with two choices, 2 with one only."""
FORTY = {"runnable": runnable("slow", "fast", batches=40)}


def _distinct(batches: int) -> Point:
    grid = [Batch.decode([10 * (i + 1)]) for i in range(batches)]
    return replace(runnable("slow", "fast"), grid=lambda setting: grid)


MANY = {"runnable": _distinct(40)}
"""40 batches with two choices each."""
HUNDREDS = {"runnable": _distinct(400)}
