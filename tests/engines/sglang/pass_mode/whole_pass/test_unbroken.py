"""How a whole-pass graph is captured."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.engines.sglang.pass_mode.steering.choice import GRAPH_SIZES
from nsa_tune.engines.sglang.pass_mode.whole_pass import unbroken
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import (
    capture,
    spaced,
    spent,
    warmed_up_briefly,
)


class _Runs:
    """A model of 61 layers, and how far its passes ran."""

    def __init__(self, *, fails: Exception | None = None) -> None:
        self.layer_model = SimpleNamespace(start_layer=0, end_layer=61)
        self.ran: list[int] = []
        self._fails = fails

    def forward(self) -> str:
        end = self.layer_model.end_layer
        if self._fails is not None and end < 61:
            raise self._fails
        self.ran.append(end)
        return f"hidden states of layer {end}"

    def capture_one(self) -> str:
        """As SGLang does it: two runs before the one that is captured."""
        run = warmed_up_briefly(self, self.forward, [])
        with pytest.MonkeyPatch.context() as patch:
            for captures in (False, False, True):
                patch.setattr("torch.cuda.is_current_stream_capturing", lambda c=captures: c)
                output = run()
        return str(output)


def test_a_few_layers_run_once_before_a_pass_is_captured() -> None:
    runs = _Runs()

    assert runs.capture_one() == "hidden states of layer 61"
    assert runs.ran == [6, 61]
    assert runs.layer_model.end_layer == 61


def test_what_a_capture_takes_is_told_by_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(unbroken, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(unbroken, "no_breaks", nullcontext)
    monkeypatch.setattr(unbroken, "SECONDS", {})
    runner = SimpleNamespace(
        backend=SimpleNamespace(capture_one=capture_one),
        layer_model=SimpleNamespace(start_layer=0, end_layer=61),
    )
    for _ in range(2):
        capture(runner, "a key", lambda: passes(took_s[-1]))

    assert unbroken.SECONDS == {"warming up": 2.5, "recording": 5.0, "instantiating": 8.0}


def test_where_few_layers_do_not_run_by_themselves_all_do() -> None:
    runs = _Runs(fails=AttributeError("made up: a layer looks at the next one"))

    assert runs.capture_one() == "hidden states of layer 61"
    assert runs.ran == [61, 61]
    assert runs.layer_model.end_layer == 61


def test_a_rank_out_of_memory_does_not_run_all_layers_alone() -> None:
    """The others wait for it after the few."""
    runs = _Runs(fails=torch.OutOfMemoryError("made up"))

    with pytest.raises(torch.OutOfMemoryError):
        runs.capture_one()
    assert runs.ran == []
    assert runs.layer_model.end_layer == 61


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


def test_what_nobody_else_counts_is_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the parts of a capture add up to the whole, also where one fails."""
    now = iter([0.0, 1.0, 3.0, 10.0, 10.0, 14.0])
    monkeypatch.setattr(unbroken, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(unbroken, "SECONDS", {})
    with spent("all"), spent("a part"):
        pass
    with pytest.raises(RuntimeError), spent("a part"):
        raise RuntimeError("made up")

    assert unbroken.SECONDS == {"a part": 6.0, "all": 8.0}


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
