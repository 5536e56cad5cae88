"""What SGLang runs around dense MHA, in words of a batch."""

from __future__ import annotations

from nsa_tune import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.sglang.costs.mha_projection import mha_projection_us

FP8, BF16 = KVLayout.FP8_PACKED, KVLayout.BF16


def test_it_grows_with_the_keys_that_are_projected() -> None:
    few, many = (mha_projection_us(Batch.extend([0], [new]), FP8) for new in (100, 2000))

    assert 4 < few < many < 6


def test_a_prefix_is_copied_once_more_over_an_fp8_pool() -> None:
    batch, alone = Batch.extend([1024], [976]), Batch.extend([0], [2000])

    assert mha_projection_us(batch, FP8) > mha_projection_us(alone, FP8) + 2
    assert mha_projection_us(batch, BF16) == mha_projection_us(alone, BF16)
