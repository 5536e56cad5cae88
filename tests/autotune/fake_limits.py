"""Trials that fail beyond a limit, each in another way. They run in real child processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from nsa_tune.autotune.probe.child import Target, WrongAnswer

LIMIT = 37


def segfaults(size: int, target: Target) -> dict[str, float]:
    del target
    if size > LIMIT:
        ctypes.string_at(0)
    return {}


def abort(size: int, target: Target) -> dict[str, float]:
    del target
    if size > LIMIT:
        os.abort()
    return {}


def exits(size: int, target: Target) -> dict[str, float]:
    """As FlashMLA does: a message, then exit(1) from within the library."""
    del target
    if size > LIMIT:
        sys.stderr.write("CUDA error (file.cu:1): invalid argument\n")
        sys.stderr.flush()
        os._exit(1)
    return {}


def leaves(size: int, target: Target) -> dict[str, float]:
    """Ends with exit code 0 before it returns anything."""
    del target
    if size > LIMIT:
        os._exit(0)
    return {}


def raises(size: int, target: Target) -> dict[str, float]:
    del target
    if size > LIMIT:
        raise RuntimeError("Assertion error: smem_size <= smem_capacity")
    return {}


def hangs(size: int, target: Target) -> dict[str, float]:
    del target
    if size > LIMIT:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    return {}


def wrong(size: int, target: Target) -> dict[str, float]:
    del target
    if size > LIMIT:
        raise WrongAnswer("relative error 1")
    return {}


def nan(size: int, target: Target) -> dict[str, float]:
    del target
    return {"us": float("nan") if size > LIMIT else 1.0}


class OutOfMemoryError(RuntimeError):
    """As torch's."""


def memory(size: int, target: Target) -> dict[str, float]:
    del target
    if size > LIMIT:
        raise OutOfMemoryError("CUDA out of memory")
    return {}


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
