"""How a Python process is started that measures, tries or imports something for this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]
"""Stands for the working directory on the import path (""), where this process may have found
nsa-tune."""


def command(module: str, *words: str) -> list[str]:
    """What runs `module` with the arguments `words`, by the Python that runs this process.

    Start it with `environment`. Its output is not buffered.
    """
    # -P: do not import modules from the working directory, whatever files are there.
    return [sys.executable, "-u", "-P", "-m", module, *words]


def environment() -> dict[str, str]:
    """The environment of this process, with its import path."""
    paths = [str(Path(path or _ROOT).absolute()) for path in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
