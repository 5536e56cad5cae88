"""The edge to an engine: faults stop here, and are said once."""

from __future__ import annotations

import logging
from bdb import BdbQuit

import pytest

from nsa_tune.engines.edge import Edge, EngineMustStop


@pytest.fixture
def edge() -> Edge:
    return Edge("Engine", log="nsa_tune.engine")


def test_a_value_passes(edge: Edge) -> None:
    assert edge.attempt("dividing", divmod, 7, 2) == (3, 1)


def test_a_fault_becomes_none_and_one_line(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert edge.attempt("dividing", divmod, 7, 0) is None

    (record,) = caplog.records
    assert record.message.startswith("dividing failed, so Engine decides by itself: ZeroDivision")
    assert (record.name, record.levelno) == ("nsa_tune.engine", logging.WARNING)
    assert record.exc_info


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, BdbQuit])
def test_an_order_to_stop_is_obeyed(edge: Edge, stop: type[BaseException]) -> None:
    def order() -> None:
        raise stop

    with pytest.raises(stop):
        edge.attempt("working", order)


def test_a_text_is_said_once_by_each_engine(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("one", "two", "one"):
        edge.say_once(logging.WARNING, text)
    Edge("Other", log="nsa_tune.other").say_once(logging.WARNING, "one")
    edge.forget()
    edge.say_once(logging.WARNING, "two")

    assert [record.message for record in caplog.records] == ["one", "two", "one", "two"]


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this can be said")


def test_a_fault_that_cannot_say_what_it_is_stops_here_too(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise _Mute

    assert edge.attempt("working", fail) is None
    assert "working failed, so Engine decides by itself: _Mute" in caplog.text


def test_an_engine_that_must_stop_is_told_of_at_once(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    """On its way out the engine may wait for others, and never show the error."""

    def stops() -> None:
        raise EngineMustStop("start it with less memory")

    with pytest.raises(EngineMustStop):
        edge.attempt("measuring", stops)

    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("ERROR", "start it with less memory")
    ]


def test_faults_without_end_fill_neither_log_nor_memory(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a hook that fails in each pass, with another number in its message each time."""

    def fails(number: int) -> None:
        raise ValueError(f"{number} is no size")

    for number in range(5000):
        edge.attempt("deciding", fails, number)
        edge.say_once(20, f"pass {number}")

    assert 0 < len(caplog.records) <= 1000
    assert len(edge._said) == 1000


def test_why_an_engine_must_stop_is_said_whatever_was_said_before(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    def stops() -> None:
        raise EngineMustStop("start it without graphs")

    for number in range(2000):
        edge.say_once(logging.WARNING, f"pass {number}")
    with pytest.raises(EngineMustStop):
        edge.attempt("capturing", stops)

    assert caplog.records[-1].getMessage() == "start it without graphs"
