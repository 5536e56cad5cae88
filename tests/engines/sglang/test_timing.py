"""Which of two ways is faster, launching included."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.engines.sglang import timing


class Clock:
    """A host on which launching takes what is said."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.launched: list[str] = []

    def launch(self, name: str, *took_us: float) -> None:
        self.launched.append(name)
        turn = self.launched.count(name) - 1
        self.now_s += took_us[turn % len(took_us)] / 1e6


def test_launching_takes_the_median_of_launches_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", lambda: clock.now_s)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    more_us = timing.more_launched_us(
        lambda: clock.launch("engine", 10.0),
        lambda: clock.launch("own", 25.0, 25.0, 900.0),
    )

    assert more_us == pytest.approx(15.0)
    assert clock.launched[:4] == ["engine", "own", "engine", "own"]


@pytest.mark.parametrize(
    ("own_us", "more_us", "faster"),
    [
        (89.0, 0.0, True),
        (91.0, 0.0, False),
        (80.0, 9.0, True),
        (80.0, 11.0, False),
        (91, -9, False),
    ],
)
def test_what_is_launched_later_counts_and_what_is_launched_sooner_does_not(
    own_us: float, more_us: float, faster: bool
) -> None:
    assert timing.gains(100.0, own_us, more_us, part=0.9) == faster
