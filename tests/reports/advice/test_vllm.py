"""Advice for vLLM, from tables whose best settings are known."""

from __future__ import annotations

import subprocess

import pytest

from nsa_tune import Batch, Dispatcher, NoTunedData, UsageError
from nsa_tune.engines.vllm.releases import RELEASES
from nsa_tune.reports.advice.advice import Advice, AdviceReport
from nsa_tune.reports.advice.vllm import DP, FORCE_MQA, PLUGIN, TP, advise
from tests.engines.sglang.tables import dispatcher

H100 = "NVIDIA H100 80GB HBM3"


def _shipped(heads: int) -> Dispatcher:
    return Dispatcher.open(
        gpu=H100, model="deepseek-v3.2", heads=heads, kv_dtype="fp8", strict=True
    )


def _named(advised: AdviceReport, name: str) -> Advice | None:
    found = (one for one in advised.advice if name in {option.name for option in one.settings})
    return next(found, None)


def _why(advised: AdviceReport, name: str) -> str:
    return next(one.why for one in advised.unadvised if one.name == name)


def test_mqa_is_advised_where_mha_is_dear() -> None:
    dear, cheap = (advise(dispatcher("fp8", mha_us=us)) for us in (1e5, 0.5))
    found = _named(dear, FORCE_MQA)

    assert found is not None
    assert [(one.value, one.default) for one in found.settings] == [("true", "false")]
    assert found.gain > 2
    assert _named(cheap, FORCE_MQA) is None
    assert "not slower" in _why(cheap, FORCE_MQA)


def test_what_the_plug_in_would_gain_is_the_mean_over_the_batches() -> None:
    """A prompt of 200 tokens at 128 heads goes to the decode kernel, where MHA is exact."""
    table = dispatcher("fp8", mha_us=2.0)
    batch = Batch.extend([0], [200])
    own = table.policies["prefill"].estimates(batch)["mla/flashmla_kv"].latency_us
    best = min(one.latency_us for one in table.policies["prefill"].estimates(batch).values())
    why = _why(advise(table, batches=[(batch, 3.0)]), PLUGIN)

    assert f"{own / best:.2f}x faster, {own / best:.2f}x at most" in why


def test_data_parallel_attention_is_compared_for_the_same_requests() -> None:
    table, whole = _shipped(16), _shipped(128)
    batch = Batch.extend([8192], [2048])
    group = Batch.extend([8192] * 8, [2048] * 8)
    advised = advise(table, batches=[(batch, 1.0)], whole=whole)
    before = table.policies["prefill"].estimates(group)["mla/flashmla_kv"].latency_us
    after = whole.policies["prefill"].estimates(batch)["mla/flashmla_sparse"].latency_us
    found = _named(advised, DP)

    assert found is not None
    assert {one.name: one.value for one in found.settings} == {TP: "1", DP: "8"}
    assert found.gain == pytest.approx(before / after)
    assert "communication" in found.reservation


def test_data_parallel_attention_needs_a_table_of_all_heads() -> None:
    assert "nothing is measured for 128 local heads" in _why(advise(_shipped(16)), DP)
    assert "already" in _why(advise(_shipped(128)), DP)


def test_a_shell_reads_it_and_nothing_unsure_is_active() -> None:
    advised = advise(_shipped(16), whole=_shipped(128))
    lines = list(advised.shell())
    done = subprocess.run(
        ["sh", "-n"], input="\n".join(lines), text=True, capture_output=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert all(line.startswith("# ") for line in lines)


def test_sure_arguments_have_the_engines_name() -> None:
    lines = list(advise(dispatcher("fp8", mha_us=1e5)).shell())

    assert f"NSA_TUNE_VLLM_ARGS='{FORCE_MQA} true'" in lines


def test_unknown_releases_and_other_passes_are_refused() -> None:
    table = dispatcher("fp8")
    with pytest.raises(UsageError, match=r"vLLM 0\.12\.0 is unknown; known releases: 0\.31 to"):
        advise(table, "0.12.0")
    with pytest.raises(UsageError, match="none of the given batches is a prefill"):
        advise(table, batches=[(Batch.decode([99]), 1.0)])
    untuned = Dispatcher.open(gpu="No GPU", model="deepseek-v3.2", heads=128, kv_dtype="fp8")
    with pytest.raises(NoTunedData, match="nothing to advise from"):
        advise(untuned)


def test_every_flag_is_known_for_the_release() -> None:
    names = {FORCE_MQA, TP, DP}

    for name in names:
        assert name.rpartition(".")[2].lstrip("-").replace("-", "_") in RELEASES[-1].flags
