"""A point whose module ends the worker process that imports it."""

from __future__ import annotations

import os
import sys

from tests.autotune.fake_point import TWO_ARMS

if "torch" in sys.modules and "pytest" not in sys.modules:
    sys.stderr.write("no torch for you\n")
    os._exit(7)

POINTS = TWO_ARMS
