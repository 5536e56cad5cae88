"""One try of a probe, alone in its process: ``python -m nsa_tune.autotune.probe.child TRIAL JSON``.

Prints one last line, "nsa-tune: " and the try's numbers as JSON, when it went well. Everything else
that can happen to a process (an exit code, a signal, silence) is for the parent to see.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["MARK", "OUT_OF_MEMORY", "WRONG", "Target", "WrongAnswer", "main"]

MARK = "nsa-tune: "
WRONG = 91
"""Exit code of a wrong answer: not a number, or not the reference's."""
OUT_OF_MEMORY = 92
"""Exit code of a device whose memory is too small for the try."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a try is made for."""

    model: str
    heads: int
    """Local heads."""
    kv_dtype: str
    device: str


class WrongAnswer(Exception):
    """A try came back with something else than the reference."""


Trial = Callable[[int, Target], dict[str, float]]


def main(arguments: Sequence[str]) -> int:
    """Run the trial ``module:function`` with the size and target in JSON; the exit code."""
    name, text = arguments
    module, _, function = name.partition(":")
    given = json.loads(text)
    trial: Trial = getattr(importlib.import_module(module), function)
    try:
        numbers = trial(given.pop("size"), Target(**given))
    except WrongAnswer as wrong:
        sys.stderr.write(f"{wrong}\n")
        return WRONG
    except RuntimeError as error:
        # torch.OutOfMemoryError is one; its name is all that needs no torch.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        sys.stderr.write(f"{error}\n")
        return OUT_OF_MEMORY
    sys.stdout.write(f"\n{MARK}{json.dumps(numbers)}\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    # By its own name, so that a trial's WrongAnswer is the one that is caught here.
    sys.exit(importlib.import_module("nsa_tune.autotune.probe.child").main(sys.argv[1:]))
