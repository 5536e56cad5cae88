"""What attention takes in an engine, and what of it a table cannot tell."""

from __future__ import annotations

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.baselines import DEFAULT_BASELINE
from nsa_tune.engines.dispatchers import with_costs
from nsa_tune.reports.traffic.attention import AttentionPrices


def test_a_step_whose_kernel_has_no_times_is_named() -> None:
    """A table may be older than the arm `fa3` of decode, SGLang's kernel over bf16."""
    opened = Dispatcher.open(gpu="NVIDIA H200", model="deepseek-v3.2", heads=16, kv_dtype="bf16")
    without = frozenset({"fa3"})
    cut = with_costs(opened, "decode", opened.setting, lambda row, _: row, without=without)
    older, whole = (AttentionPrices(one, "sglang", DEFAULT_BASELINE) for one in (cut, opened))
    batch = Batch.decode([4096] * 8)
    cheap_us = older.of(batch, graph=True).us["default"]
    dear_us = whole.of(batch, graph=True).us["default"]

    assert "decode" in older.unpriced
    assert "decode" not in whole.unpriced
    assert cheap_us < dear_us / 2
