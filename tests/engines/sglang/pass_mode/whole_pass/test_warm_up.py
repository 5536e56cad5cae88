"""How graphs are warmed up before they are captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.engines.sglang.eligible import Part
from nsa_tune.engines.sglang.pass_mode.hooks import around_capture_decode
from nsa_tune.engines.sglang.pass_mode.ranks import Ranks
from nsa_tune.engines.sglang.pass_mode.whole_pass import warm_up as module
from nsa_tune.engines.sglang.pass_mode.whole_pass.warm_up import agree, warmed_up_briefly


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
        run = warmed_up_briefly(self.layer_model, self.forward, [])
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


class _Backend:
    """A graph backend of SGLang's, and which passes it has warmed up and recorded."""

    def __init__(self, runs: _Runs, patch: pytest.MonkeyPatch) -> None:
        self._graphs: dict[int, list[int]] = {}
        self._runs, self._patch = runs, patch

    def capture_one(self, key: int, forward: Any, post_warmup_hook: Any = None) -> None:
        before = len(self._runs.ran)
        for captures in (False, False, True):
            self._patch.setattr("torch.cuda.is_current_stream_capturing", lambda c=captures: c)
            forward()
        self._graphs[key] = self._runs.ran[before:]


def _engine(patch: pytest.MonkeyPatch, **changes: Any) -> tuple[Any, Any]:
    """The runners of an engine's prefill and decode graphs."""
    known = changes.pop("known", True)
    patch.setattr(module, "installed_release", lambda: SimpleNamespace(known=known))
    left_out = changes.pop("left_out", None)
    patch.setattr(module, "why_not", lambda part, engine: "made up" if part is left_out else None)
    runs = _Runs()
    vars(runs.layer_model).update(changes.pop("model", {}))
    runner = SimpleNamespace(
        attn_backend=None,
        is_draft_worker=changes.pop("is_draft_worker", False),
        tp_group=SimpleNamespace(rank_in_group=0, world_size=1),
        server_args=SimpleNamespace(**changes),
        runs=runs,
    )
    prefill, decode = (
        SimpleNamespace(model_runner=runner, backend=_Backend(runs, patch)) for _ in range(2)
    )
    prefill.layer_model = runs.layer_model
    return prefill, decode


def _captured(graphs: Any) -> dict[int, list[int]]:
    """The layers of each run, by size, when SGLang has captured its own graphs of a kind."""

    def capture_one_stream(graphs: Any, stream: int) -> None:
        for size in (64, 32, 16):
            graphs.backend.capture_one(
                size, graphs.model_runner.runs.forward, post_warmup_hook=None
            )

    around_capture_decode(capture_one_stream, graphs, 0)
    assert "capture_one" not in vars(graphs.backend)
    found: dict[int, list[int]] = graphs.backend._graphs
    return found


def test_few_layers_warm_sglangs_own_graphs_up_but_for_the_first_of_a_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its first pass a layer may make what it cannot make within a capture."""
    for graphs in (engine := _engine(monkeypatch)):
        agree(engine[0])
        assert _captured(graphs) == {64: [61, 61, 61], 32: [6, 61], 16: [6, 61]}


@pytest.mark.parametrize("changes", [
    {"known": False}, {"left_out": Part.PASSES}, {"left_out": Part.DENSE},
    {"enable_torch_compile": True}, {"is_draft_worker": True},
    {"model": {"layers_to_capture": [2, 30, 58]}},
])  # fmt: skip
def test_sglang_warms_its_graphs_up_where_few_layers_may_not_do(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    prefill, decode = _engine(monkeypatch, **changes)
    agree(prefill)
    for graphs in (prefill, decode):
        assert set(map(tuple, _captured(graphs).values())) == {(61, 61, 61)}


def test_a_rank_alone_does_not_run_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor when SGLang captures anew, and another rank does not agree any more."""
    prefill, decode = _engine(monkeypatch)
    agree(prefill)
    monkeypatch.setattr(Ranks, "agree", lambda ranks, topic, value: False)
    agree(prefill)
    assert _captured(decode)[16] == [61, 61, 61]


def test_without_a_backend_sglang_captures_as_it_would(caplog: pytest.LogCaptureFixture) -> None:
    graphs = SimpleNamespace(model_runner=SimpleNamespace())
    assert around_capture_decode(lambda graphs: "captured", graphs) == "captured"
    assert not caplog.text
