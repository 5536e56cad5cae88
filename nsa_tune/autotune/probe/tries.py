"""A try: one trial function run at one size in a process of its own, and how that ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum

from nsa_tune._child_process import command, environment
from nsa_tune.autotune.probe import child as probe_child
from nsa_tune.autotune.probe.child import MARK, Target

_LONGEST_LINE = 200


class Outcome(StrEnum):
    """How a try ended. All but OK and MEMORY mean that its size is over the limit."""

    OK = "ok"
    EXITED = "exited"
    """It raised an exception, or a library ended the process."""
    KILLED = "killed"
    """By a signal: a segmentation fault, or no memory on the host."""
    HUNG = "hung"
    """It did not end before its deadline."""
    WRONG = "wrong"
    """Its output differs from the reference, or its time is not a number."""
    MEMORY = "memory"
    """The memory was too small, or others held it, which says nothing about the kernel."""


@dataclass(frozen=True, slots=True)
class Try:
    """How a trial ended at one size."""

    size: int
    outcome: Outcome
    words: str = ""
    """The last line that it wrote, when it did not succeed."""
    numbers: Mapping[str, float] | None = None
    """What it measured, when it succeeded."""


def attempt(trial: str, size: int, target: Target, deadline_s: float) -> Try:
    """Run `trial` ("module:function") once at `size`; kill it after `deadline_s` seconds."""
    text = json.dumps({"size": size, **asdict(target)})
    # In a session of its own, so that a compiler that it starts can be killed with it.
    with subprocess.Popen(
        command(probe_child.__name__, trial, text), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True, env=environment(),
    ) as child:  # fmt: skip
        try:
            stdout, stderr = child.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return Try(size, Outcome.HUNG, f"not done after {deadline_s:g} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return _try_of(size, child.returncode, stdout, stderr)


def _try_of(size: int, code: int, stdout: str, stderr: str) -> Try:
    last = stdout.rstrip().rpartition("\n")[2]
    if code == 0 and last.startswith(MARK):
        numbers = json.loads(last.removeprefix(MARK))
        if all(number == number for number in numbers.values()):
            return Try(size, Outcome.OK, numbers=numbers)
        return Try(size, Outcome.WRONG, "a time that is no number")
    lines = [line.strip() for line in f"{stdout}\n{stderr}".splitlines() if line.strip()]
    words = lines[-1][:_LONGEST_LINE] if lines else "it wrote nothing"
    if code < 0:
        return Try(size, Outcome.KILLED, f"{signal.Signals(-code).name}: {words}")
    outcome = {probe_child.WRONG: Outcome.WRONG, probe_child.OUT_OF_MEMORY: Outcome.MEMORY}
    return Try(size, outcome.get(code, Outcome.EXITED), f"exit code {code}: {words}")
