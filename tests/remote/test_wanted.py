"""Asking a service for a table that is not there."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_tune import Dispatcher, NoTunedData
from nsa_tune.backend.hardware import detect
from nsa_tune.remote import fetching, wanted
from nsa_tune.remote.address import Address
from tests.fleet.server import Kept, Server, serving


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has asked nobody yet."""
    monkeypatch.setattr(fetching, "_known", {})
    monkeypatch.setattr(wanted, "_asked", set())


@pytest.fixture
def server(database: Path) -> Iterator[Server]:
    with serving(Kept({"/v1/database": database.read_bytes()})) as server:
        yield server


def _open(gpu: str | None = None, *, strict: bool = False) -> None:
    try:
        Dispatcher.open(gpu=gpu, model="tiny", heads=4, kv_dtype="fp8", strict=strict)
    finally:
        for thread in threading.enumerate():
            if thread.name == "nsa-tune-wanted":
                thread.join()


@pytest.mark.parametrize("strict", [True, False])
def test_a_service_is_told_once_what_this_machine_lacks(
    server: Server, monkeypatch: pytest.MonkeyPatch, *, strict: bool
) -> None:
    monkeypatch.setattr(detect, "local_device_name", detect.cpu_name)
    monkeypatch.setenv("NSA_TUNE_DB", server.url)
    monkeypatch.setenv("NSA_TUNE_WANTED", "1")

    for _ in range(2):
        try:
            _open(strict=strict)
        except NoTunedData:
            assert strict

    (posted,) = server.kept.posted
    assert posted.path == "/v1/wanted"
    assert json.loads(posted.body) == {
        "gpu": detect.cpu_name(), "model": "tiny", "heads": 4, "kv_layout": "fp8_packed",
        "driver": "", "libraries": dict(detect.library_versions()),
    }  # fmt: skip


def test_nobody_is_told_unless_asked_to(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_TUNE_DB", server.url)
    _open(detect.cpu_name())

    monkeypatch.setenv("NSA_TUNE_WANTED", "1")
    _open("NVIDIA H200")  # another machine's
    assert server.kept.posted == []


def test_a_web_server_is_not_asked(server: Server) -> None:
    assert wanted.ask_for(Address.of(f"{server.url}/nsa-tune.db"), {}) is None


def test_a_service_that_does_not_want_to_know_is_named(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.kept.token = "right"

    thread = wanted.ask_for(Address.of(server.url), {"gpu": "a"})
    assert thread is not None
    thread.join()

    assert "no table was asked for" in caplog.text
    assert "needs a token" in caplog.text
