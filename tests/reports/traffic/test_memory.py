"""Memory: weights by parallelism, and a pool of what they leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa_tune.backend.types.profiles import CHECKPOINTS
from nsa_tune.reports.traffic.memory import memory_of
from tests.reports.traffic.deployments import dispatcher

SETTING, V32 = dispatcher(16, "bf16").setting, "deepseek-v3.2"


def test_weights_are_shared_and_the_pool_is_what_they_leave() -> None:
    found = memory_of(SETTING, V32, tp=8)

    assert found is not None
    assert found.weights_gib * 8 * 2**30 == pytest.approx(
        CHECKPOINTS["deepseek-v3.2"].weights_gb * 1e9
    )
    assert found.pool_gib == pytest.approx(0.88 * found.device_gib - found.weights_gib)
    # 512 + 64 bf16 values and the indexer's 132 bytes, in 61 layers.
    assert found.token_bytes == 61 * (1152 + 132)


def test_a_quarter_of_the_weights_does_not_fit() -> None:
    found = memory_of(SETTING, V32, tp=4)

    assert found is not None
    assert not found.fits
    assert found.pool_tokens == 0


def test_data_parallel_attention_keeps_its_weights_whole() -> None:
    split, whole = memory_of(SETTING, V32, tp=8), memory_of(SETTING, V32, tp=8, dp=8)

    assert split is not None
    assert whole is not None
    more_gb = (whole.weights_gib - split.weights_gib) * 2**30 / 1e9
    assert more_gb == pytest.approx(12.2 * 7 / 8)


def test_an_fp8_pool_holds_more_tokens() -> None:
    wide, narrow = (memory_of(dispatcher(16, kv).setting, V32, tp=8) for kv in ("bf16", "fp8"))

    assert wide is not None
    assert narrow is not None
    assert narrow.pool_tokens > 1.5 * wide.pool_tokens


def test_of_an_unknown_model_or_gpu_nothing_is_said() -> None:
    assert memory_of(SETTING, "other", tp=8) is None
    assert memory_of(replace(SETTING, device=replace(SETTING.device, memory=0)), V32, tp=8) is None
