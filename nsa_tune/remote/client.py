"""HTTP with the standard library: requests that end in time, whatever the server does.

`download` brings what an address has into a file. `Client` talks to a service, and waits for one
that is away.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import logging
import os
import random
import re
import threading
import time
import zlib
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
from nsa_tune._files import open_regular

_log = logging.getLogger(__name__)
TOKEN = "NSA_TUNE_TOKEN"
TOKEN_FILE = "NSA_TUNE_TOKEN_FILE"
TIMEOUT = "NSA_TUNE_DB_TIMEOUT_S"

_TIMEOUT_S, _LONGEST_S = 5.0, 3600.0
_SERVICE_S = 60.0
"""Of one request of a `Client`; a service takes no longer to answer."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_LONGEST_RETRY_AFTER_S = 60.0
_MAX_FILE_BYTES = 2**30
"""Of a database; the table of one key takes some hundred kilobytes."""
_MAX_BODY_BYTES = 2**26
"""Of an answer that is read into memory."""
_MAX_ERROR_BYTES = 2**16
_BLOCK = 2**16
_IS_TOKEN = re.compile("[A-Za-z0-9._~+/=-]{1,4096}")
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]{1,200}"')
_UNCHANGED = 304
_AGAIN = frozenset({0, 429, 500, 502, 503, 504})
"""What may be different a moment later. Everything that a service takes may be sent twice."""

T = TypeVar("T")


class Refused(StoreError):
    """A server did not answer, or not as it should; one sentence says how."""

    def __init__(self, sentence: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        """`status` is 0 where there was no answer."""
        super().__init__(sentence)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in _AGAIN


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server has sent."""

    unchanged: bool
    """It has what the caller has already."""
    etag: str
    """"" where it sent none that can be sent back."""
    promised: tuple[str, ...]
    """SHA-256, in hexadecimal, that the content has by X-Content-SHA256 and by the ETag."""
    date: str
    """The header Date: the server's clock."""
    sha256: str
    """Of the content as it came, unpacked."""
    body: bytes
    """The content, where it was not written into a file."""


def timeout_s() -> float:
    """Seconds that a request may take, from its beginning to the last byte: what
    NSA_TUNE_DB_TIMEOUT_S says, or the default, with a warning, where that is no such number. A
    slip there must not leave an engine without its tables.
    """
    text = os.environ.get(TIMEOUT, "")
    if not text:
        return _TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:
        _log.warning(
            "%s is %r, not seconds above 0 and up to %g: %g s are waited",
            TIMEOUT, text, _LONGEST_S, _TIMEOUT_S,
        )  # fmt: skip
        return _TIMEOUT_S
    return seconds


def token() -> str:
    """The token in NSA_TUNE_TOKEN, or in the file NSA_TUNE_TOKEN_FILE; "" where there is none.

    Raises:
        UsageError: when it is no token, or others can read the file.
    """
    text = os.environ.get(TOKEN, "").strip() or _token_in(os.environ.get(TOKEN_FILE, ""))
    if text and not _IS_TOKEN.fullmatch(text):
        raise UsageError(f"{TOKEN} is no token: it has letters A to Z, digits and . _ ~ + / = -")
    return text


def _token_in(place: str) -> str:
    if not place:
        return ""
    try:
        with open_regular(Path(place)) as file:
            if os.fstat(file.fileno()).st_mode & 0o007:
                raise UsageError(f"others can read {place}: chmod 600 it, and make a new token")
            return file.read(2**12).decode("latin-1").strip()
    except OSError as error:
        raise UsageError(f"{TOKEN_FILE} is {place!r}: {error.strerror}") from error


def download(url: str, shown: str, into: Path, etag: str, seconds: float) -> Answer:
    """Get `url` and write what it has into the new file `into`, unless its ETag is `etag`.

    `shown` names the server in messages.

    Raises:
        Refused: when the server does not answer as it should within `seconds`.
        UsageError: when NSA_TUNE_TOKEN is no token.
        OSError: when `into` cannot be written.
    """
    request = _request("GET", url, token(), None, {"If-None-Match": etag} if etag else {})
    return _exchanged(request, _Server(shown, seconds, f" ({TIMEOUT})"), into)


class Client:
    """A service at an address, and a token for it."""

    def __init__(
        self, url: str, token: str, *, patience_s: float = 600.0, timeout_s: float = _SERVICE_S
    ) -> None:
        """`patience_s` is how long a request is tried again when there is no answer.

        Raises:
            UsageError: when `url` is no address.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise UsageError(
                f"{url!r} is no address of a service, like https://tables.example:8401"
            )
        if parts.username or parts.password:
            raise UsageError("a token in the address would be shown in logs; set NSA_TUNE_TOKEN")
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        self._token = token
        self._server = _Server(self.url, timeout_s)
        self.given_up = threading.Event()
        """Set it to end waiting in every thread."""

    def with_patience(self, patience_s: float) -> Client:
        """The same service, waited for so long."""
        return Client(self.url, self._token, patience_s=patience_s, timeout_s=self._server.seconds)

    def get(self, path: str) -> bytes:
        """The body at `path`.

        Raises:
            Refused: when the service refuses, or does not answer for as long as it is waited for.
        """
        return self.answer("GET", path).body

    def document(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises as `get`."""
        return _parsed(self.get(path))

    def post(self, path: str, body: bytes | Mapping[str, Any]) -> dict[str, Any]:
        """What the service answers to `body`, bytes or JSON. Raises as `get`."""
        if not isinstance(body, bytes):
            body = json.dumps(body, sort_keys=True).encode()
        return _parsed(self.answer("POST", path, body).body)

    def answer(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """What the service answers, with its headers. Raises as `get`."""
        headers = {} if body is None else {"Content-Type": "application/octet-stream"}
        end, pause = time.monotonic() + self.patience_s, _FIRST_PAUSE_S
        while True:
            request = _request(method, self.url + path, self._token, body, headers)
            try:
                answer = _exchanged(request, self._server)
                _check_promise(answer)
            except Refused as error:
                # Hosts that lost the same service shall not all come back in the same moment.
                wait_s = max(pause, error.retry_after_s) * (0.5 + random.random())
                if not error.passing or time.monotonic() + wait_s > end:
                    raise
                if self.given_up.wait(wait_s):
                    raise
            else:
                return answer
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def hasty(url: str) -> Client:
    """The service at `url`, asked once and within the time that opening a database may take.

    Raises:
        UsageError: when `url` is no address, or NSA_TUNE_TOKEN no token.
    """
    return Client(url, token(), patience_s=0, timeout_s=timeout_s())


@contextmanager
def reading() -> Iterator[None]:
    """Around reading an answer: another server's has other fields.

    Raises:
        Refused: when the answer lacks a field, or has another kind of value in it.
    """
    try:
        yield
    except KeyError as error:
        raise Refused(f"the answer has no {error}; is it a service of nsa-tune?", 200) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise Refused(f"the answer is odd ({error}); is it a service of nsa-tune?", 200) from error


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise Refused("the answer is no JSON object; is it a service of nsa-tune?", 200)
    return document


# --- one request


@dataclass(frozen=True, slots=True)
class _Server:
    """Who is asked."""

    shown: str
    """Its name in messages."""
    seconds: float
    """That a request may take."""
    hint: str = ""
    """How to change that."""

    def late(self) -> Refused:
        return Refused(f"{self.shown} did not answer within {self.seconds:g} s{self.hint}")


def _request(
    method: str, url: str, token: str, body: bytes | None, headers: Mapping[str, str]
) -> requests.Request:
    request = requests.Request(url, body, {"Accept-Encoding": "gzip", **headers}, method=method)
    if body is not None:
        request.add_header("X-Content-SHA256", hashlib.sha256(body).hexdigest())
    if token:
        # Not added to the request that a redirection leads to: that may be another server.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return request


def _exchanged(request: requests.Request, server: _Server, into: Path | None = None) -> Answer:
    """The answer to `request`, its content in the new file `into` or in memory."""

    def work(given_up: threading.Event) -> Answer:
        with _answered(request, server) as answer:
            if answer.status == _UNCHANGED:
                return _received(answer, "", b"")
            blocks = _unpacked(answer, _blocks(answer, server), server)
            if into is not None:
                return _received(answer, _written(blocks, into, server, given_up), b"")
            body = io.BytesIO()
            sha256 = _copied(blocks, body, _MAX_BODY_BYTES, server, given_up)
            return _received(answer, sha256, body.getvalue())

    return _within(server, work)


def _within(server: _Server, work: Callable[[threading.Event], T]) -> T:
    """What `work` gives in time.

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
        outcome = outcomes.get(timeout=server.seconds)
    except Empty:
        given_up.set()
        raise server.late() from None
    if isinstance(outcome, OSError | StoreError):
        raise outcome
    return outcome


class _Redirect(requests.HTTPRedirectHandler):
    """Follows what is read to http and https, and never from an encrypted connection to an open
    one. What is sent goes to no other server."""

    def redirect_request(
        self, req: requests.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> requests.Request | None:
        """The next request."""
        schemes = ("https",) if req.type == "https" else ("http", "https")
        if req.get_method() != "GET" or urlsplit(newurl).scheme.lower() not in schemes:
            fp.close()
            text = _printable(repr(newurl))
            raise Refused(f"{req.host}: it redirects to {text}, which is not followed", code)
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
def _answered(request: requests.Request, server: _Server) -> Iterator[Any]:
    """The answer to `request`: a success, or 304."""
    with ExitStack() as stack:
        with _spoken(server):
            try:
                answer = _opener().open(request, timeout=server.seconds)
            except url_errors.HTTPError as error:
                stack.enter_context(error)
                if error.code != _UNCHANGED:
                    raise _refusal(error, request, server) from None
                answer = error
        stack.enter_context(answer)
        yield answer


@contextmanager
def _spoken(server: _Server) -> Iterator[None]:
    """Turn what a connection raises into `Refused`."""
    try:
        yield
    except (TimeoutError, url_errors.URLError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise server.late() from error
        raise Refused(f"{server.shown} cannot be reached: {reason}") from error
    except (OSError, ValueError, http.client.HTTPException, zlib.error) as error:
        words = str(error) or type(error).__name__
        raise Refused(f"{server.shown} broke off, or is no web server: {words}") from error


def _refusal(error: url_errors.HTTPError, request: requests.Request, server: _Server) -> Refused:
    shown, sentence = server.shown, _sentence(error)
    if error.code == http.client.UNAUTHORIZED:
        missing = not request.has_header("Authorization")
        what = "needs a token" if missing else "knows no such token"
        text = f"{shown} {what}; set {TOKEN} (401{sentence})"
    elif error.code == http.client.FORBIDDEN:
        text = f"{shown} does not allow this to the token in {TOKEN} (403{sentence})"
    else:
        text = f"{shown} answers {error.code} {_printable(str(error.reason))}{sentence}"
    after = error.headers.get("Retry-After", "")
    wait_s = float(after) if re.fullmatch("[0-9]{1,4}", after) else 0.0
    return Refused(text, error.code, min(wait_s, _LONGEST_RETRY_AFTER_S))


def _sentence(error: url_errors.HTTPError) -> str:
    """What a service says in {"error": "..."}, behind a colon."""
    with suppress(OSError, ValueError, http.client.HTTPException, RecursionError):
        document = json.loads(error.read(_MAX_ERROR_BYTES))
        if isinstance(document, dict) and isinstance(document.get("error"), str):
            return f": {_printable(document['error'])}"
    return ""


def _printable(text: str) -> str:
    """What a server says goes into a log: one line, and not without end."""
    return "".join(character for character in text[:500] if character.isprintable())


# --- its content


def _received(answer: Any, sha256: str, body: bytes) -> Answer:
    etag = answer.headers.get("ETag", "")
    etag = etag if _ETAG.fullmatch(etag) else ""
    hashes = (answer.headers.get("X-Content-SHA256", ""), _sha256_in(etag))
    promised = tuple(_printable(text).strip().lower()[:64] for text in hashes if text)
    date = answer.headers.get("Date", "")
    return Answer(answer.status == _UNCHANGED, etag, promised, date, sha256, body)


def _check_promise(answer: Answer) -> None:
    if set(answer.promised) - {answer.sha256}:
        raise Refused("what came is not what was sent")


def _sha256_in(etag: str) -> str:
    word = etag.removeprefix("W/").strip('"')
    return word.removeprefix("sha256-") if word.startswith("sha256-") else ""


def _blocks(answer: Any, server: _Server) -> Iterator[bytes]:
    while True:
        with _spoken(server):
            block = bytes(answer.read1(_BLOCK))
        if not block:
            return
        yield block


def _unpacked(answer: Any, blocks: Iterator[bytes], server: _Server) -> Iterator[bytes]:
    """`blocks` without their compression, a bounded piece at a time."""
    if answer.headers.get("Content-Encoding", "").lower() != "gzip":
        yield from blocks
        return
    decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
    for block in blocks:
        rest = block
        while rest:
            with _spoken(server):
                piece = decoder.decompress(rest, _BLOCK)
            yield piece
            rest = decoder.unconsumed_tail
    with _spoken(server):
        yield decoder.flush()


def _copied(
    blocks: Iterator[bytes], file: IO[bytes], most: int, server: _Server,
    given_up: threading.Event,
) -> str:  # fmt: skip
    """Write `blocks` into `file`; their SHA-256."""
    digest, total = hashlib.sha256(), 0
    for block in blocks:
        total += len(block)
        if given_up.is_set() or total > most:
            raise Refused(f"{server.shown} sends more than {most} bytes", 200)
        digest.update(block)
        file.write(block)
    return digest.hexdigest()


def _written(
    blocks: Iterator[bytes], into: Path, server: _Server, given_up: threading.Event
) -> str:
    """Write `blocks` into the new file `into`, or leave none; their SHA-256."""
    with ExitStack() as unfinished, into.open("xb") as file:
        unfinished.callback(into.unlink, missing_ok=True)
        sha256 = _copied(blocks, file, _MAX_FILE_BYTES, server, given_up)
        file.flush()
        os.fsync(file.fileno())
        if not given_up.is_set():
            unfinished.pop_all()
    return sha256
