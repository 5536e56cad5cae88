"""The client: it waits for a service that is away, and says what a service says."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nsa_tune._errors import UsageError
from nsa_tune.remote.client import Client, Refused, token


@contextmanager
def _answering(*answers: tuple[int, bytes, dict[str, str]]) -> Iterator[tuple[str, list[Any]]]:
    """A server that gives these answers in turn, the last one for ever; and what it was asked."""
    left, asked = list(answers), list[Any]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            asked.append((self.command, self.path, dict(self.headers), self.rfile.read(length)))
            status, body, headers = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _says(status: int, **document: object) -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps(document).encode(), {}


def test_the_token_and_the_hash_go_along() -> None:
    with _answering(_says(200, added=1)) as (url, asked):
        assert Client(f"{url}/", "t0ken").post("/v1/tables", b"text") == {"added": 1}
    ((method, path, headers, body),) = asked
    assert (method, path, body) == ("POST", "/v1/tables", b"text")
    assert headers["Authorization"] == "Bearer t0ken"
    assert headers["X-Content-Sha256"] == hashlib.sha256(b"text").hexdigest()


def test_what_may_be_different_later_is_tried_again() -> None:
    with _answering(_says(503, error="busy"), _says(429, error="full"), _says(200, a=1)) as (
        url, asked,
    ):  # fmt: skip
        assert Client(url, "t").document("/v1/jobs") == {"a": 1}
        assert len(asked) == 3


def test_a_refusal_is_its_sentence_at_once() -> None:
    with _answering(_says(403, error="token x has the role read, and this needs admin")) as (
        url, asked,
    ):  # fmt: skip
        with pytest.raises(Refused, match="403: token x has the role read") as error:
            Client(url, "t").post("/v1/jobs", {})
        assert error.value.status == 403
        assert len(asked) == 1


def test_nobody_there_is_waited_for_so_long_and_no_longer() -> None:
    with _answering(_says(200)) as (url, _):
        pass
    with pytest.raises(Refused, match="cannot be reached"):
        Client(url, "t", patience_s=1.0).get("/v1/tables")
    client = Client(url, "t")
    client.given_up.set()
    with pytest.raises(Refused):
        client.get("/v1/tables")


def test_an_answer_that_was_changed_on_the_way_is_asked_for_again() -> None:
    bad = (200, b"b", {"X-Content-SHA256": "0" * 64})
    good = (200, b"g", {"X-Content-SHA256": hashlib.sha256(b"g").hexdigest()})
    with _answering(bad, good) as (url, asked):
        assert Client(url, "t").get("/v1/tables/x") == b"g"
        assert len(asked) == 2


def test_a_packed_answer_is_unpacked_and_its_hash_is_of_the_content() -> None:
    headers = {"Content-Encoding": "gzip", "X-Content-SHA256": hashlib.sha256(b"g").hexdigest()}
    with _answering((200, gzip.compress(b"g"), headers)) as (url, asked):
        assert Client(url, "t").get("/v1/tables/x") == b"g"
    assert asked[0][2]["Accept-Encoding"] == "gzip"


def test_a_small_answer_that_unpacks_without_end_is_refused() -> None:
    bomb = gzip.compress(bytes(2**26 + 1))
    answer = 200, bomb, {"Content-Encoding": "gzip"}
    with _answering(answer) as (url, _), pytest.raises(Refused, match="sends more than"):
        Client(url, "t").get("/v1/tables/x")


def test_what_is_sent_follows_no_redirection() -> None:
    answer = 307, b"", {"Location": "http://127.0.0.1:9/"}
    with _answering(answer) as (url, _), pytest.raises(Refused, match="which is not followed"):
        Client(url, "t").post("/v1/tables", b"rows")


def test_a_service_says_when_to_come_again() -> None:
    waited = list[float]()

    class Impatient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return False

    with _answering((503, b"", {"Retry-After": "30"}), _says(200, a=1)) as (url, _):
        client = Client(url, "t")
        client.given_up = Impatient()
        assert client.document("/") == {"a": 1}
    assert 15 <= waited[0] <= 45


@pytest.mark.parametrize(
    "answer",
    [
        (404, b"<html>", {}),
        (302, b"", {"Location": "http://127.0.0.1:9/"}),
        (403, b"[]", {}),
        (403, b"[" * 50_000, {}),
        (401, json.dumps({"error": 5}).encode(), {}),
    ],
)
def test_another_server_is_named_as_one(answer: tuple[int, bytes, dict[str, str]]) -> None:
    with _answering(answer) as (url, asked):
        with pytest.raises(Refused):
            Client(url, "t", patience_s=0.1).document("/v1/jobs")
        assert {path for _, path, _, _ in asked} == {"/v1/jobs"}, "the token goes nowhere else"


@pytest.mark.parametrize("body", [b"nonsense", b"[1]", b"\xff", b"[" * 50_000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with _answering((200, body, {})) as (url, _), pytest.raises(Refused, match="no JSON object"):
        Client(url, "t").document("/v1/jobs")


@pytest.mark.parametrize(
    "url", ["", "tables.example", "file:///etc/passwd", "http://", "http://x?y"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is no address of a service"):
        Client(url, "t")


def test_a_token_in_the_address_is_refused() -> None:
    with pytest.raises(UsageError, match="NSA_TUNE_TOKEN"):
        Client("https://nst_x@tables.example", "t")


def test_a_token_may_be_in_a_file_that_nobody_else_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text("nst_abc\n")
    path.chmod(0o600)
    monkeypatch.setenv("NSA_TUNE_TOKEN_FILE", str(path))
    assert token() == "nst_abc"
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others can read"):
        token()
    for wrong in (tmp_path, tmp_path / "none", "/dev/zero"):
        monkeypatch.setenv("NSA_TUNE_TOKEN_FILE", str(wrong))
        with pytest.raises(UsageError, match="NSA_TUNE_TOKEN_FILE is"):
            token()
    monkeypatch.setenv("NSA_TUNE_TOKEN", "nst_other")
    assert token() == "nst_other"
