"""Features: what a point computes of a batch, as functions."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import FeatureFunctions
from tests.backend.fake_point import FAKE

FEATURES = FeatureFunctions(
    names=("batch_size", "twice"),
    features=lambda batch: (batch.batch_size, 2 * batch.q_tokens),
    coordinates=lambda batch: (log2(2 * batch.q_tokens), log2(batch.max_kv) / 2),
    regime=lambda batch: 1 if batch.prefix_tokens else 0,
)
BATCH = Batch.extend([224], [32]).sums


def test_each_part_is_computed_by_itself_and_all_together() -> None:
    assert FEATURES.regime(BATCH) == 1
    assert FEATURES.features(BATCH) == (1, 64)
    assert FEATURES.coordinates(BATCH) == (6.0, 4.0)
    assert FEATURES.position(BATCH) == (1, (6.0, 4.0), (1, 64))
    assert FEATURES.by_name(BATCH) == {"batch_size": 1, "twice": 64}


def test_an_arm_is_offered_its_own_features_or_all() -> None:
    assert FEATURES.columns(replace(FAKE.arms[0], features=("twice",))) == (1,)
    assert FEATURES.columns(FAKE.arms[1]) == (0, 1)


def test_a_batch_that_cannot_be_placed_is_an_error() -> None:
    with pytest.raises((ArithmeticError, ValueError)):
        FEATURES.position(replace(BATCH, q_tokens=0))
