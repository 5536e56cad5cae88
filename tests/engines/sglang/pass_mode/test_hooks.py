"""The hooks around made-up graphs: what they change, and that errors leave these alone."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nsa_tune.engines.sglang.pass_mode.hooks import (
    around_can_run,
    around_capture,
    around_prepare_metadata,
    around_replay,
)
from nsa_tune.engines.sglang.pass_mode.whole_pass import capture
from tests.engines.sglang.pass_mode.fakes import Dense

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class _Key:
    size: int
    variant_label: str | None = None


class _Dense(Dense):
    """Notes what it is asked to prepare."""

    def __init__(self) -> None:
        super().__init__([512])
        self.prepared: list[tuple[int, Any]] = []

    def key(self, size: int) -> _Key:
        return _Key(size, "dense")

    def prepare(self, size: int, forward_batch: Any) -> None:
        self.prepared.append((size, forward_batch))


def _replayed(backend: Any, key: _Key) -> Any:
    return around_replay(lambda backend, key, *rest, **named: key, backend, key, "batch", x=1)


def test_a_dense_pass_replays_the_dense_graph_of_its_size() -> None:
    backend = SimpleNamespace()
    assert _replayed(backend, _Key(512)) == _Key(512)

    backend._nsa_tune_graphs = _Dense()
    assert _replayed(backend, _Key(512)) == _Key(512, "dense")


def test_a_dense_pass_prepares_its_lengths_and_nothing_else() -> None:
    own: list[Any] = []

    def prepare(graphs: Any, *arguments: Any) -> str:
        own.append(arguments)
        return "SGLang's own"

    graphs = SimpleNamespace(backend=SimpleNamespace())
    live = SimpleNamespace(extend_seq_lens_cpu=[100, 50])
    static = SimpleNamespace(input_ids=[0] * 512)
    assert around_prepare_metadata(prepare, graphs, live, static, 512) == "SGLang's own"
    assert own == [(live, static, 512)]

    dense = graphs.backend._nsa_tune_graphs = _Dense()
    assert around_prepare_metadata(prepare, graphs, live, static, 512) is None
    assert dense.prepared == [(512, live)]
    assert len(own) == 1


def test_capturing_dense_graphs_that_fails_leaves_sglangs_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(graphs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(capture, "capture_all", fails)
    graphs = SimpleNamespace()

    assert around_capture(lambda graphs: "captured", graphs) == "captured"
    assert vars(graphs) == {}
    assert "capturing whole-pass prefill graphs failed" in caplog.text


def test_an_eager_pass_is_no_graph_and_any_other_is_what_sglang_says() -> None:
    graphs = SimpleNamespace()
    for own in (True, False):
        assert around_can_run(lambda graphs, batch, own=own: own, graphs, "batch") is own

    graphs._nsa_tune_eager = True
    assert around_can_run(lambda graphs, batch: True, graphs, "batch") is False
