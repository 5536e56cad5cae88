"""Ways that lose are found, from passes that were timed with made-up events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nsa_tune.backend.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.backend.engines.sglang.pass_mode.steering import watch as module
from nsa_tune.backend.engines.sglang.pass_mode.steering.watch import Watch

ENGINE_US = 1000.0
ROWS, DENSE, ENGINE = PassMode.DECODE_GRAPH, PassMode.DENSE_GRAPH, PassMode.ENGINE


class _Device:
    """A clock in microseconds, and whether the GPU has come to what was recorded."""

    now_us = 0.0
    behind = False
    made = 0

    def event(self) -> _Event:
        self.made += 1
        return _Event(self)


class _Event:
    def __init__(self, device: _Device) -> None:
        self._device = device
        self.at_us = -1.0

    def record(self) -> None:
        self.at_us = self._device.now_us

    def query(self) -> bool:
        return not self._device.behind

    def elapsed_time(self, end: _Event) -> float:
        """In milliseconds, as CUDA's events have it."""
        assert 0 <= self.at_us <= end.at_us
        return (end.at_us - self.at_us) / 1e3


@pytest.fixture
def device() -> _Device:
    return _Device()


@pytest.fixture
def watch(device: _Device) -> Watch:
    return Watch(device.event)


def _passes(watch: Watch, device: _Device, mode: PassMode, took_us: float, timed: int) -> None:
    """Run passes until so many of them were timed."""
    while timed:
        start = watch.begin()
        device.now_us += took_us
        if start is not None:
            watch.end(start, mode, ENGINE_US)
            timed -= 1


def _begun(watch: Watch, passes: int) -> Iterator[object]:
    return (watch.begin() for _ in range(passes))


def test_few_passes_are_timed(watch: Watch) -> None:
    timed = [one for one in _begun(watch, 800) if one is not None]

    assert len(timed) == 800 / module._EVERY


def test_a_way_that_wins_is_kept(watch: Watch, device: _Device) -> None:
    _passes(watch, device, ROWS, 400.0, 500)

    assert watch.found == frozenset()
    assert watch.report()[ROWS]["of_engine"] == pytest.approx(0.4)


def test_a_way_that_loses_is_found_and_the_others_are_kept(watch: Watch, device: _Device) -> None:
    _passes(watch, device, DENSE, 800.0, 100)
    _passes(watch, device, ROWS, 1100.0, 100)

    assert watch.found == {ROWS}


def test_nothing_is_judged_before_enough_was_seen(watch: Watch, device: _Device) -> None:
    _passes(watch, device, ROWS, 5000.0, module._ENOUGH - 1)
    assert watch.found == frozenset()

    _passes(watch, device, ROWS, 5000.0, 1)
    assert watch.found == {ROWS}


def test_where_everything_has_become_slower_a_way_that_still_wins_is_kept(
    watch: Watch, device: _Device
) -> None:
    _passes(watch, device, ENGINE, 2000.0, module._ENOUGH)
    _passes(watch, device, ROWS, 1500.0, 200)

    assert watch.found == frozenset()


def test_where_the_engine_has_become_faster_a_way_must_be_so_too(
    watch: Watch, device: _Device
) -> None:
    _passes(watch, device, ENGINE, 500.0, module._ENOUGH)
    _passes(watch, device, ROWS, 700.0, module._ENOUGH)

    assert watch.found == {ROWS}


def test_a_few_passes_of_the_engines_own_do_not_count_as_drift(
    watch: Watch, device: _Device
) -> None:
    _passes(watch, device, ENGINE, 100.0, module._ENOUGH - 1)
    _passes(watch, device, ROWS, 700.0, module._ENOUGH)

    assert watch.found == frozenset()


def test_a_way_that_begins_to_lose_is_found(watch: Watch, device: _Device) -> None:
    _passes(watch, device, ROWS, 700.0, 5000)
    _passes(watch, device, ROWS, 1300.0, 200)

    assert watch.found == {ROWS}


def test_the_engines_own_way_is_never_given_up(watch: Watch, device: _Device) -> None:
    _passes(watch, device, ENGINE, 9000.0, 500)

    assert watch.found == frozenset()


def test_while_the_gpu_is_behind_nothing_is_waited_for_and_little_kept(
    watch: Watch, device: _Device
) -> None:
    device.behind = True
    for _ in range(100 * module._EVERY):
        start = watch.begin()
        device.now_us += 400.0
        if start is not None:
            watch.end(start, ROWS, ENGINE_US)
    assert watch.report() == {}
    assert device.made == 2 * module._MOST_WAITING

    device.behind = False
    watch._collect()
    assert watch.report()[ROWS]["passes"] == module._MOST_WAITING
