"""Which of two ways is faster, launching included."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.engines.sglang.kernels import timing


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
        lambda: clock.launch("swapped", 25.0, 25.0, 900.0),
    )

    assert more_us == pytest.approx(15.0)
    assert clock.launched[:4] == ["engine", "swapped", "engine", "swapped"]
