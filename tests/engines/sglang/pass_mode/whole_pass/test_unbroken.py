"""How often a pass runs before it is captured."""

from __future__ import annotations

import pytest

from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import warmed_up_once


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
