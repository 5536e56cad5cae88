"""Fetching: the copy of an address that is opened, and in one sentence how it came about."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from nsa_tune._errors import StoreError
from nsa_tune.remote.address import Address
from nsa_tune.remote.client import Answer, Refused, download, timeout_s
from nsa_tune.remote.copies import Copies, State, remove_beside, suffix_of

_log = logging.getLogger(__name__)
_MARGIN_S = 1.0
"""How much longer one waits for a process that asks than that process waits for the server."""

Check = Callable[[Path], str]
"""When the newest table of a file was measured, "" where that does not matter; raises StoreError
where it is nothing that can be opened."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What an address came to."""

    address: Address
    path: Path | None
    """The copy to open; None where there is none."""
    fetched_at: str
    """When the copy came. ISO 8601, UTC."""
    problem: str
    """Why what the server says now is not used; "" when it is."""
    is_new: bool = False
    """The copy has just come."""

    @property
    def sentence(self) -> str:
        """What happened."""
        shown, copy = self.address.shown, f"the copy of {self.fetched_at}"
        if self.path is None:
            return f"{self.problem}; there is no copy of {shown} yet"
        if self.problem:
            return f"{self.problem}; {copy} is used"
        if self.is_new:
            return f"{shown} was fetched"
        return f"{shown} is unchanged; {copy} is used"


_known: dict[str, Fetched] = {}
"""What this process was told, by address as it was given."""
_said: set[str] = set()


def fetched(address: Address, cache: Path | None, check: Check, *, again: bool = False) -> Fetched:
    """The copy of `address`, for which its server is asked: once a process, or now with `again`.

    The copy is what the server sends, if that has the SHA-256 which it promises and `check` lets it
    pass; else the last one that was. It is kept below `cache`, nsa-tune's cache folder; None where
    there is no such place. Processes that ask at the same time get the answer to one request.

    Raises:
        UsageError: when a variable NSA_TUNE_... means nothing.
    """
    name = f"{address.url}#{address.sha256}"
    if again or name not in _known:
        _known[name] = _fetched(address, cache, check)
        _say(_known[name])
    return _known[name]


def _say(found: Fetched) -> None:
    if found.address.readable:
        _say_once(
            logging.WARNING,
            f"{found.address.shown} is not encrypted: others can read the token and change the "
            "tables on their way; use https, or add #sha256=... for a table that stays",
        )
    _say_once(logging.WARNING if found.problem else logging.INFO, found.sentence)


def _say_once(level: int, text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.log(level, "%s", text)


def _fetched(address: Address, cache: Path | None, check: Check) -> Fetched:
    seconds = timeout_s()
    if cache is None:
        return Fetched(address, None, "", "there is no folder for copies; set XDG_CACHE_HOME")
    copies = Copies(cache, address.url)
    try:
        copies.make()
        pinned = copies.path(address.sha256)
        if pinned is not None:
            return Fetched(address, pinned, copies.came_at(pinned), "")
        before = copies.identity()
        with copies.alone(seconds + _MARGIN_S) as alone:
            if alone and copies.identity() == before:
                return _asked(address, copies, check, seconds)
        # Another process has asked meanwhile, or is still at it.
        waited = "" if alone else f"another process is still asking {address.shown}"
        return _as_left(address, copies, check, waited)
    except OSError as error:
        problem = f"a copy of {address.shown} cannot be kept in {cache}: {error.strerror}"
        return _as_left(address, copies, check, f"{problem}; set XDG_CACHE_HOME")


def _as_left(address: Address, copies: Copies, check: Check, problem: str) -> Fetched:
    """What another process has left."""
    state = copies.state()
    path = copies.path(address.sha256) if address.sha256 else _good(copies, state, check)
    if path is None and not (problem or state.problem):
        problem = f"the copy of {address.shown} is damaged"
    return Fetched(address, path, state.fetched_at, problem or state.problem)


def _good(copies: Copies, state: State, check: Check) -> Path | None:
    """The copy that counts, or where that is damaged the newest one that can be opened."""
    path = copies.path(state.sha256)
    if path is not None or not state.sha256:
        return path
    for older in filter(None, (copies.path(each.stem) for each in copies.newest_first())):
        with suppress(StoreError):
            check(older)
            return older
    return None


def _asked(address: Address, copies: Copies, check: Check, seconds: float) -> Fetched:
    state = copies.state()
    # A pinned address whose copy were here would not ask.
    path = None if address.sha256 else _good(copies, state, check)
    etag = state.etag if path is not None and path.stem == state.sha256 else ""
    draft, is_new = copies.draft(), False
    try:
        answer = download(address.url, address.shown, draft, etag, seconds)
        if not answer.unchanged:
            _check_sha256(answer, address)
            named, newest = _named(draft, address, check, state.newest)
            path = copies.put(named, answer.sha256)
            state, is_new = State(answer.sha256, answer.etag, _now(), newest=newest), True
        elif path is None:
            raise Refused(f"{address.shown} says that nothing has changed, to nobody who asked")
        state = replace(state, problem="")
    except StoreError as error:
        state = replace(state, problem=str(error))
    finally:
        draft.unlink(missing_ok=True)
    copies.keep(state)
    copies.tidy(state.sha256)
    return Fetched(address, path, state.fetched_at, state.problem, is_new)


def _check_sha256(answer: Answer, address: Address) -> None:
    promised = {*answer.promised, *([address.sha256] if address.sha256 else [])}
    if not promised:
        raise Refused(
            f"{address.shown} does not say the SHA-256 of what it sends (X-Content-SHA256); "
            "if you know it, add #sha256=... to the address"
        )
    wrong = promised - {answer.sha256}
    if wrong:
        raise Refused(
            f"{address.shown} sent something else than it should: the SHA-256 is "
            f"{answer.sha256}, not {min(wrong)}"
        )


def _named(draft: Path, address: Address, check: Check, before: str) -> tuple[Path, str]:
    """`draft` under a name that says what kind of file it is, once `check` lets it pass; and when
    its newest table was measured. `before` is that of the last copy.

    Raises:
        Refused: when it does not, or when the tables of the last copy are gone.
    """
    named = draft.rename(draft.with_name(f"{draft.name}{suffix_of(draft)}"))
    try:
        newest = check(named)
        if before and not newest:
            raise StoreError("it no longer has the tables of the copy")
    except StoreError as error:
        named.unlink(missing_ok=True)
        reason = str(error).replace(str(named), "it")
        raise Refused(f"{address.shown} sent what cannot be opened: {reason}") from error
    finally:
        remove_beside(named)
    if newest < before:
        _say_once(
            logging.WARNING,
            f"{address.shown} has gone back: its newest table is of {newest}, and was of {before}",
        )
    return named, newest


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
