"""Measured pass times are kept beside the user's database, so that an engine measures them once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from nsa_tune.db.places import user_folder
from nsa_tune.engines.sglang.last_start import written
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes

_MOST_BYTES = 2**20
SHIPPED = Path(__file__).parents[4] / "tables" / "pass-times"
"""Files of other machines, which an engine's start checks before it takes them (priors.py)."""


def folder() -> Path | None:
    """Where they are kept; None where no folder is safe."""
    parent = user_folder()
    return None if parent is None else parent / "pass-times"


def load(key: Mapping[str, object]) -> PassTimes | None:
    """The newest times for `key`; None where there are none."""
    kept = _newest(_files(folder()), lambda other: other == dict(key))
    return None if kept is None else kept[1]


def save(times: PassTimes) -> bool:
    """Keep `times`, beside those of other kernels; False where the folder cannot be written."""
    of_kernels = {"kernels": times.kernels} if times.kernels else {}
    return written(_path(times.key | of_kernels), times.as_text())


def remembered() -> Iterator[PassTimes]:
    """All that is kept, in the order of the files' names."""
    for _, times in _files(folder()):
        yield times


def newest(*fits: Callable[[Mapping[str, object]], bool]) -> tuple[Path, PassTimes] | None:
    """The file that was written last of those whose key fits, and its times.

    The first of `fits` counts by which any does. What this machine has measured comes before what
    ships with the package.
    """
    places = [[*_files(place)] for place in (folder(), SHIPPED)]
    found = (_newest(files, fit) for fit in fits for files in places)
    return next(filter(None, found), None)


def _newest(
    files: Iterable[tuple[Path, PassTimes]], fits: Callable[[Mapping[str, object]], bool]
) -> tuple[Path, PassTimes] | None:
    fitting = (kept for kept in files if kept[1].times and fits(kept[1].key))
    return max(fitting, key=lambda kept: _written_ns(kept[0]), default=None)


def _files(place: Path | None) -> Iterator[tuple[Path, PassTimes]]:
    for path in [] if place is None else sorted(place.glob("*.json")):
        times = _read(path)
        if times is not None:
            yield path, times


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # removed meanwhile
        return 0


def _path(key: Mapping[str, object]) -> Path | None:
    place = folder()
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return None if place is None else place / f"{digest[:24]}.json"


def _read(path: Path) -> PassTimes | None:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        return PassTimes.from_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
