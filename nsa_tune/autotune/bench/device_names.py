"""Device names as the command line takes them: "auto", "cpu", "cuda", "cuda:N" and "all"."""

from __future__ import annotations

import os

from nsa_tune._errors import DeviceMissing, UsageError
from nsa_tune.backend.hardware import nvml
from nsa_tune.backend.hardware.visible import visible_gpus

ALL = "all"
"""Stands for every GPU of this host."""


def check_device(name: str) -> None:
    """Accept "auto", "all", "cpu", "cuda" and "cuda:N".

    Raises:
        UsageError: for any other name.
    """
    kind, colon, ordinal = name.partition(":")
    numbered = kind == "cuda" and ordinal.isascii() and ordinal.isdigit()
    if not (numbered if colon else kind in ("auto", ALL, "cpu", "cuda")):
        raise UsageError(f"unknown device {name!r}; use auto, cpu, cuda, cuda:N or all")


def every_gpu() -> list[str]:
    """ "cuda:N" for each GPU that this process may use; "cuda:0" where NVML cannot count them.

    Raises:
        DeviceMissing: when CUDA_VISIBLE_DEVICES hides every GPU.
    """
    count = len(visible_gpus(len(nvml.gpu_names())))
    if not count and "CUDA_VISIBLE_DEVICES" in os.environ:
        raise DeviceMissing(
            "CUDA_VISIBLE_DEVICES hides every GPU of this host: unset it, or use --device cpu"
        )
    return [f"cuda:{i}" for i in range(max(count, 1))]
