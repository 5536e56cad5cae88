"""Traces of PyTorch's profiler are summed by kinds of kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine.kernel_profile import kernels_of, kind_of, main, summary_of


def _kernel(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat, "ph": "X"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void deep_gemm::sm90_fp8_mqa_logits<64u>", "indexer logits"),
        ("void topk_transform_kernel<2048>", "top-k"),
        ("sm90::fwd::sparse_attn_fwd_kernel", "sparse attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", "dense attention"),
        ("fused_moe_kernel", "MoE"),
        ("nvjet_tst_128x256", "linear layers"),
        ("per_token_group_quant_8bit_kernel", "quantization"),
        ("Memcpy DtoD (Device -> Device)", "norms, rope, copies"),
        ("mystery", "other"),
    ],
)
def test_kernels_are_told_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_trace_is_summed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        _kernel("fused_moe_kernel", 1000, 500),
        _kernel("fused_moe_kernel", 2000, 500),
        _kernel("mystery", 2400, 200),
        _kernel("Memset", 3000, 100, cat="gpu_memset"),
        _kernel("cudaLaunchKernel", 0, 9e6, cat="cuda_runtime"),
        {"name": "process_name", "ph": "M"},
    ]
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)

    found = summary_of(kernels_of(path))
    assert found["kinds_ms"] == {"MoE": 1.0, "other": 0.2, "norms, rope, copies": 0.1}
    assert (found["total_ms"], found["busy_ms"], found["span_ms"]) == (1.3, 1.2, 2.1)
    assert found["kernels"][0] == {"name": "fused_moe_kernel", "ms": 1.0, "calls": 2}
    main([str(path)])
    assert "1.00 ms  MoE" in capsys.readouterr().out


_SPANS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1)


@given(_SPANS)
def test_busy_time_is_between_the_longest_kernel_and_the_span(spans: list[tuple[int, int]]) -> None:
    found = summary_of([_kernel("x", start, length) for start, length in spans])
    assert max(length for _, length in spans) / 1e3 <= found["busy_ms"] + 0.001
    assert found["busy_ms"] <= min(found["span_ms"], found["total_ms"]) + 0.001


def test_an_empty_trace_is_nothing() -> None:
    assert summary_of([])["busy_ms"] == 0
