"""A point whose worker dies when it measures the roofline ceilings."""

from __future__ import annotations

import os
import sys

import torch

from tests.autotune.fake_point import TWO_ARMS

POINTS = TWO_ARMS


def _dies(*args: object, **kwargs: object) -> torch.Tensor:
    sys.stderr.write("the copy engine is gone\n")
    os._exit(3)


if "pytest" not in sys.modules:
    torch.empty_like = _dies
