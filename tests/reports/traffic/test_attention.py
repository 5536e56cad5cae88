"""What attention takes in an engine, and what of it a table cannot tell."""

from __future__ import annotations

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.baselines import DEFAULT_BASELINE
from nsa_tune.reports.traffic.attention import AttentionPrices


def _prices(gpu: str) -> AttentionPrices:
    dispatcher = Dispatcher.open(gpu=gpu, model="deepseek-v3.2", heads=16, kv_dtype="bf16")
    return AttentionPrices(dispatcher, "sglang", DEFAULT_BASELINE)


def test_a_step_whose_kernel_has_no_times_is_named() -> None:
    """The H100's table is older than the arm `fa3` of decode, SGLang's kernel over bf16."""
    batch = Batch.decode([4096] * 8)
    older, whole = _prices("NVIDIA H100 80GB HBM3"), _prices("NVIDIA H200")
    cheap_us = older.of(batch, graph=True).us["default"]
    dear_us = whole.of(batch, graph=True).us["default"]

    assert "decode" in older.unpriced
    assert "decode" not in whole.unpriced
    assert cheap_us < dear_us / 2
