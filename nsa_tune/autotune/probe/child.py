"""The process of one try: ``python -m nsa_tune.autotune.probe.child TRIAL JSON``.

When the trial succeeds, the last line on stdout is "nsa-tune: " and its numbers as JSON. All else
that may happen (an exception, exit(), a signal, a hang) the parent sees from outside.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MARK = "nsa-tune: "
WRONG = 91
"""Exit code when the output differs from the reference."""
OUT_OF_MEMORY = 92
"""Exit code when the memory is too small for the try, or held by other processes."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a trial is run for. JSON carries it to the process."""

    model: str
    heads: int
    """Local heads."""
    kv_dtype: str
    device: str


class WrongAnswer(Exception):
    """The output of a trial differs from the reference."""


Trial = Callable[[int, Target], dict[str, float]]
"""Runs a kernel at a size; returns what it measured, and raises when the size is over the limit."""


def main(arguments: Sequence[str]) -> int:
    """Run the trial ``module:function`` with the size and target in JSON; returns an exit code."""
    name, text = arguments
    module, _, function = name.partition(":")
    given = json.loads(text)
    trial: Trial = getattr(importlib.import_module(module), function)
    try:
        numbers = trial(given.pop("size"), Target(**given))
    except WrongAnswer as wrong:
        sys.stderr.write(f"{wrong}\n")
        return WRONG
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        sys.stderr.write(f"{error}\n")
        return OUT_OF_MEMORY
    sys.stdout.write(f"\n{MARK}{json.dumps(numbers)}\n")
    sys.stdout.flush()
    return 0


def _out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """By name and text: this module does not import torch, and a GPU whose memory other processes
    hold does not let CUDA start, which torch raises as another error than its own."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or ("out of memory" in text)
    )


if __name__ == "__main__":
    # Import this module by its name: trials raise that module's WrongAnswer, not __main__'s.
    sys.exit(importlib.import_module("nsa_tune.autotune.probe.child").main(sys.argv[1:]))
