"""The edge to the engine: faults stop here, and are said once."""

from __future__ import annotations

import logging

import pytest

from nsa_tune.backend.engines.sglang.edge import attempt, say_once


def test_a_value_passes() -> None:
    assert attempt("dividing", divmod, 7, 2) == (3, 1)


def test_a_fault_becomes_none_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert attempt("dividing", divmod, 7, 0) is None

    (record,) = caplog.records
    assert record.message.startswith("dividing failed, so SGLang decides by itself: ZeroDivision")
    assert record.levelno == logging.WARNING
    assert record.exc_info


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_order_to_stop_is_obeyed(stop: type[BaseException]) -> None:
    def order() -> None:
        raise stop

    with pytest.raises(stop):
        attempt("working", order)


def test_a_text_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for text in ("one", "two", "one"):
        say_once(logging.WARNING, text)

    assert [record.message for record in caplog.records] == ["one", "two"]
