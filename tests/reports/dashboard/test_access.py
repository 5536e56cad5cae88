"""Who may look at a dashboard."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from nsa_tune._errors import UsageError
from nsa_tune.reports.dashboard.access import HEADERS, Gate, is_loopback, token_for

pytest.importorskip("starlette")

TOKEN = "s3cret"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9"])
def test_addresses_of_this_machine_alone(host: str) -> None:
    assert is_loopback(host)
    assert token_for(host, remote=False, given=None) is None
    assert token_for(host, remote=False, given=TOKEN) == TOKEN


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "gpu7.example"])
def test_addresses_that_others_reach_need_leave_and_then_a_token(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(UsageError, match="--remote"):
        token_for(host, remote=False, given=TOKEN)
    assert token_for(host, remote=True, given=TOKEN) == TOKEN
    made = {token_for(host, remote=True, given=None) for _ in range(2)}
    assert len(made) == 2
    assert all(token is not None and len(token) >= 32 for token in made)


async def _passed(scope: Any, receive: Any, send: Any) -> None:
    del scope, receive
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"through"})


class _Answer:
    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.status = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        self.body = messages[1]["body"]


def _finish(answering: Coroutine[Any, Any, None]) -> None:
    """Run what waits for nothing: an event loop of another test may be running already."""
    with pytest.raises(StopIteration):
        answering.send(None)


def _asked(
    token: str | None, headers: Mapping[str, str], *, query: str = "", method: str = "GET"
) -> _Answer:
    scope = {
        "type": "http",
        "method": method,
        "path": "/",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    _finish(Gate(_passed, token)(scope, receive, send))
    return _Answer(sent)


@pytest.mark.parametrize("host", ["127.0.0.1:8400", "localhost:8400", "localhost", "[::1]:8400"])
def test_without_a_token_this_machines_names_are_answered(host: str) -> None:
    assert _asked(None, {"host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8400", "localhost.evil.example", "", "127.0.0.1.x:80"]
)
def test_another_name_for_this_machine_is_not_answered(host: str) -> None:
    question = _asked(None, {"host": host})

    assert question.status == 421
    assert b"through" not in question.body


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {TOKEN}"},
        {"authorization": f"bearer {TOKEN}"},
        {"cookie": f"nsa_tune_token={TOKEN}"},
        {"cookie": f"other=1; nsa_tune_token={TOKEN}"},
    ],
)
def test_the_token_opens(headers: dict[str, str]) -> None:
    assert _asked(TOKEN, {"host": "gpu7.example", **headers}).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": "Bearer"},
        {"cookie": "nsa_tune_token=wrong"},
        {"cookie": "nsa_tune_token="},
        {"cookie": "\x00;;=;"},
        {"authorization": "Bearer \xff"},
    ],
)
def test_anything_else_does_not(headers: dict[str, str]) -> None:
    question = _asked(TOKEN, {"host": "127.0.0.1:8400", **headers})

    assert question.status == 401
    assert b"through" not in question.body
    assert TOKEN.encode() not in question.body


def test_a_token_in_the_address_becomes_a_cookie_and_leaves_the_address() -> None:
    question = _asked(TOKEN, {"host": "gpu7.example"}, query=f"token={TOKEN}")

    assert question.status == 303
    assert question.headers["location"] == "."
    assert question.headers["set-cookie"] == (
        f"nsa_tune_token={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    )
    assert _asked(TOKEN, {}, query="token=wrong").status == 401
    assert _asked(TOKEN, {}, query="token=").status == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading_is_allowed(method: str) -> None:
    assert _asked(None, {"host": "localhost"}, method=method).status == 405


def test_every_answer_has_the_headers_that_keep_a_browser_careful() -> None:
    for question in (
        _asked(None, {"host": "localhost"}),
        _asked(None, {"host": "evil.example"}),
        _asked(TOKEN, {}),
    ):
        assert question.headers.items() >= HEADERS.items()
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_a_websocket_is_closed() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> dict[str, Any]:
        return {}

    _finish(Gate(_passed, None)({"type": "websocket"}, receive, send))

    assert sent == [{"type": "websocket.close", "code": 1008}]
