"""What is made to fail in the last of an engine's ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["FAULTS", "VARIABLE", "fail_captures", "start_with_fault"]

FAULTS = {"no-plugin": {"NSA_TUNE_DISABLE": "1"}, "capture": {"NSA_ENGINE_FAULT": "capture"}}
"""What may go wrong on the last rank alone, and the variables by which its process is told."""
VARIABLE = "NSA_ENGINE_FAULT"
_CAPTURED = 2
"""Graphs that are captured before one fails."""


def start_with_fault(module: Any, *, ranks: int, fault: str) -> None:
    """Have a module of SGLang that starts ranks start the last of them with a fault."""
    original = module.maybe_reindex_device_id

    @contextmanager
    def placed(gpu_id: int) -> Iterator[int]:
        with _environment(FAULTS[fault] if gpu_id == ranks - 1 else {}), original(gpu_id) as device:
            yield device

    module.maybe_reindex_device_id = placed


def fail_captures(module: Any) -> None:
    """Have the plug-in's captures fail, after the first few."""
    graphs = module.DenseGraphs
    original: Callable[..., None] = graphs.capture
    captured = 0

    def capture(self: Any, size: int) -> None:
        nonlocal captured
        # At its end: a rank that failed earlier would leave the others waiting in an all-reduce.
        original(self, size)
        captured += 1
        if captured > _CAPTURED:
            raise RuntimeError("the harness has this capture fail")

    graphs.capture = capture


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """A process that is started within inherits the variables."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
