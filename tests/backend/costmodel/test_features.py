"""Features: what a point computes of a batch, as functions."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest

from nsa_tune.backend.costmodel.features import Features
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.formula import Formulas, Value
from tests.backend.fake_point import FAKE, SETTING

FORMULAS = Formulas(
    values={"twice": Value("2 * q_tokens", "7")},
    features=("batch_size", "twice"),
    coordinates={"twice": "log2(twice)", "longest": "log2(max_kv) / 2"},
    regime="1 if prefix_tokens else 0",
    functions={"log2": log2},
)
ARMS = (replace(FAKE.arms[0], features=("twice",)), *FAKE.arms[1:])
FEATURES = Features(replace(FAKE, arms=ARMS, formulas=lambda setting: FORMULAS), SETTING)
BATCH = Batch.extend([224], [32]).sums


def test_each_part_is_computed_by_itself_and_all_together() -> None:
    assert FEATURES.regime(BATCH) == 1
    assert FEATURES.features(BATCH) == (1, 64)
    assert FEATURES.coordinates(BATCH) == (6.0, 4.0)
    assert FEATURES.position(BATCH) == (1, (6.0, 4.0), (1, 64))
    assert FEATURES.by_name(BATCH) == {"batch_size": 1, "twice": 64}


def test_known_lengths_count() -> None:
    assert FEATURES.features(Batch.extend([224], [32])) == (1, 7)


def test_an_arm_is_offered_its_own_features_or_all() -> None:
    assert FEATURES.columns("mha/dense") == (1,)
    assert FEATURES.columns("mla/wide") == (0, 1)


def test_a_single_feature_is_a_tuple_too() -> None:
    one = FORMULAS._replace(features=("twice",), coordinates={"twice": "log2(twice)"})
    features = Features(replace(FAKE, formulas=lambda setting: one), SETTING)

    assert features.position(BATCH) == (1, (6.0,), (64,))


def test_a_batch_that_cannot_be_placed_is_an_error() -> None:
    with pytest.raises((ArithmeticError, ValueError)):
        FEATURES.position(replace(BATCH, q_tokens=0))
