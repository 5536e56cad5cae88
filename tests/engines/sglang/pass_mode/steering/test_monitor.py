"""Ways that lose are found, from passes that were timed with made-up events."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.steering import monitor as module
from nsa_tune.engines.sglang.pass_mode.steering.monitor import RegressionMonitor

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
def monitor(device: _Device) -> RegressionMonitor:
    return RegressionMonitor(device.event)


def _passes(
    monitor: RegressionMonitor, device: _Device, mode: PassMode, took_us: float, timed: int
) -> None:
    """Run passes until so many of them were timed."""
    while timed:
        start = monitor.begin()
        device.now_us += took_us
        if start is not None:
            monitor.end(start, mode, ENGINE_US)
            timed -= 1


def _begun(monitor: RegressionMonitor, passes: int) -> Iterator[object]:
    return (monitor.begin() for _ in range(passes))


def test_few_passes_are_timed(monitor: RegressionMonitor) -> None:
    timed = [one for one in _begun(monitor, 800) if one is not None]

    assert len(timed) == 800 / module._EVERY


def test_a_way_that_wins_is_kept(monitor: RegressionMonitor, device: _Device) -> None:
    _passes(monitor, device, ROWS, 400.0, 500)

    assert monitor.losing == frozenset()
    assert monitor.report()[ROWS]["of_engine"] == pytest.approx(0.4)


_FEW, _ALL = module._ENOUGH - 1, module._ENOUGH


@pytest.mark.parametrize(
    ("passes", "losing"),
    [
        pytest.param([(DENSE, 800.0, 100), (ROWS, 1100.0, 100)], {ROWS}, id="another way wins"),
        pytest.param([(ROWS, ENGINE_US, _ALL)], set(), id="exactly as long"),
        pytest.param([(ENGINE, 2000.0, _ALL), (ROWS, 1500.0, 200)], set(), id="all are slower"),
        pytest.param(
            [(ENGINE, 2000.0, _ALL), (ROWS, 1500.0, module._RETRY // module._EVERY + 1)],
            {ROWS},
            id="all were slower long ago",
        ),
        pytest.param([(ENGINE, 500.0, _ALL), (ROWS, 700.0, _ALL)], {ROWS}, id="engine is faster"),
        pytest.param([(ENGINE, 100.0, _FEW), (ROWS, 700.0, _ALL)], set(), id="too few for a drift"),
        pytest.param([(ROWS, 700.0, 5000), (ROWS, 1300.0, 200)], {ROWS}, id="begins to lose"),
        # However long the host's moment was.
        pytest.param(
            [(ROWS, 700.0, _FEW), (ROWS, 60e6, 1), (ROWS, 700.0, 20)], set(), id="a slow moment"
        ),
        # It loses on the whole.
        pytest.param(
            [(ROWS, 700.0, 11), (ROWS, 20_000.0, 1)] * 20, {ROWS}, id="very slow now and then"
        ),
        pytest.param([(ENGINE, 9000.0, 500)], set(), id="never the engine's own"),
    ],
)
def test_a_way_is_given_up_where_it_loses_on_the_whole(
    passes: list[tuple[PassMode, float, int]],
    losing: set[PassMode],
    monitor: RegressionMonitor,
    device: _Device,
) -> None:
    for mode, took_us, timed in passes:
        _passes(monitor, device, mode, took_us, timed)

    assert monitor.losing == losing


def test_nothing_is_judged_before_enough_was_seen(
    monitor: RegressionMonitor, device: _Device
) -> None:
    _passes(monitor, device, ROWS, 5000.0, module._ENOUGH - 1)
    assert monitor.losing == frozenset()

    _passes(monitor, device, ROWS, 5000.0, 1)
    assert monitor.losing == {ROWS}


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_noise_neither_gives_up_a_way_that_wins_nor_hides_one_that_loses(
    seed: int, loses: bool
) -> None:
    random, device = Random(seed), _Device()
    monitor = RegressionMonitor(device.event)
    took_us = 1100.0 if loses else 900.0
    for _ in range(400):
        _passes(monitor, device, ROWS, took_us * random.uniform(0.8, 1.2), 1)

    assert monitor.losing == ({ROWS} if loses else frozenset())


def _until_tried_again(monitor: RegressionMonitor, device: _Device, mode: PassMode) -> int:
    """Passes of SGLang's own that run while a way is given up."""
    count = 0
    while mode in monitor.losing:
        start = monitor.begin()
        device.now_us += ENGINE_US
        if start is not None:
            monitor.end(start, ENGINE, ENGINE_US)
        count += 1
        assert count < 10**6
    return count


def test_a_way_that_was_disabled_is_tried_again(
    monitor: RegressionMonitor, device: _Device
) -> None:
    """What was slow may have been something else on the host, for a while."""
    _passes(monitor, device, ROWS, 3000.0, 100)
    assert monitor.losing == {ROWS}

    assert _until_tried_again(monitor, device, ROWS) == pytest.approx(module._RETRY, abs=8 * 100)
    _passes(monitor, device, ROWS, 700.0, 1000)
    assert monitor.losing == frozenset()


def test_a_way_that_goes_on_to_lose_is_tried_ever_more_seldom(
    monitor: RegressionMonitor, device: _Device
) -> None:
    waits = []
    for _ in range(3):
        _passes(monitor, device, ROWS, 1300.0, module._ENOUGH)
        assert monitor.losing == {ROWS}
        waits.append(_until_tried_again(monitor, device, ROWS))

    assert waits[1] == module._RETRY_GROWS * waits[0]
    assert waits[2] == module._RETRY_GROWS * waits[1]
    # So passes of a way that loses are few among all.
    assert 0.03 * waits[0] > module._ENOUGH * module._EVERY


def test_a_way_that_lost_while_everything_was_slow_is_judged_by_the_engines_passes_since(
    monitor: RegressionMonitor, device: _Device
) -> None:
    _passes(monitor, device, ROWS, 1300.0, module._ENOUGH)
    _passes(monitor, device, ENGINE, 2000.0, 500)
    _until_tried_again(monitor, device, ROWS)
    _passes(monitor, device, ENGINE, 2000.0, 100)
    _passes(monitor, device, ROWS, 1300.0, 500)

    assert monitor.losing == frozenset()


def test_while_the_gpu_is_behind_nothing_is_waited_for_and_little_kept(
    monitor: RegressionMonitor, device: _Device
) -> None:
    device.behind = True
    for _ in range(100 * module._EVERY):
        start = monitor.begin()
        device.now_us += 400.0
        if start is not None:
            monitor.end(start, ROWS, ENGINE_US)
    assert monitor.report() == {}
    assert device.made == 2 * module._MOST_WAITING

    device.behind = False
    monitor._collect()
    assert monitor.report()[ROWS]["passes"] == module._MOST_WAITING
