"""What latency models miss, told by batches alike."""

from __future__ import annotations

import sys
from math import log

import numpy
import pytest

from nsa_tune.backend.costmodel.residuals import Residuals
from nsa_tune.backend.points import POINTS

PLACES = {f"b{i}": (float(2**i), 64.0) for i in range(8)}
STEPS = {text: 0.3 if i > 4 else 0.0 for i, text in enumerate(PLACES)}


def test_a_measured_batch_is_corrected_nearly_to_its_time() -> None:
    residuals = Residuals(PLACES, {"a": STEPS})

    for text, features in PLACES.items():
        assert residuals.corrections(features)["a"] == pytest.approx(STEPS[text], abs=0.06)


def test_between_batches_the_correction_lies_between_theirs() -> None:
    corrected = Residuals(PLACES, {"a": STEPS}).corrections((24.0, 64.0))["a"]

    assert 0.05 < corrected < 0.25


def test_far_from_all_batches_the_model_stands() -> None:
    away = Residuals(PLACES, {"a": STEPS}).corrections((1e300, 1e300))["a"]

    assert away == pytest.approx(0.0, abs=1e-6)


def test_arms_of_different_batches_do_not_disturb_each_other() -> None:
    some = {text: STEPS[text] for text in list(PLACES)[2:6]}
    alone = Residuals(PLACES, {"b": some})
    both = Residuals(PLACES, {"a": STEPS, "b": some})

    at = (24.0, 70.0)

    assert both.corrections(at)["b"] == pytest.approx(alone.corrections(at)["b"])


def test_of_many_batches_only_some_are_compared_with() -> None:
    places = {f"{i:04}": (float(i),) for i in range(1000)}
    missed = {text: log(1.1) for text in places}
    residuals = Residuals(places, {"a": missed})

    assert len(residuals._places) <= 500
    assert list(residuals._places)[:2] == ["0000", "0003"]
    assert residuals.corrections((500.5,))["a"] == pytest.approx(log(1.1), rel=0.05)


def test_numpy_where_it_is_loaded_already_computes_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {text: (*features, float(i)) for i, (text, features) in enumerate(PLACES.items())}
    residuals = Residuals(places, {"a": STEPS, "b": dict(list(STEPS.items())[2:6])})
    at = (24.0, 70.0, 3.5)
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    found = residuals.corrections(at)

    monkeypatch.delitem(sys.modules, "numpy")
    assert found == pytest.approx(residuals.corrections(at), rel=1e-12)
    assert all(type(value) is float for value in found.values())


def test_dense_mla_and_the_indexers_layout_alone_are_corrected() -> None:
    assert {point.name for point in POINTS.values() if point.corrected} == {
        "dense_prefill", "dense_decode", "indexer_layout"
    }  # fmt: skip
