"""Weights: what was fitted to a table's measurements, as text that lies beside them.

An engine that finds weights with a current stamp fits nothing when it opens the table. The stamp
covers all that the fit depends on besides the measurements: the formulas of the points in the
table's setting, and the version of this code. Where it is not current, the models are fitted anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from nsa_tune._errors import StoreCorrupt
from nsa_tune.backend.costmodel.features import Features
from nsa_tune.backend.costmodel.fitting import Extent, Fitted, fitted, own_rows
from nsa_tune.backend.costmodel.model import MOST_BOXES, Box, Failures, LatencyModel
from nsa_tune.backend.types.lengths import MAX_TOKENS
from nsa_tune.backend.types.records import Measurement, Weights

_LEAST_CONSTANT, _MOST_WEIGHT = 1e-5, 1e12
"""A table's times are 1e-3 to 1e9 us. A model's constant is at least a hundredth of the least."""
_MOST_REGIMES = 32
"""Of an arm; the points have 12 at most."""

_Some = TypeVar("_Some", bound=Collection[Any])

_VERSION = 1
"""Raised when the same rows and formulas come to other weights, as after a change of a function
that formulas call: a stamp has the formulas' texts, not the functions'."""


def stamp_of(features: Iterable[Features]) -> str:
    """What the weights of these points depend on, as a digest."""
    lines = "".join(f"{text}\n" for one in features for text in _dependencies(one))
    return hashlib.sha256(f"{_VERSION}{lines}".encode()).hexdigest()[:32]


def _dependencies(features: Features) -> Iterable[str]:
    point = features.point
    yield f"{point.name} {point.regimes_alike} {features.setting.sharing}"
    yield from features.formulas.texts()
    for question in point.questions:
        yield f"{question.name} {question.choices}"
    for arm in point.arms:
        surcharge = "" if arm.surcharge is None else arm.surcharge(features.setting)
        yield f"{arm.name} {arm.features} {surcharge}"


def fit_weights(features: Sequence[Features], measurements: Sequence[Measurement]) -> Weights:
    """Fit every point and give what came out as text.

    Raises:
        StoreCorrupt: when a row's batch cannot be read.
    """
    texts = {}
    for one in features:
        found = fitted(one, own_rows(one, measurements))
        texts[one.point.name] = json.dumps(_plain(found), separators=(",", ":"))
    return Weights(stamp_of(features), texts)


def fitted_of(weights: Weights, features: Features) -> Fitted:
    """What was fitted for one point.

    Raises:
        StoreCorrupt: when the text is not what `fit_weights` writes.
    """
    name, width = features.point.name, len(features.formulas.features)
    try:
        return _fitted(json.loads(weights.points[name]), width)
    except (
        ArithmeticError, KeyError, TypeError, ValueError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        raise StoreCorrupt(f"the weights of {name} cannot be read: {error!r}") from error


# --- as plain values


def _plain(found: Fitted) -> dict[str, Any]:
    return {
        "models": {
            arm: {str(regime): model.weights for regime, model in models.items()}
            for arm, models in found.models.items()
        },
        "failures": {
            arm: [one.wrong, {str(kin): boxes for kin, boxes in one.boxes.items()}]
            for arm, one in found.failures.items()
        },
        "by_surfaces": sorted(found.by_surfaces),
        "extent": found.extent,
    }


def _fitted(plain: Mapping[str, Any], width: int) -> Fitted:
    return Fitted(
        models={
            arm: {int(regime): _model(weights, width) for regime, weights in _few(models).items()}
            for arm, models in plain["models"].items()
        },
        failures={
            arm: Failures(
                None if wrong is None else _words(wrong),
                {int(kin): tuple(map(_box, some)) for kin, some in _few_boxes(boxes).items()},
            )
            for arm, (wrong, boxes) in plain["failures"].items()
        },
        by_surfaces=frozenset(map(int, _few(plain["by_surfaces"]))),
        extent=plain["extent"] and _extent(plain["extent"]),
    )


def _model(weights: Sequence[float], width: int) -> LatencyModel:
    numbers = tuple(map(float, weights))
    if len(numbers) != width + 1 or not all(0 <= one <= _MOST_WEIGHT for one in numbers):
        raise ValueError("a model's weights must be finite, not negative, and one a feature")
    if numbers[-1] < _LEAST_CONSTANT:
        raise ValueError("a batch without work takes time too")
    return LatencyModel(numbers)


def _few(found: _Some) -> _Some:
    if len(found) > _MOST_REGIMES:
        raise ValueError(f"more than {_MOST_REGIMES} regimes")
    return found


def _words(text: object) -> str:
    # Half a character of a pair could not be printed.
    return str(text).encode("utf-8", "backslashreplace").decode()


def _few_boxes(found: Mapping[str, Sequence[Any]]) -> Mapping[str, Sequence[Any]]:
    for boxes in _few(found).values():
        if len(boxes) > MOST_BOXES:
            raise ValueError(f"more than {MOST_BOXES} ranges in which an arm failed")
    return found


def _extent(plain: Sequence[int]) -> Extent:
    extent = Extent(*map(int, plain))
    if not 0 < extent.shortest <= extent.longest <= extent.most_kv <= MAX_TOKENS:
        raise ValueError(f"{extent} cannot have been measured")
    return extent


def _box(plain: Sequence[Any]) -> Box:
    low, high, reason = plain
    a, b, c, d = map(int, low)
    w, x, y, z = (None if one is None else int(one) for one in high)
    return Box((a, b, c, d), (w, x, y, z), _words(reason))
