"""Device names as the command line takes them: "auto", "cpu", "cuda", "cuda:N" and "all"."""

from __future__ import annotations

import os

from nsa_tune._errors import UsageError
from nsa_tune.backend.hardware import nvml

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
    """ "cuda:N" for each GPU that this process may use; "cuda:0" where NVML cannot count them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(nvml.gpu_names()) if visible is None else len(visible.split(","))
    return [f"cuda:{i}" for i in range(max(count, 1))]
