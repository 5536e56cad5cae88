"""How a whole-pass graph is captured."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_tune.engines.sglang.pass_mode.steering.choice import GRAPH_SIZES
from nsa_tune.engines.sglang.pass_mode.whole_pass import unbroken, warm_up
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import capture, spaced


def test_what_a_capture_takes_is_told_by_what_it_did(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0

    def passes(seconds: float) -> str:
        nonlocal now
        now += seconds
        return "hidden states"

    def capture_one(key: str, run: Any) -> None:
        for captures, seconds in ((False, 0.25), (False, 0.0), (True, 2.0)):
            passes(0.5)
            monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda c=captures: c)
            took_s.append(seconds)
            run()
        passes(4.0)

    took_s: list[float] = []
    for module in (unbroken, warm_up):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(unbroken, "no_breaks", nullcontext)
    caplog.set_level("INFO", "nsa_tune.sglang")
    found: dict[str, float] = {}
    monkeypatch.setattr(unbroken, "SECONDS", found)
    runner = SimpleNamespace(
        backend=SimpleNamespace(capture_one=capture_one),
        layer_model=SimpleNamespace(start_layer=0, end_layer=61),
    )
    for _ in range(2):
        capture(runner, "a key", lambda: passes(took_s[-1]))

    assert found == {"warming up": 2.5, "recording": 5.0, "instantiating": 8.0}
    assert "warming up a key took 1.2 s" in caplog.text


def test_pytorch_is_brought_out_of_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or SGLang could not capture its decode graphs, which come next."""
    ended: list[Any] = []

    def fail(key: str, forward: Any) -> None:
        raise RuntimeError("made up: operation not permitted when stream is capturing")

    monkeypatch.setattr(unbroken, "end_capture", ended.append)
    backend = SimpleNamespace(capture_one=fail)
    with pytest.raises(RuntimeError, match="made up"):
        capture(SimpleNamespace(backend=backend, layer_model=None), "a key", lambda: None)

    assert ended == [backend]


def test_many_tokens_are_an_eighth_padding_at_most() -> None:
    assert set(spaced(GRAPH_SIZES)) - set(GRAPH_SIZES) == {1152, 1408, 1664, 1920}
    assert spaced([64, 512, 1024, 2048]) == [64, 512, 1024, 1536, 2048]
    assert spaced([4, 64, 8192]) == [4, 64, 8192]


def test_few_tokens_have_fewer_sizes() -> None:
    """Those that are measured (calibration.py) are among them."""
    left_out = {80, 112, 144, 176, 208, 240, 288, 352, 416, 480}
    assert set(GRAPH_SIZES) - set(spaced(GRAPH_SIZES)) == left_out
    assert spaced([100, 200, 300, 400]) == [100, 200, 300, 400]
    assert spaced([64, 72, 80, 96, 100]) == [64, 96, 100]
