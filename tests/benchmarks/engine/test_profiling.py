"""What a pass did on the GPU is summed; Python's time is told by function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine.profiling import profiled, summary_of

if TYPE_CHECKING:
    import pytest


def test_kernels_are_summed() -> None:
    found = summary_of([
        (1_000_000, 1_500_000),
        (2_000_000, 2_500_000),
        (2_400_000, 2_600_000),
        (3_000_000, 3_100_000),
    ])  # fmt: skip
    assert (found["total_ms"], found["busy_ms"], found["span_ms"]) == (1.3, 1.2, 2.1)
    assert found["launched"] == 4


_SPANS = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**8)), min_size=1)


@given(_SPANS)
def test_busy_time_is_between_the_longest_kernel_and_the_span(spans: list[tuple[int, int]]) -> None:
    found = summary_of([(start, start + length) for start, length in spans])
    assert max(length for _, length in spans) / 1e6 <= found["busy_ms"] + 0.001
    assert found["busy_ms"] <= min(found["span_ms"], found["total_ms"]) + 0.001


def test_nothing_on_the_gpu_is_nothing() -> None:
    assert summary_of([])["busy_ms"] == 0


def test_python_is_told_by_function_and_the_pass_is_the_same() -> None:
    facts: dict[str, Any] = {}

    assert profiled(lambda: sorted([3, 1]), facts, 2) == [1, 3]
    assert any("sorted" in one["name"] for one in facts["python"]["functions"])


def test_without_a_gpu_the_pass_runs_even_so(caplog: pytest.LogCaptureFixture) -> None:
    facts: dict[str, Any] = {}

    assert profiled(lambda: 7, facts, 1) == 7
    assert facts.get("kernels", {"launched": 0})["launched"] == 0
