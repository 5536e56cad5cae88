"""What the environment says about dispatching: NSA_TUNE_DISABLE, _FORCE and so on.

They are read when a dispatcher is opened or reloaded. A wrong value is an error that names the
variable and the value; only a file that is not there is a warning, as the engine can go on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nsa_tune._errors import UsageError
from nsa_tune.backend.types.point import Point
from nsa_tune.remote.address import address_in

_log = logging.getLogger(__name__)

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Environment:
    """The settings of one opening."""

    disabled: bool = False
    """NSA_TUNE_DISABLE: no table is used; the engine's baseline answers."""
    assert_hit: bool = False
    """NSA_TUNE_ASSERT_HIT: anything but a table of exactly this machine is an error."""
    demote_failed: bool = False
    """NSA_TUNE_DEMOTE_FAILED: a table that failed `nsa-tune check` here comes after all others."""
    ask_for_tables: bool = False
    """NSA_TUNE_WANTED: where no table is of exactly this machine, the service of NSA_TUNE_DB is
    told."""
    forced: Mapping[str, str] = field(default_factory=dict)
    """NSA_TUNE_FORCE=point=arm,...: for a point the arm that is taken where guards allow it."""

    @classmethod
    def read(cls, points: Mapping[str, Point], environ: Mapping[str, str]) -> Environment:
        """The settings in `environ`.

        Raises:
            UsageError: for a value that means nothing.
        """
        warn_of_missing_files(environ)
        return cls(
            _flag("NSA_TUNE_DISABLE", environ),
            _flag("NSA_TUNE_ASSERT_HIT", environ),
            _flag("NSA_TUNE_DEMOTE_FAILED", environ),
            _flag("NSA_TUNE_WANTED", environ),
            _forced(environ.get("NSA_TUNE_FORCE", ""), points),
        )


def _flag(variable: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(variable, "")
    if value.strip().lower() in _YES:
        return True
    if value.strip().lower() in _NO:
        return False
    raise UsageError(f"{variable} is {value!r}; set it to 1 or 0")


def _forced(value: str, points: Mapping[str, Point]) -> dict[str, str]:
    forced: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in value.split(","))):
        point, separator, arm = word.partition("=")
        if not separator or point not in points:
            raise UsageError(
                f"NSA_TUNE_FORCE is {value!r}; write POINT=ARM with a point of: {', '.join(points)}"
            )
        arms = [choice.name for choice in points[point].arms]
        if arm not in arms:
            raise UsageError(
                f"NSA_TUNE_FORCE is {value!r}, but {point} has no arm {arm!r}; use one of: "
                f"{', '.join(arms)}"
            )
        if forced.setdefault(point, arm) != arm:
            raise UsageError(f"NSA_TUNE_FORCE is {value!r}, which forces two arms of {point}")
    return forced


def warn_of_missing_files(environ: Mapping[str, str]) -> None:
    """Log a warning for NSA_TUNE_DB and NSA_TUNE_LOG where they name no file."""
    database = environ.get("NSA_TUNE_DB", "")
    if not database or address_in(database) is not None:
        pass  # what came of an address is said when it is fetched
    elif not os.path.exists(os.path.expanduser(database)):  # noqa: PTH110, PTH111
        _log.warning("NSA_TUNE_DB is %r, and there is no such file: it is skipped", database)
    decisions = environ.get("NSA_TUNE_LOG", "")
    if decisions:
        path = Path(os.path.expanduser(decisions))  # noqa: PTH111
        if path.is_dir() or not path.parent.is_dir():
            _log.warning("NSA_TUNE_LOG is %r, which is no file in a directory", decisions)
