"""How graphs are warmed up before they are captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from nsa_tune.engines.sglang.pass_mode.hooks import around_capture_decode
from nsa_tune.engines.sglang.pass_mode.whole_pass import warm_up as module
from nsa_tune.engines.sglang.pass_mode.whole_pass.warm_up import agree, warmed_up_briefly
from nsa_tune.engines.sglang.ranks import Ranks
from nsa_tune.engines.sglang.switch import Part
from tests.engines.sglang.wheels import Wheel


class _Other:
    """Another way to multiply weights."""


def _layer(*, width: int = 4, dtype: str = "bfloat16", **changes: Any) -> Any:
    """One with weights, by default as all others."""
    layer = torch.nn.Module()
    layer.proj = torch.nn.Linear(4, width, dtype=getattr(torch, dtype), device="meta")
    vars(layer.proj).update(changes)
    return layer


class _Runs:
    """A model of 61 layers, and how far its passes ran."""

    def __init__(self, *, fails: Exception | None = None) -> None:
        layers = [_layer() for _ in range(61)]
        self.layer_model = SimpleNamespace(start_layer=0, end_layer=61, layers=layers)
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
    assert runs.ran == [4, 61]
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


class _Size(int):
    """A shape key."""

    @property
    def size(self) -> int:
        return int(self)


class _Backend:
    """A graph backend as SGLang's capture one graph: what they call is made up."""

    def __init__(self, runs: _Runs, patch: pytest.MonkeyPatch) -> None:
        self._graphs: dict[int, Any] = {}
        self._runs, self._patch, self.fails = runs, patch, False

    def capture_one(self, key: int, forward: Any, post_warmup_hook: Any = None) -> None:
        for captures in (False, False, True):
            self._patch.setattr("torch.cuda.is_current_stream_capturing", lambda c=captures: c)
            forward()
        if self.fails and self._runs.ran[-2] == 4:
            raise RuntimeError("made up: operation not permitted when stream is capturing")
        self._graphs[key] = "a graph"


def _backend_of(wheel: Wheel, kind: str, patch: pytest.MonkeyPatch) -> Any:
    """One that runs SGLang's own code to capture a graph."""

    @contextmanager
    def capture(**named: Any) -> Iterator[None]:
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        yield
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)

    names: dict[str, Any] = {
        **dict.fromkeys(("torch", "BreakableCUDAGraph", "eager_on_graph"), MagicMock()),
        "BreakableCUDAGraphCapture": capture,
        "graph_pool_capture_scope": nullcontext,
    }
    file = f"sglang/srt/model_executor/runner_backend/{kind.lower()}_cuda_graph_backend.py"
    own = wheel.compiled(file, f"{kind}CudaGraphBackend.capture_one", names)
    patch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    made = type("Backend", (), {
        "capture_one": own, "__getattr__": lambda backend, name: MagicMock(),
    })()  # fmt: skip
    vars(made).update(
        _graphs={}, _outputs={}, _capture_inputs={}, _debug_eager=False,
        _memory_saver_adapter=None, _reuse_output_buffer=False, _device_module=MagicMock(),
    )  # fmt: skip
    made._device_module.graph = capture
    return made


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

    runs, found = graphs.model_runner.runs, {}

    def capture_one_stream(graphs: Any, stream: int) -> None:
        for size in (64, 32, 16):
            before = len(runs.ran)
            graphs.backend.capture_one(_Size(size), runs.forward, post_warmup_hook=None)
            found[size] = runs.ran[before:]

    around_capture_decode(capture_one_stream, graphs, 0)
    assert "capture_one" not in vars(graphs.backend)
    assert set(graphs.backend._graphs) == {64, 32, 16}
    return found


def test_few_layers_warm_sglangs_own_graphs_up_but_for_the_first_of_a_kind(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first pass a layer may make what it cannot make within a capture."""
    engine = _engine(monkeypatch)
    agree(engine[0])
    for graphs, kind in zip(engine, ("Breakable", "Full"), strict=True):
        graphs.backend = _backend_of(wheel, kind, monkeypatch)
        assert _captured(graphs) == {64: [61, 61, 61], 32: [4, 61], 16: [4, 61]}


@pytest.mark.parametrize("changes", [
    {"known": False}, {"left_out": Part.PASSES}, {"left_out": Part.DENSE},
    {"enable_torch_compile": True}, {"enable_symm_mem": True}, {"is_draft_worker": True},
    {"model": {"layers_to_capture": [2, 30, 58]}},
])  # fmt: skip
def test_sglang_warms_its_graphs_up_where_few_layers_may_not_do(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    prefill, decode = _engine(monkeypatch, **changes)
    agree(prefill)
    for graphs in (prefill, decode):
        assert set(map(tuple, _captured(graphs).values())) == {(61, 61, 61)}


@pytest.mark.parametrize("changes", [
    {"width": 8}, {"dtype": "float8_e4m3fn"}, {"quant_method": _Other()}, {"scheme": _Other()},
])  # fmt: skip
def test_few_layers_do_only_for_layers_that_are_like_them(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """A checkpoint's last layers may be unquantized: their kernels would compile in a capture."""
    for place, warm_up in ((60, [61, 61, 61]), (3, [4, 61])):
        prefill, decode = _engine(monkeypatch)
        prefill.layer_model.layers[place] = _layer(**changes)
        agree(prefill)
        assert _captured(decode)[16] == warm_up


def test_a_rank_alone_does_not_run_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor when SGLang captures anew, and another rank does not agree any more."""
    prefill, decode = _engine(monkeypatch)
    agree(prefill)
    monkeypatch.setattr(Ranks, "agree", lambda ranks, topic, value: False)
    agree(prefill)
    assert _captured(decode)[16] == [61, 61, 61]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_graph_that_few_layers_do_not_do_for_is_sglangs_own_again(
    ranks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With several ranks it is not: the others would wait for it in the next graph. The log says
    then how the engine starts."""
    ended: list[Any] = []
    monkeypatch.setattr(module, "end_capture", ended.append)
    prefill, _ = _engine(monkeypatch)
    agree(prefill)
    prefill.model_runner.tp_group.world_size = ranks
    prefill.backend.fails = True
    if ranks == 1:
        assert _captured(prefill) == {
            64: [61, 61, 61], 32: [4, 61, 61, 61, 61], 16: [61, 61, 61],
        }  # fmt: skip
        assert ended == [prefill.backend]
    else:
        with pytest.raises(RuntimeError, match="made up"):
            _captured(prefill)
    assert ("warming graphs up by few layers failed" in caplog.text) is (ranks == 1)
    assert ("start with NSA_TUNE_DENSE_GRAPHS=0" in caplog.text) is (ranks == 2)


def test_without_a_backend_sglang_captures_as_it_would(caplog: pytest.LogCaptureFixture) -> None:
    graphs = SimpleNamespace(model_runner=SimpleNamespace())
    assert around_capture_decode(lambda graphs: "captured", graphs) == "captured"
    assert not caplog.text
