"""A fault is on the last rank alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import pytest

from benchmarks.engine.placing import VARIABLE, fail_captures, start_with_fault
from benchmarks.engine.probe import _DENSE


@contextmanager
def _as_sglang(gpu_id: int) -> Iterator[int]:
    yield gpu_id


def _placed(fault: str) -> list[tuple[int | str | None, ...]]:
    """For each of two ranks its device and fault variables, as its process inherits them."""
    module = SimpleNamespace(maybe_reindex_device_id=_as_sglang)
    start_with_fault(module, ranks=2, fault=fault)
    inherited: list[tuple[int | str | None, ...]] = []
    for gpu_id in range(2):
        with module.maybe_reindex_device_id(gpu_id) as device:
            inherited.append((device, *map(os.environ.get, ("NSA_TUNE_DISABLE", VARIABLE))))
    return inherited


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NSA_TUNE_DISABLE", VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_a_fault_is_on_the_last_rank_alone() -> None:
    assert _placed("no-plugin") == [(0, None, None), (1, "1", None)]
    assert _placed("capture") == [(0, None, None), (1, None, "capture")]
    assert VARIABLE not in os.environ


def test_what_is_made_to_fail_is_there() -> None:
    assert callable(import_module(_DENSE).DenseGraphs.capture)


def test_captures_fail_after_the_first_few() -> None:
    sizes: list[int] = []

    class DenseGraphs:
        def capture(self, size: int) -> None:
            sizes.append(size)

    fail_captures(SimpleNamespace(DenseGraphs=DenseGraphs))
    graphs = DenseGraphs()
    graphs.capture(64)
    graphs.capture(128)
    with pytest.raises(RuntimeError, match="has this capture fail"):
        graphs.capture(256)
    assert sizes == [64, 128, 256]
