"""Environment variables that switch parts of a plug-in on and off."""

from __future__ import annotations

import os

DENSE_MLA = "NSA_TUNE_DENSE_MLA"
"""1 steers vLLM where it runs dense MLA too: there no plug-in has run on a GPU yet."""
_NO = ("0", "false", "no", "off")


def switched_on(name: str) -> bool:
    """Whether the environment variable `name` leaves a part on, as it is by default."""
    return _value(name) not in _NO


def asked_for(name: str) -> bool:
    """Whether the environment variable `name` switches on what is off by default."""
    return _value(name) not in ("", *_NO)


def _value(name: str) -> str:
    return os.environ.get(name, "").strip().lower()
