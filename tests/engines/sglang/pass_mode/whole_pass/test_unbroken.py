"""How a whole-pass graph is captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nsa_tune.engines.sglang.pass_mode.whole_pass import unbroken
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import capture, warmed_up_once


def test_a_pass_runs_once_before_it_is_captured() -> None:
    """SGLang asks for two runs before the one that it captures."""
    ran: list[str] = []

    def forward() -> int:
        ran.append(state)
        return len(ran)

    state = "warm-up"
    run = warmed_up_once(forward)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: state == "capture")
        outputs = [run(), run()]
        state = "capture"
        outputs.append(run())

    assert ran == ["warm-up", "capture"]
    assert outputs == [1, 1, 2]


def test_pytorch_is_brought_out_of_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or SGLang could not capture its decode graphs, which come next."""
    ended: list[Any] = []

    def fail(key: str, forward: Any) -> None:
        raise RuntimeError("made up: operation not permitted when stream is capturing")

    monkeypatch.setattr(unbroken, "end_capture", ended.append)
    backend = SimpleNamespace(capture_one=fail)
    with pytest.raises(RuntimeError, match="made up"):
        capture(SimpleNamespace(backend=backend), "a key", lambda: None)

    assert ended == [backend]
