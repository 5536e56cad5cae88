"""One HTTP request that ends in time, whatever the server does."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, TypeVar
from urllib import error as url_errors
from urllib import request as requests
from urllib.parse import urlsplit

from nsa_tune._errors import StoreError, UsageError

TOKEN = "NSA_TUNE_TOKEN"
TIMEOUT = "NSA_TUNE_DB_TIMEOUT_S"

_TIMEOUT_S, _LONGEST_S = 5.0, 3600.0
_MOST_BYTES = 2**30
"""Of a database; the table of one key takes some hundred kilobytes."""
_MOST_WORDS = 2**16
"""Bytes of an answer that is read into memory."""
_BLOCK = 2**16
_IS_TOKEN = re.compile("[A-Za-z0-9._~+/=-]{1,4096}")
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]{1,200}"')
_UNCHANGED = 304

T = TypeVar("T")


class Refused(StoreError):
    """The server did not answer, or not as it should; one sentence says how."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server has sent."""

    unchanged: bool
    """It has what the caller has already."""
    etag: str
    """"" where it sent none that can be sent back."""
    promised: tuple[str, ...]
    """SHA-256, in hexadecimal, that the content has by X-Content-SHA256 and by the ETag."""
    sha256: str
    """Of the content as it came, where it was written into a file."""
    body: bytes
    """The content, where it was not."""


def timeout_s() -> float:
    """Seconds that a request may take, from its beginning to the last byte.

    Raises:
        UsageError: when NSA_TUNE_DB_TIMEOUT_S is no such number.
    """
    text = os.environ.get(TIMEOUT, "")
    if not text:
        return _TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise UsageError(f"{TIMEOUT} is {text!r}; give seconds, above 0 and up to {_LONGEST_S:g}")
    return seconds


def download(url: str, shown: str, into: Path, etag: str, seconds: float) -> Answer:
    """Get `url` and write what it has into the new file `into`, unless its ETag is `etag`.

    `shown` names the server in messages.

    Raises:
        Refused: when the server does not answer as it should within `seconds`.
        UsageError: when NSA_TUNE_TOKEN is no token.
        OSError: when `into` cannot be written.
    """
    request = requests.Request(url, headers={"If-None-Match": etag} if etag else {})
    _sign(request)

    def work(given_up: threading.Event) -> Answer:
        with _answered(request, shown, seconds) as answer:
            if answer.status == _UNCHANGED:
                return _received(answer)
            sha256 = _written(_blocks(answer, shown, seconds), into, shown, given_up)
            return _received(answer, sha256=sha256)

    return _within(seconds, shown, work)


def post(
    url: str, shown: str, body: bytes, kind: str, seconds: float,
    headers: Mapping[str, str] | None = None,
) -> Answer:  # fmt: skip
    """Send `body`, of the content type `kind`, to `url`.

    Raises:
        Refused: when the server does not take it within `seconds`.
        UsageError: when NSA_TUNE_TOKEN is no token.
    """
    sent = {"Content-Type": kind, "X-Content-SHA256": hashlib.sha256(body).hexdigest()}
    request = requests.Request(url, body, {**sent, **(headers or {})}, method="POST")
    _sign(request)

    def work(given_up: threading.Event) -> Answer:
        del given_up
        with _answered(request, shown, seconds) as answer, _spoken(shown, seconds):
            return _received(answer, body=answer.read(_MOST_WORDS))

    return _within(seconds, shown, work)


def _sign(request: requests.Request) -> None:
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        return
    if not _IS_TOKEN.fullmatch(token):
        raise UsageError(f"{TOKEN} is no token: it has letters A to Z, digits and . _ ~ + / = -")
    # Not added to the request that a redirection leads to: that may be another server.
    request.add_unredirected_header("Authorization", f"Bearer {token}")


def _received(answer: Any, sha256: str = "", body: bytes = b"") -> Answer:
    etag = answer.headers.get("ETag", "")
    etag = etag if _ETAG.fullmatch(etag) else ""
    promised = (answer.headers.get("X-Content-SHA256", ""), _sha256_in(etag))
    told = tuple(_printable(one).strip().lower()[:64] for one in promised if one)
    return Answer(answer.status == _UNCHANGED, etag, told, sha256, body)


def _sha256_in(etag: str) -> str:
    word = etag.removeprefix("W/").strip('"')
    return word.removeprefix("sha256-") if word.startswith("sha256-") else ""


# --- in time


def _within(seconds: float, shown: str, work: Callable[[threading.Event], T]) -> T:
    """What `work` gives within `seconds`.

    A socket's timeout counts silence only, and looking up a name has none: so a thread works, and
    this one waits.
    """
    given_up = threading.Event()
    outcomes: SimpleQueue[T | OSError | StoreError] = SimpleQueue()

    def thread() -> None:
        try:
            outcomes.put(work(given_up))
        except (OSError, StoreError) as error:
            outcomes.put(error)

    threading.Thread(target=thread, name="nsa-tune-request", daemon=True).start()
    try:
        outcome = outcomes.get(timeout=seconds)
    except Empty:
        given_up.set()
        raise _late(shown, seconds) from None
    if isinstance(outcome, OSError | StoreError):
        raise outcome
    return outcome


def _late(shown: str, seconds: float) -> Refused:
    return Refused(f"{shown} did not answer within {seconds:g} s ({TIMEOUT})")


# --- over the network


class _Redirect(requests.HTTPRedirectHandler):
    """Follows to http and https, and never from an encrypted connection to an open one."""

    def redirect_request(
        self, req: requests.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> requests.Request | None:
        """The next request."""
        schemes = ("https",) if req.type == "https" else ("http", "https")
        if urlsplit(newurl).scheme.lower() not in schemes:
            fp.close()
            raise url_errors.URLError(f"it redirects to {newurl!r}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> requests.OpenerDirector:
    # Not build_opener, which adds handlers for files and FTP.
    opener = requests.OpenerDirector()
    for handler in (
        requests.ProxyHandler(), requests.HTTPHandler(), requests.HTTPSHandler(), _Redirect(),
        requests.HTTPDefaultErrorHandler(), requests.HTTPErrorProcessor(),
        requests.UnknownHandler(),
    ):  # fmt: skip
        opener.add_handler(handler)
    return opener


@contextmanager
def _answered(request: requests.Request, shown: str, seconds: float) -> Iterator[Any]:
    """The answer to `request`: a success, or 304."""
    with ExitStack() as stack:
        with _spoken(shown, seconds):
            try:
                answer = _opener().open(request, timeout=seconds)
            except url_errors.HTTPError as error:
                stack.enter_context(error)
                if error.code != _UNCHANGED:
                    raise Refused(_why(error, shown)) from None
                answer = error
        stack.enter_context(answer)
        yield answer


@contextmanager
def _spoken(shown: str, seconds: float) -> Iterator[None]:
    """Turn what a connection raises into `Refused`."""
    try:
        yield
    except (TimeoutError, url_errors.URLError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise _late(shown, seconds) from error
        raise Refused(f"{shown} cannot be reached: {reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        words = str(error) or type(error).__name__
        raise Refused(f"{shown} broke off, or is no web server: {words}") from error


def _why(error: url_errors.HTTPError, shown: str) -> str:
    said = _sentence(error)
    if error.code == http.client.UNAUTHORIZED:
        what = "needs a token" if not os.environ.get(TOKEN, "").strip() else "knows no such token"
        return f"{shown} {what}; set {TOKEN} (401{said})"
    if error.code == http.client.FORBIDDEN:
        return f"{shown} does not allow this to the token in {TOKEN} (403{said})"
    return f"{shown} answers {error.code} {_printable(str(error.reason))}{said}"


def _sentence(error: url_errors.HTTPError) -> str:
    """What a service says in {"error": "..."}, behind a colon."""
    with suppress(OSError, ValueError, http.client.HTTPException, RecursionError):
        told = json.loads(error.read(_MOST_WORDS))
        if isinstance(told, dict) and isinstance(told.get("error"), str):
            return f": {_printable(told['error'])}"
    return ""


def _printable(text: str) -> str:
    """What a server says goes into a log: one line, and not without end."""
    return "".join(character for character in text[:500] if character.isprintable())


def _blocks(answer: Any, shown: str, seconds: float) -> Iterator[bytes]:
    while True:
        with _spoken(shown, seconds):
            block = bytes(answer.read1(_BLOCK))
        if not block:
            return
        yield block


def _written(blocks: Iterator[bytes], into: Path, shown: str, given_up: threading.Event) -> str:
    """Write `blocks` into the new file `into`, or leave none; their SHA-256."""
    digest, total = hashlib.sha256(), 0
    with ExitStack() as unfinished, into.open("xb") as file:
        unfinished.callback(into.unlink, missing_ok=True)
        for block in blocks:
            total += len(block)
            if given_up.is_set() or total > _MOST_BYTES:
                raise Refused(f"{shown} sends more than {_MOST_BYTES} bytes")
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        if not given_up.is_set():
            unfinished.pop_all()
    return digest.hexdigest()
