"""Trials that fail beyond a limit, each in another way. They run in real child processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TypeAlias

from nsa_tune.autotune.probe.child import Target, WrongAnswer

LIMIT = 37
Trial: TypeAlias = Callable[[int, Target], dict[str, float]]


def _beyond(act: Callable[[], object]) -> Trial:
    """A trial that does this beyond the limit."""

    def trial(size: int, target: Target) -> dict[str, float]:
        del target
        if size > LIMIT:
            act()
        return {}

    return trial


def _raising(error: Exception) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def _exit() -> None:
    """As FlashMLA does: a message, then exit(1) from within the library."""
    sys.stderr.write("CUDA error (file.cu:1): invalid argument\n")
    sys.stderr.flush()
    os._exit(1)


def _hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


class OutOfMemoryError(RuntimeError):
    """As torch's."""


segfaults = _beyond(lambda: ctypes.string_at(0))
abort = _beyond(os.abort)
exits = _beyond(_exit)
leaves = _beyond(lambda: os._exit(0))
"""Ends with exit code 0 before it returns anything."""
raises = _beyond(_raising(RuntimeError("Assertion error: smem_size <= smem_capacity")))
hangs = _beyond(_hang)
wrong = _beyond(_raising(WrongAnswer("relative error 1")))
memory = _beyond(_raising(OutOfMemoryError("CUDA out of memory")))


def nan(size: int, target: Target) -> dict[str, float]:
    del target
    return {"us": float("nan") if size > LIMIT else 1.0}


def refuses(size: int, target: Target) -> dict[str, float]:
    """As a kernel without an image for this GPU."""
    del size, target
    raise RuntimeError("no kernel image is available for execution on the device")


def broken(size: int, target: Target) -> dict[str, float]:
    del size, target
    raise ImportError("libcudart.so.12: cannot open shared object file")


def held(size: int, target: Target) -> dict[str, float]:
    """As torch where another process holds all of the memory."""
    del size, target
    raise RuntimeError("CUDA error: out of memory")


def killed(size: int, target: Target) -> dict[str, float]:
    """As where the host has no memory left."""
    del size, target
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def dear(size: int, target: Target) -> dict[str, float]:
    """Each row takes 1 us, and 3 us beyond the limit."""
    del target
    return {"us": float(size if size <= LIMIT else 3 * size)}
