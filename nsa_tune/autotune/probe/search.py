"""Find by experiment the largest size that goes well: double, then bisect, each try a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

from nsa_tune.autotune.probe import child as probe_child
from nsa_tune.autotune.probe.child import MARK, Target

__all__ = ["Found", "Outcome", "Try", "attempt", "search"]

_LAST_WORDS = 200


class Outcome(StrEnum):
    """How a try ended. All but OK are over the limit."""

    OK = "ok"
    EXITED = "exited"
    """It raised, or a library ended the process."""
    KILLED = "killed"
    """By a signal: a segmentation fault, or no memory on the host."""
    HUNG = "hung"
    """It was not done at its deadline."""
    WRONG = "wrong"
    """Its output was not the reference's, or no number."""
    MEMORY = "memory"
    """The device's memory was too small: says nothing about the kernel."""


@dataclass(frozen=True, slots=True)
class Try:
    """One try."""

    size: int
    outcome: Outcome
    words: str = ""
    """What it said, in one line, when it did not go well."""
    numbers: Mapping[str, float] | None = None
    """What it measured, when it did."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    limit: int
    """The largest size that went well; 0 when not even 1 did."""
    past: Try | None
    """The smallest size that did not; None when the largest asked for went well."""
    tries: tuple[Try, ...]
    """All of them, in their order."""


def attempt(trial: str, size: int, target: Target, deadline_s: float) -> Try:
    """Run `trial` ("module:function") once at `size` in a process of its own."""
    text = json.dumps({"size": size, **asdict(target)})
    command = [sys.executable, "-m", probe_child.__name__, trial, text]
    # A group of its own, so that a compiler that it started does not outlive it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    ) as child:  # fmt: skip
        try:
            said, complained = child.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return Try(size, Outcome.HUNG, f"not done after {deadline_s:g} s")
        finally:
            _end(child.pid)
    return _judged(size, child.returncode, said, complained)


def _end(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _judged(size: int, code: int, said: str, complained: str) -> Try:
    last = said.rstrip().rpartition("\n")[2]
    if code == 0 and last.startswith(MARK):
        numbers = json.loads(last.removeprefix(MARK))
        if all(number == number for number in numbers.values()):
            return Try(size, Outcome.OK, numbers=numbers)
        return Try(size, Outcome.WRONG, "a time that is no number")
    lines = [line.strip() for line in f"{said}\n{complained}".splitlines() if line.strip()]
    words = lines[-1][:_LAST_WORDS] if lines else "it said nothing"
    if code < 0:
        return Try(size, Outcome.KILLED, f"{signal.Signals(-code).name}: {words}")
    outcome = {probe_child.WRONG: Outcome.WRONG, probe_child.OUT_OF_MEMORY: Outcome.MEMORY}
    return Try(size, outcome.get(code, Outcome.EXITED), f"exit code {code}: {words}")


def search(run: Callable[[int], Try], start: int, most: int, expected: int | None = None) -> Found:
    """The largest size up to `most` that goes well, if all below it do.

    With `expected`, that size and the one behind it are tried first; where they do not agree with
    it, and without it, sizes are doubled from `start` and the gap is bisected.
    """
    tries: list[Try] = []
    low, high = 0, most + 1

    def narrow(size: int) -> None:
        nonlocal low, high
        one = run(size)
        tries.append(one)
        if one.outcome is Outcome.OK:
            low = size
        else:
            high = size

    for size in () if expected is None else (expected, expected + 1):
        if low < size < high:
            narrow(size)
    size = max(start, low + 1)
    while low < size < high:
        narrow(size)
        size = min(2 * size, most) if size < most else most + 1
    while high - low > 1:
        narrow((low + high) // 2)
    past = next((one for one in tries if one.size == high), None)
    return Found(low, past, tuple(tries))
