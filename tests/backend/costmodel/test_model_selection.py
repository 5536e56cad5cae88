"""Model selection: in a regime where fits of their own choose wrongly, arms share one model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsa_tune.backend.costmodel.model import LatencyModel
from nsa_tune.backend.costmodel.model_selection import Models, Successes, selected
from nsa_tune.backend.types.point import Question

KEYS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
LAYOUT = Question("layout", {"native": ("native",), "flatten": ("flatten",)})


def successes(time_us: Callable[[float], float], regime: int = 0) -> dict[int, Successes]:
    words = [str(int(keys)) for keys in KEYS]
    return {regime: Successes(words, [(keys,) for keys in KEYS], [time_us(keys) for keys in KEYS])}


def model(slope: float, constant: float) -> LatencyModel:
    return LatencyModel((slope, constant))


def bent(keys: float) -> float:
    """A time that no line fits."""
    return float(8.0 + keys**0.5)


TIMES = {"native": successes(bent), "flatten": successes(lambda keys: 1.03 * bent(keys))}
CROSSING: Models = {"native": {0: model(0.10, 9.9)}, "flatten": {0: model(0.14, 9.6)}}
"""Two fits of lines, which say that flatten is the faster one of few keys."""


def test_arms_that_are_apart_by_a_factor_share_a_model() -> None:
    models = selected([LAYOUT], CROSSING, TIMES)

    native, flatten = models["native"][0], models["flatten"][0]
    assert native == CROSSING["native"][0]
    assert flatten.weights == pytest.approx([1.03 * weight for weight in native.weights])


def test_models_that_choose_well_stay() -> None:
    models = {"native": {0: model(0.3, 8.5)}, "flatten": {0: model(0.31, 8.7)}}

    assert selected([LAYOUT], models, TIMES) == models


def test_arms_that_cross_keep_their_own_models() -> None:
    times = {
        "native": successes(lambda keys: 10.0 + 0.1 * keys),
        "flatten": successes(lambda keys: 9.0 + 0.3 * keys),
    }
    models = {"native": {0: model(0.1, 10.0)}, "flatten": {0: model(0.28, 9.2)}}

    assert selected([LAYOUT], models, times) == models


def test_other_regimes_are_left_alone() -> None:
    other = successes(lambda keys: 5.0, regime=1)
    times = {arm: {**own, **other} for arm, own in TIMES.items()}
    models = {arm: {**own, 1: model(0.0, 5.0)} for arm, own in CROSSING.items()}

    found = selected([LAYOUT], models, times)

    assert found["flatten"][0] != models["flatten"][0]
    assert found["flatten"][1] == models["flatten"][1]


def test_a_single_arm_keeps_its_model() -> None:
    models = {"flatten": {0: model(0.1, 9.0)}}

    assert selected([LAYOUT], models, {"flatten": TIMES["flatten"]}) == models


def test_an_arm_that_was_never_timed_beside_another_leaves_all_as_they_are() -> None:
    alone = Successes(["100"], [(100.0,)], [5500.0])
    times = {**TIMES, "pairs": {0: alone}}
    models = {**CROSSING, "pairs": {0: model(5.0, 500.0)}}
    question = Question("layout", {**LAYOUT.choices, "pairs": ("pairs",)})

    assert selected([question], models, times) == models
