"""Decision points by name. A run and its worker processes both look them up here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from nsa_tune.backend.points import named, points_for
from nsa_tune.backend.types.point import Point
from nsa_tune.backend.types.profiles import ModelProfile

REGISTRY = "nsa_tune.backend.points:POINTS"
"""Where the decision points are: "module:attribute" of a mapping by name. It is passed as text, so
that a worker process can import it."""


def points_in(registry: str, names: Sequence[str], profile: ModelProfile) -> list[Point]:
    """The points of `registry` called `names`, or grouped under one of them; without names every
    point that `profile`'s model has.

    Raises:
        UnknownName: when no point or group has such a name.
        UsageError: when the model has no such point.
    """
    return points_for(profile, names, _mapping(registry))


def check_points(registry: str, names: Sequence[str]) -> None:
    """Accept names of points and of groups, of whatever model.

    Raises:
        UnknownName: when no point or group has such a name.
    """
    for name in names:
        named(name, _mapping(registry))


def _mapping(registry: str) -> Mapping[str, Point]:
    module, _, attribute = registry.partition(":")
    points: Mapping[str, Point] = getattr(importlib.import_module(module), attribute)
    return points
