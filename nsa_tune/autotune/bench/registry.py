"""Names that a run and its workers look up alike: decision points and devices."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence

from nsa_tune._errors import UsageError
from nsa_tune.backend.hardware import nvml
from nsa_tune.backend.points import named, points_for
from nsa_tune.backend.types.point import Point
from nsa_tune.backend.types.profiles import ModelProfile

__all__ = ["ALL", "REGISTRY", "check_device", "check_points", "every_gpu", "points_in"]

REGISTRY = "nsa_tune.backend.points:POINTS"
"""Where the decision points are: "module:attribute" of a mapping by name."""
ALL = "all"
"""The device name that stands for every GPU."""


def points_in(registry: str, names: Sequence[str], profile: ModelProfile) -> list[Point]:
    """Those of the mapping at "module:attribute" that arise in a model: the ones called `names`,
    or grouped under one, or all.

    Raises:
        UnknownName: when there is no point of such a name.
        UsageError: for a point that does not arise in the model.
    """
    return points_for(profile, names, _mapping(registry))


def check_points(registry: str, names: Sequence[str]) -> None:
    """Pass when each of `names` is a point's or a group's, whatever the model.

    Raises:
        UnknownName: when one is not.
    """
    for name in names:
        named(name, _mapping(registry))


def _mapping(registry: str) -> Mapping[str, Point]:
    module, _, attribute = registry.partition(":")
    points: Mapping[str, Point] = getattr(importlib.import_module(module), attribute)
    return points


def check_device(name: str) -> None:
    """Pass when `name` is "auto", "all", "cpu", "cuda" or "cuda:N".

    Raises:
        UsageError: for any other word.
    """
    kind, colon, ordinal = name.partition(":")
    numbered = kind == "cuda" and ordinal.isascii() and ordinal.isdigit()
    if not (numbered if colon else kind in ("auto", ALL, "cpu", "cuda")):
        raise UsageError(f"unknown device {name!r}; use auto, cpu, cuda, cuda:N or all")


def every_gpu() -> list[str]:
    """Device names of all GPUs that this process may use; one where nobody can count them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(nvml.gpu_names()) if visible is None else len(visible.split(","))
    return [f"cuda:{i}" for i in range(max(count, 1))]
