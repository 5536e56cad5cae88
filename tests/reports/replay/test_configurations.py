"""Configurations: their flags, what differs from given ones, and what is not sure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa_tune import Batch, UsageError
from nsa_tune.reports.replay.configurations import (
    Configuration,
    Configurations,
    Ranked,
    differences,
    judged,
    parsed_flags,
    ranked,
    token_bytes,
)
from nsa_tune.reports.replay.flags import Flags
from nsa_tune.reports.replay.prices import Way
from nsa_tune.reports.replay.rest import RestOfPass
from nsa_tune.reports.replay.tally import Tally
from tests.reports.replay.test_prices import pricer
from tests.reports.replay.test_tally import added, sums

BASE = Configuration("bf16", 8, 1, 8192, graphs=True, next_n=1, plugin=False)
DEFAULT = Ranked(BASE, 100.0, 98.0, 102.0, None, 40.0, 140.0, ())


def other(seconds: float, memory: float = 40.0, **changes: object) -> Ranked:
    configuration = replace(BASE, **changes)  # type: ignore[arg-type]
    low, high = 0.98 * seconds, 1.02 * seconds
    return Ranked(configuration, seconds, low, high, None, memory, 140.0, ())


def test_flags_are_the_engines() -> None:
    own = replace(
        BASE, kv_dtype="fp8", dp=8, graphs=False, next_n=3, prefill=Flags("flashmla_sparse", 512)
    )

    assert own.arguments() == (
        "--tp 8 --dp 8 --enable-dp-attention --kv-cache-dtype fp8_e4m3 --chunked-prefill-size 8192 "
        "--disable-prefill-cuda-graph --dsa-prefill-backend flashmla_sparse "
        "--speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 3"
    )
    assert own.environment() == ["SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD=512"]


def test_a_diff_has_what_changes_and_nothing_else() -> None:
    given = parsed_flags(
        "NSA_TUNE_DISABLE=1 --tp 8 --kv-cache-dtype=fp8_e4m3 --chunked-prefill-size 4096 "
        "--disable-prefill-cuda-graph --port 30000"
    )

    assert given["--disable-prefill-cuda-graph"] == ""
    assert differences(given, BASE) == [
        "---kv-cache-dtype fp8_e4m3", "+--kv-cache-dtype bfloat16",
        "---chunked-prefill-size 4096", "+--chunked-prefill-size 8192",
        "---disable-prefill-cuda-graph",
    ]  # fmt: skip
    assert "-NSA_TUNE_DISABLE=1" in differences(given, replace(BASE, plugin=True))


def test_flags_whose_quotation_does_not_end_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be read: No closing quotation"):
        parsed_flags('--tp 8 --model-path "a model')


def test_one_replay_tells_the_default_the_best_flags_and_the_plug_in() -> None:
    tally = added([Batch.extend([8192], [2048])])
    tally.done()
    base = replace(BASE, kv_dtype="fp8")

    engine, static, plugin = ranked(tally, base, 100_000)

    assert engine.configuration == base
    assert static.configuration.prefill == Flags("flashmla_sparse")
    assert plugin.configuration.plugin
    # The same kernel, around which only the plug-in copies in less time than SGLang.
    assert 1.05 * plugin.attention_s < static.attention_s < engine.attention_s
    assert static.low_s < static.attention_s < static.high_s
    assert engine.memory_gib == pytest.approx(100_000 * 61 * (656 + 132) / 2**30)
    assert token_bytes(pricer(16, "bf16").setting) == 61 * (1152 + 132)


def test_with_the_rest_whole_passes_are_ranked() -> None:
    rest = RestOfPass("made up", ("prefill",), {"graph": {"pass": 3.0}}, {}, 0, {})
    tally = Tally(pricer(), 8192, rest)
    batch = Batch.extend([8192], [2048])
    tally.add(True, sums(batch), lambda: batch, 10)
    tally.done()

    engine, static, plugin = ranked(tally, BASE, 0)

    for one in (engine, static, plugin):
        assert one.passes_s == pytest.approx(one.attention_s + 0.03)
        assert one.seconds == one.passes_s
    assert engine.attention_s == pytest.approx(tally.total(True, Way.ENGINE).latency_us / 1e6)


def test_what_is_not_sure_is_said() -> None:
    found = judged(
        [
            DEFAULT,
            other(80.0, prefill=Flags("fa3")),
            other(99.0, prefill=Flags("tilelang")),
            other(70.0, kv_dtype="fp8", memory=25.0),
            other(60.0, chunk=16384),
            other(50.0, 150.0, plugin=True),
        ],
        DEFAULT,
    )
    unsure = {one.attention_s: " ".join(one.unsure) for one in found}

    assert [one.attention_s for one in found] == [50.0, 60.0, 70.0, 80.0, 99.0, 100.0]
    assert unsure[80.0] == ""
    assert "leave room" in unsure[99.0]
    assert "changes what the model computes" in unsure[70.0]
    assert "give --rest" in unsure[60.0]
    assert "more memory than the GPU has" in unsure[50.0]
    assert "not faster" in unsure[100.0]
    assert Configurations("a", DEFAULT, tuple(found), {}, ()).best.attention_s == 80.0


def test_with_the_rest_the_estimates_still_leave_room() -> None:
    default = replace(DEFAULT, passes_s=300.0)
    close, clear = (
        replace(other(seconds, chunk=16384), passes_s=200 + seconds) for seconds in (97.0, 90.0)
    )

    found = {one.attention_s: one.unsure for one in judged([default, close, clear], default)}

    assert found[97.0] == ("the estimates leave room for the default",)
    assert found[90.0] == ()


def test_only_what_nothing_beats_is_on_the_front() -> None:
    found = judged(
        [DEFAULT, other(80.0), other(80.0, plugin=True), other(90.0, 20.0), other(95.0, 30.0)],
        DEFAULT,
    )

    front = [(one.attention_s, one.configuration.plugin) for one in found if one.pareto]
    assert front == [(80.0, False), (90.0, False)]
