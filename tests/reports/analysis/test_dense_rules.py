"""Advice for dense MLA: what constants of engines lose, on times that are known."""

from __future__ import annotations

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.reports.analysis.dense_rules import DenseAdvice, advised

BATCHES = [
    Batch.extend([prefix], [new])
    for prefix in (0, 1024, 4096, 16384)
    for new in (32, 128, 256, 400, 4096)
]


def _advice(engine: str, *, gpu: str = "NVIDIA H200") -> DenseAdvice:
    """Absorbed attention takes a microsecond a new token, MHA always 160."""
    setting = Setting(profile_of("deepseek-v3"), 16, KVLayout.BF16, KNOWN[gpu])
    rows = []
    for batch in BATCHES:
        us = {"mla/fa3": batch.q_tokens, "mla/fa3_paged": batch.q_tokens, "mha/sgl_fa3": 160}
        if batch.prefix_tokens:
            us["mha/sgl_fa3_merged"] = 160
        rows += [
            Measurement("dense_prefill", str(batch), arm, Status.OK, float(time_us))
            for arm, time_us in us.items()
        ]
    policy = Policy.fit(POINTS["dense_prefill"], setting, rows)
    return advised(Dispatcher(setting, [policy], source="made up"), engine)


def test_sglangs_graphs_lose_most_on_many_new_tokens() -> None:
    default, full, eager, best = _advice("sglang").rules

    assert (default.worst, default.worst_batch[-4:]) == (4096 / 160 - 1, "4096")
    # MHA for 32 new tokens; and behind a short prefix MLA for many, as by default.
    assert full.worst == 160 / 32 - 1
    assert (eager.worst, eager.worst_batch) == (4096 / 160 - 1, "extend:1024+4096")
    assert best.mean < eager.mean < default.mean
    assert best.name.endswith("SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD=0")


def test_vllms_threshold_is_best_between_the_two_paths() -> None:
    given, best = _advice("vllm").rules

    assert given.worst == 400 / 160 - 1
    assert best.name == "MHA beyond 128 new tokens (no flag)"
    assert best.mean == best.worst == 0
    assert _advice("vllm").document()["batches"] == len(BATCHES)


def test_what_was_not_measured_is_refused_with_a_sentence() -> None:
    with pytest.raises(UsageError, match="for Hopper"):
        _advice("sglang", gpu="NVIDIA B200")
    setting = Setting(profile_of("kimi-k2"), 8, KVLayout.BF16, KNOWN["NVIDIA H200"])
    empty = Policy.fit(POINTS["dense_prefill"], setting, [])
    with pytest.raises(NoTunedData, match="nothing to advise from"):
        advised(Dispatcher(setting, [empty], source="made up"), "sglang")


def test_the_text_names_each_rule_with_what_it_loses() -> None:
    first, _, *rules = list(_advice("sglang").lines())[:6]

    assert first.startswith(
        "NVIDIA H200, deepseek-v3, 16 local heads: time above the faster of MHA"
    )
    assert [line.split("  ")[0] for line in rules[:3]] == [
        "SGLang 0.5.23, absorbing prefill graphs",
        "--cuda-graph-backend-prefill full",
        "--disable-prefill-cuda-graph *",
    ]
    assert any(line.startswith("* Not ranked: ") for line in _advice("sglang").lines())
    assert not any("Not ranked" in line for line in _advice("vllm").lines())
