"""How much longer SGLang's own copies take, in words of a batch."""

from __future__ import annotations

import pytest

from nsa_tune import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.sglang.costs.engine_copies import longer_us, padding_us


def test_sglangs_copies_take_longer_where_there_are_any() -> None:
    alone, behind = Batch.extend([0], [1000]), Batch.extend([9000], [1000])

    assert longer_us(alone, KVLayout.BF16, 64) == longer_us(behind, KVLayout.BF16, 128) == 0
    assert longer_us(alone, KVLayout.BF16, 16) == longer_us(alone, KVLayout.FP8_PACKED, 16) > 20
    assert longer_us(behind, KVLayout.FP8_PACKED, 128) == pytest.approx(25)
    assert padding_us(alone, 32) > padding_us(alone, 16)
