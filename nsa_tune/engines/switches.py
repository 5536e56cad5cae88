"""Environment variables that switch parts of a plug-in on and off."""

from __future__ import annotations

import os

OFF_SWITCH = "NSA_TUNE_DISABLE"
_NO = ("0", "false", "no", "off")


def switched_on(name: str) -> bool:
    """Whether the environment variable `name` leaves a part on, as it is by default."""
    return _value(name) not in _NO


def asked_for(name: str) -> bool:
    """Whether the environment variable `name` switches on what is off by default."""
    return _value(name) not in ("", *_NO)


def switched_off() -> bool:
    """Whether the environment switches the plug-ins off."""
    return asked_for(OFF_SWITCH)


def _value(name: str) -> str:
    return os.environ.get(name, "").strip().lower()
