"""The copies of one address in the user's cache folder, and what was last heard of its server.

Each copy is a file named by its SHA-256, so whoever has opened one goes on with it when another
process brings the next. `state.json` says which one counts. Both are put in place whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

_KEPT = 8
"""Copies: the one that counts, and some before, since an engine that has run for long still reads
the rows of its own when a plan is explained."""
_STALE_S = 3600.0
"""Age of a file that a process has begun and not finished."""
_POLL_S = 0.02
_MOST_STATE = 2**14
_BEGINNING_OF_TEXT = b"# format = "
_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class State:
    """What the last process that asked has left."""

    sha256: str = ""
    """Of the copy that counts; "" while there is none."""
    etag: str = ""
    fetched_at: str = ""
    """When the copy came. ISO 8601, UTC."""
    newest: str = ""
    """When the newest table of the copy was measured; "" where nobody asked for one."""
    problem: str = ""
    """Why the answer to the last request is not used; "" when it is."""


class Copies:
    """The folder of one address."""

    def __init__(self, cache: Path, url: str) -> None:
        """`cache` is nsa-tune's cache folder; it is made when something is kept."""
        self._folder = cache / "fetched" / hashlib.sha256(url.encode()).hexdigest()[:16]
        self._state = self._folder / "state.json"

    def make(self) -> None:
        """Make the folder, for this user alone.

        Raises:
            OSError: when that cannot be.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def state(self) -> State:
        """What was left here; an empty state where nothing readable was."""
        try:
            with self._state.open("rb") as file:
                fields = json.loads(file.read(_MOST_STATE))
            return State(**{name: str(fields.get(name, "")) for name in asdict(State())})
        except (AttributeError, OSError, ValueError, TypeError, RecursionError):
            return State()

    def keep(self, state: State) -> None:
        """Put `state` in the place of the old one.

        Raises:
            OSError: when it cannot be written.
        """
        draft = self.draft()
        try:
            draft.write_text(json.dumps(asdict(state)), encoding="utf-8")
            draft.replace(self._state)
        finally:
            draft.unlink(missing_ok=True)

    def draft(self) -> Path:
        """A path here that no other process uses."""
        return self._folder / f".draft-{os.getpid()}-{token_hex(4)}"

    def path(self, sha256: str) -> Path | None:
        """The copy with this SHA-256, whose content was just compared with it; else None."""
        if not sha256:
            return None
        for end in (".db", ".tsv"):
            path = self._folder / f"{sha256}{end}"
            with suppress(OSError):
                if _sha256(path) == sha256:
                    return path
        return None

    def came_at(self, path: Path) -> str:
        """When a copy came. ISO 8601, UTC."""
        return datetime.fromtimestamp(_modified(path), UTC).isoformat(timespec="milliseconds")

    def put(self, draft: Path, sha256: str) -> Path:
        """Make `draft`, whose name ends with its kind, the copy with this SHA-256.

        Raises:
            OSError: when it cannot be moved.
        """
        path = draft.with_name(f"{sha256}{draft.suffix}")
        draft.replace(path)
        return path

    def newest_first(self) -> list[Path]:
        """The copies, the one that came last first."""
        copies = [*self._folder.glob("*.db"), *self._folder.glob("*.tsv")]
        return sorted(copies, key=_modified, reverse=True)

    def tidy(self, sha256: str) -> None:
        """Remove the oldest copies, but not `sha256`, and drafts that nobody finishes."""
        for path in [path for path in self.newest_first() if path.stem != sha256][_KEPT - 1 :]:
            with suppress(OSError):
                path.unlink(missing_ok=True)
                remove_beside(path)
        for path in self._folder.glob(".draft-*"):
            if time.time() - _modified(path) > _STALE_S:
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def identity(self) -> tuple[int, int] | None:
        """Changes whenever a process has kept a state."""
        try:
            status = self._state.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    @contextmanager
    def alone(self, seconds: float) -> Iterator[bool]:
        """Hold the folder's lock; False where another process has held it for all of `seconds`.

        Where the file system has no locks, every process is alone.
        """
        with (self._folder / "lock").open("ab") as file:
            yield _locked(file.fileno(), time.monotonic() + seconds)


def remove_beside(path: Path) -> None:
    """Remove what SQLite leaves beside a database `path` in WAL mode that was read only.

    Raises:
        OSError: when that cannot be.
    """
    for end in ("-wal", "-shm"):
        path.with_name(f"{path.name}{end}").unlink(missing_ok=True)


def suffix_of(path: Path) -> str:
    """How the name of a database or text table with the content of `path` ends."""
    with path.open("rb") as file:
        is_text = file.read(len(_BEGINNING_OF_TEXT)) == _BEGINNING_OF_TEXT
    return ".tsv" if is_text else ".db"


def _locked(file: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        except OSError:
            return True
        else:
            return True


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
