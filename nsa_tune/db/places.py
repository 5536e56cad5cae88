"""Where tables are: databases and text tables in the order in which they are searched.

The order is: the database named by the caller, NSA_TUNE_DB, the user's data directory
(XDG_DATA_HOME), the site's (XDG_DATA_DIRS), then the tables that ship with the package. Where the
first two are addresses, the copies in the user's cache folder (XDG_CACHE_HOME) are read.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nsa_tune._errors import StoreError
from nsa_tune.db.reader import Wanted, newest_in
from nsa_tune.remote.address import address_in

if TYPE_CHECKING:
    from nsa_tune.remote.fetching import Fetched

_SHIPPED = Path(__file__).parent.parent / "tables"
_FILE = Path("nsa-tune", "nsa-tune.db")
_log = logging.getLogger(__name__)
_names: dict[Path, str] = {}
"""What copies of addresses are called."""


def default_database() -> Path:
    """NSA_TUNE_DB, else nsa-tune/nsa-tune.db in the user's data directory.

    A user id without a home directory, as clusters have them, gets a private directory under the
    system's temporary one, with a warning.

    Raises:
        UsageError: when NSA_TUNE_DB is an address, and a wrong one.
        StoreError: when that directory is there, but belongs to somebody else, or when NSA_TUNE_DB
            is an address from which nothing could ever be fetched.
    """
    named = os.environ.get("NSA_TUNE_DB")
    if named and address_in(named) is not None:
        return local(Path(named))
    return _expanded(named) or _no_place() if named else user_database() or _no_place()


def database_to_write() -> Path:
    """The same, or the user's database, with a warning, where NSA_TUNE_DB is an address.

    Raises:
        UsageError, StoreError: as `default_database`.
    """
    named = os.environ.get("NSA_TUNE_DB")
    address = address_in(named) if named else None
    if address is None:
        return default_database()
    path = user_database() or _no_place()
    _log.warning("NSA_TUNE_DB is %s, which is only read: %s is written", address.shown, path)
    return path


def _no_place() -> NoReturn:
    raise StoreError(
        "there is no home directory, and a private one cannot be made in "
        f"{tempfile.gettempdir()}; set NSA_TUNE_DB"
    )


def shipped() -> list[Path]:
    """The text tables that came with the package, sorted by name."""
    return sorted(_SHIPPED.glob("*.tsv"))


def name_of(path: Path) -> str | None:
    """What messages call the file `path`; None where that is its path."""
    return f"shipped:{path.stem}" if path.parent == _SHIPPED else _names.get(path)


def sources(db: Path | None, wanted: Wanted | None = None) -> Iterator[Path]:
    """Databases and text tables in the order in which they are searched.

    Paths that somebody named (`db`, NSA_TUNE_DB) come even where there is no such file; the
    standard places only where there is one.
    """
    return chain.from_iterable(grouped_sources(db, wanted))


def grouped_sources(db: Path | None, wanted: Wanted | None = None) -> Iterator[list[Path]]:
    """The same, those that count as one source together: the shipped tables."""
    yield from ([path] for path in _databases(db, wanted))
    yield shipped()


def _databases(db: Path | None, wanted: Wanted | None) -> Iterator[Path]:
    named = os.environ.get("NSA_TUNE_DB")
    seen: set[Path] = set()
    for path in (_located(db, wanted) if db else None, _located(named, wanted) if named else None):
        if path is not None and path not in seen:
            seen.add(path)
            yield path
    site = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    standard = [user_database(), *(Path(place) / _FILE for place in site.split(":") if place)]
    # os.path, not Path: a directory that may not be searched is one without our file.
    yield from (
        path
        for path in standard
        if path is not None and path not in seen and os.path.isfile(path)  # noqa: PTH113
    )


def _located(place: str | Path, wanted: Wanted | None) -> Path | None:
    """Where `place` is read; None where there is no copy of an address, or no home directory."""
    served = fetched_from(place, wanted)
    if served is not None:
        return served.path
    return place if isinstance(place, Path) else _expanded(place)


def user_folder() -> Path | None:
    """The folder of the user's database, whether it is there or not; None where none is safe."""
    database = user_database()
    return None if database is None else database.parent


def user_database() -> Path | None:
    """The user's own database, whether it is there or not; None where no place for it is safe."""
    data = os.environ.get("XDG_DATA_HOME", "")
    if Path(data).is_absolute():
        return Path(data) / _FILE
    share = _expanded("~/.local/share")
    return None if share is None else share / _FILE


def _expanded(path: str) -> Path | None:
    """`path` with its user's home directory, or else a private one; None where there is neither."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        place = Path(tempfile.gettempdir(), f"nsa-tune-{os.getuid()}")
    problem = _not_private(place)
    if problem:
        _log.warning(
            "there is no home directory for %s, and %s %s: nothing in it is believed; set "
            "NSA_TUNE_DB", path, place, problem,
        )  # fmt: skip
        return None
    _log.warning("there is no home directory for %s: using %s; set NSA_TUNE_DB", path, place)
    return place / Path(path).name


def _not_private(place: Path) -> str:
    """Why somebody else may have put things into `place`, which is made if there is none; ""
    where nobody could."""
    try:
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        status = place.lstat()
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    if not stat.S_ISDIR(status.st_mode):
        return "is no directory"
    if status.st_uid != os.getuid():
        return "belongs to another user"
    return "may be entered by others" if status.st_mode & 0o077 else ""


# --- addresses


def fetched_from(
    place: str | Path, wanted: Wanted | None = None, *, again: bool = False
) -> Fetched | None:
    """What the address `place` came to; None where it is a path. Its server is asked once a
    process, or now with `again`; a service only for the tables that are `wanted`, or for those of
    other GPUs where it has none of this one. What comes replaces the copy only if these can be
    read.

    Raises:
        UsageError: when it is no address, though it begins like one, or a variable NSA_TUNE_...
            means nothing.
    """
    address = address_in(place)
    if address is None:
        return None
    # Only here: what speaks HTTP takes longer to load than a table.
    from nsa_tune.remote.fetching import fetched

    if wanted is not None:
        address = address.of_table(wanted._asdict())
    check = partial(newest_in, wanted=wanted)
    served = fetched(address, _cache_folder(), check, again=again)
    if served.path is not None:
        _names[served.path] = f"{address.shown}, fetched {served.fetched_at}"
    return served


def ask_again(wanted: Wanted) -> Fetched | None:
    """Ask the server of NSA_TUNE_DB anew for what is `wanted`; None where that is no address.

    Raises:
        UsageError: as `fetched_from`.
    """
    named = os.environ.get("NSA_TUNE_DB")
    return fetched_from(named, wanted, again=True) if named else None


def local(place: Path, wanted: Wanted | None = None, *, again: bool = False) -> Path:
    """The file that stands for `place`: the copy of an address, else itself.

    Raises:
        UsageError: as `fetched_from`.
        StoreError: when it is an address of which there is no copy.
    """
    served = fetched_from(place, wanted, again=again)
    if served is None:
        return place
    if served.path is None:
        raise StoreError(served.sentence)
    return served.path


def _cache_folder() -> Path | None:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if Path(cache).is_absolute():
        return Path(cache) / "nsa-tune"
    return _expanded("~/.cache/nsa-tune")
