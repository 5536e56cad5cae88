"""What the plug-in says of the seconds that an engine's start takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nsa_tune.engines.sglang.pass_mode import seconds
from nsa_tune.engines.sglang.pass_mode.seconds import ENGINE, spent, split


def test_what_nobody_else_counts_is_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the parts of a capture add up to the whole, also where one fails."""
    now = iter([0.0, 1.0, 3.0, 10.0, 10.0, 14.0])
    monkeypatch.setattr(seconds, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(seconds, "SECONDS", {})
    with spent("all"), spent("a part"):
        pass
    with pytest.raises(RuntimeError), spent("a part"):
        raise RuntimeError("made up")

    assert seconds.SECONDS == {"a part": 6.0, "all": 8.0}


def test_what_sglang_itself_takes_is_said_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seconds, "SECONDS", {"recording": 2.5, ENGINE: 9.0, "timing passes": 1.0})
    assert split() == (
        "the plug-in took 3.5 s of this start (recording 2.5, timing passes 1.0); "
        "SGLang's own graphs took 9.0 s"
    )
