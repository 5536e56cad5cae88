"""What each step of attention takes in a pass, by the ranges in which its kernels were launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine import attention_steps as module
from benchmarks.engine.attention_steps import Span, kernels_of

if TYPE_CHECKING:
    import pytest


def test_a_kernel_belongs_to_the_innermost_range_of_its_launch() -> None:
    ranges = [Span("indexer_prefill", 0, 100), Span("indexer_topk", 50, 90)]
    launches = [Span("cudaLaunchKernel", at, at + 1, i) for i, at in enumerate((10, 60, 95, 200))]
    # They run later than they are launched.
    kernels = [Span("k", 1000 + i, 1_001_000 + i, i) for i in range(4)]

    assert kernels_of(kernels, launches, ranges) == {
        "indexer_prefill": {"k": 2.0}, "indexer_topk": {"k": 1.0}
    }  # fmt: skip


def test_writing_the_new_keys_is_no_attention() -> None:
    launches = [Span("cudaLaunchKernel", 5, 6, 1)]

    assert kernels_of([Span("k", 50, 60, 1)], launches, [Span("store", 0, 10)]) == {}


def test_a_kernel_whose_launch_was_not_seen_is_left_out() -> None:
    assert kernels_of([Span("k", 0, 5, 7)], [], [Span("prefill", 0, 10)]) == {}


def test_the_profilers_events_are_sorted_out() -> None:
    def event(name: str, kind: str, correlation: int = 0) -> Any:
        return SimpleNamespace(
            name=lambda: name, start_ns=lambda: 5, duration_ns=lambda: 2,
            device_type=lambda: f"DeviceType.{kind}", correlation_id=lambda: correlation,
        )  # fmt: skip

    kernels, launches, ranges = module._sorted_out([
        event("nsa-step:prefill", "CPU"), event("nsa-step:prefill", "CUDA"),
        event("aten::mm", "CPU"),
        event("cuLaunchKernelEx", "CPU", 3), event("flash_fwd", "CUDA", 3),
    ])  # fmt: skip

    assert [one.name for one in ranges] == ["prefill"]
    assert kernels == [Span("flash_fwd", 5, 7, 3)]
    assert launches == [Span("cuLaunchKernelEx", 5, 7, 3)]


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(2, 2)


class _Pool:
    def set_kv_buffer(self) -> str:
        return "written"


def test_sglangs_functions_still_do_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "bmm", torch.bmm)  # to be put back
    monkeypatch.setattr(_Pool, "set_kv_buffer", _Pool.set_kv_buffer)
    layer = _Layer()
    model = torch.nn.ModuleList([layer])
    runner = SimpleNamespace(model=model, token_to_kv_pool=_Pool())
    ones = torch.ones(1, 2, 2)
    projection = layer.kv_b_proj
    expected = projection(ones)
    module.wrap(runner)

    result, facts = module.profiled(
        lambda: (torch.bmm(ones, ones), projection(ones), runner.token_to_kv_pool.set_kv_buffer())
    )

    assert torch.equal(result[0], torch.full((1, 2, 2), 2.0))
    assert torch.equal(result[1], expected)
    assert result[2] == "written"
    assert facts == {"steps_ms": {}, "attention_ms": 0, "kernels_ms": {}}, (
        "a CPU launches no kernels"
    )
