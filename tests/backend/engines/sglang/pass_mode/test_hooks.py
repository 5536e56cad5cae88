"""The hooks around a made-up engine: what they change, and that errors leave it alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_tune.backend.engines.hooking import wrapped
from nsa_tune.backend.engines.sglang import switch
from nsa_tune.backend.engines.sglang.pass_mode import hooks as module
from nsa_tune.backend.engines.sglang.pass_mode.dense.graphs import Kind
from nsa_tune.backend.engines.sglang.pass_mode.hooks import (
    around_can_run,
    around_capture,
    around_forward,
    around_init_graphs,
    around_prepare_metadata,
    around_replay,
)
from nsa_tune.backend.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.backend.engines.sglang.pass_mode.ranks.ranks import Ranks
from nsa_tune.backend.engines.sglang.pass_mode.steering.steering import DENSE, Steering
from nsa_tune.backend.engines.sglang.pass_mode.times import remembered
from nsa_tune.backend.engines.sglang.pass_mode.times.pass_time import PassTime
from tests.backend.engines.sglang.pass_mode.fakes import (
    Dense,
    Mode,
    Speculation,
    batch,
    original,
)

KEY = {"gpu": "made up"}
_key = module._key
MEASURED = [
    PassTime(PassMode.ENGINE, 512, 20000, 100_000.0, selects=True),
    PassTime(PassMode.DECODE_GRAPH, 256, 20000, 30_000.0),
]


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


class _Group:
    rank_in_group = 0
    world_size = 1


class Runner:
    """SGLang's ModelRunner."""

    is_draft_worker = False
    spec_algorithm = Speculation.NONE
    tp_group = _Group()

    def __init__(self) -> None:
        self.passes: list[Any] = []
        self.attn_backend = SimpleNamespace(
            dsa_index_topk=2048, num_q_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64
        )
        self.model_config = SimpleNamespace(v_head_dim=128)
        self.token_to_kv_pool = SimpleNamespace()

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> str:
        self.prefill_cuda_graph_runner = SimpleNamespace(
            capture_num_tokens=[128, 512], backend=SimpleNamespace()
        )
        self.decode_cuda_graph_runner = SimpleNamespace(capture_bs=[8, 256])
        return "captured"

    def _forward_raw(self, forward_batch: Any, *rest: Any, **named: Any) -> Any:
        return original(self.passes)(self, forward_batch, *rest)


@pytest.fixture(autouse=True)
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hooks on the runner; nothing speaks against steering it, and passes take what is made up."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    hooked: dict[str, Callable[..., Any]] = {
        "init_cuda_graphs": around_init_graphs, "_forward_raw": around_forward,
    }  # fmt: skip
    for name, hook in hooked.items():
        monkeypatch.setattr(Runner, name, wrapped(getattr(Runner, name), hook))
    monkeypatch.setattr(module, "why_not", lambda runner: None)
    monkeypatch.setattr(module, "why_no_decode_graphs", lambda runner: None)
    monkeypatch.setattr(module, "_key", lambda runner, graphs: KEY)
    monkeypatch.setattr(module, "measure", lambda runner, steering: MEASURED)
    monkeypatch.setattr(module, "Watch", lambda clock: None)
    monkeypatch.setattr(module, "data_parallel", lambda runner: False)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    yield
    switch.resume()


def _started() -> Runner:
    runner = Runner()
    assert runner.init_cuda_graphs() == "captured"
    return runner


def _modes(runner: Runner, **named: Any) -> list[Mode]:
    """The modes of the passes by which a short turn runs."""
    runner.passes.clear()
    runner._forward_raw(batch([8192], [200]), None, **named)
    return [one.forward_mode for one in runner.passes]


def test_a_started_engine_is_steered() -> None:
    assert _modes(_started()) == [Mode.DECODE]


def test_an_engine_that_has_not_captured_is_not() -> None:
    assert _modes(Runner()) == [Mode.EXTEND]


def test_a_paused_plug_in_leaves_passes_to_the_engine() -> None:
    runner = _started()
    switch.pause()
    assert _modes(runner) == [Mode.EXTEND]

    switch.resume()
    assert _modes(runner) == [Mode.DECODE]


def test_a_pass_with_arguments_that_are_not_known_is_the_engines() -> None:
    assert _modes(_started(), split_forward_count=2) == [Mode.EXTEND]


def test_a_second_start_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    _started()
    assert len(list(remembered.remembered())) == 1

    def never(runner: Any, steering: Any) -> list[PassTime]:
        raise AssertionError("measured again")

    monkeypatch.setattr(module, "measure", never)
    assert _modes(_started()) == [Mode.DECODE]


def test_a_second_start_elsewhere_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _started()
    monkeypatch.setattr(module, "_key", lambda runner, graphs: {"gpu": "other"})
    _started()

    assert len(list(remembered.remembered())) == 2


def test_times_are_valid_for_engines_in_which_passes_take_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = SimpleNamespace(
        profile=SimpleNamespace(name="v3.2"), layers=61, heads=16, kv_dtype="bf16", impl="fa3"
    )
    monkeypatch.setattr(module, "facts_of", lambda *_: facts)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    runner = _started()
    runner.attn_backend.dsa_decode_impl = "fa3"
    runner.attn_backend.speculative_num_draft_tokens = None
    model = SimpleNamespace(hidden_size=7168, context_len=163_840)
    runner.model_config = model

    def key(slots: int = 300_000, **changes: Any) -> str:
        runner.max_total_num_tokens = slots  # type: ignore[attr-defined]
        arguments: dict[str, Any] = {"quantization": "fp8", "moe_runner_backend": "triton"}
        given = SimpleNamespace(tp_size=1, **(arguments | changes))
        runner.server_args = given  # type: ignore[attr-defined]
        return json.dumps(_key(runner, runner.prefill_cuda_graph_runner))

    # How much memory is free, and so how large the pool is, differs from start to start.
    assert key() == key(300_064)
    assert key() != key(60_000)
    others: list[dict[str, Any]] = [
        {"quantization": None},
        {"moe_runner_backend": "deep_gemm"},
        {"ep_size": 8},
    ]
    assert len({key(), *(key(**one) for one in others)}) == 4
    plain = key()
    runner.attn_backend.speculative_num_draft_tokens = 2
    assert key() != plain


def test_while_passes_are_measured_none_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measure(runner: Runner, steering: Steering[Any]) -> list[PassTime]:
        seen.extend(_modes(runner))
        steering.forced = PassMode.DECODE_GRAPH
        seen.extend(_modes(runner))
        steering.forced = None
        return MEASURED

    monkeypatch.setattr(module, "measure", measure)
    _started()

    assert seen == [Mode.EXTEND, Mode.DECODE]


def test_an_error_while_measuring_leaves_the_engine_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(runner: Any, steering: Any) -> list[PassTime]:
        raise RuntimeError("made up")

    monkeypatch.setattr(module, "measure", fails)
    runner = _started()

    assert _modes(runner) == [Mode.EXTEND]
    assert module._STEERING not in runner.__dict__
    assert "measuring how passes run failed" in caplog.text
    assert list(remembered.remembered()) == []


@pytest.mark.parametrize("name", ["load", "save"])
def test_times_that_cannot_be_kept_stop_no_rank(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the first rank reads and writes them: the others would go on without it."""

    def fails(*arguments: Any) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr(remembered, name, fails)

    assert _modes(_started()) == [Mode.DECODE]
    assert "times of passes failed" in caplog.text


def test_measuring_that_is_interrupted_leaves_no_steering(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stops a process is not held up, and leaves nothing half done."""

    def stops(runner: Any, steering: Any) -> list[PassTime]:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "measure", stops)
    runner = Runner()
    with pytest.raises(KeyboardInterrupt):
        runner.init_cuda_graphs()

    assert _modes(runner) == [Mode.EXTEND]


@pytest.mark.parametrize("name", ["why_not", "why_no_decode_graphs", "_key"])
def test_an_error_while_looking_at_the_engine_leaves_it_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise AttributeError("made up")

    monkeypatch.setattr(module, name, fails)

    assert _modes(_started()) == [Mode.EXTEND]


def test_an_engine_with_a_reason_against_it_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "why_not", lambda runner: "it is Tuesday")
    with caplog.at_level("INFO"):
        runner = _started()

    assert _modes(runner) == [Mode.EXTEND]
    assert "decides by itself how prefills run: it is Tuesday" in caplog.text


def test_an_engine_without_prefill_graphs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Any) -> None:
        self.prefill_cuda_graph_runner = None

    monkeypatch.setattr(Runner, "init_cuda_graphs", wrapped(none, around_init_graphs))
    runner = Runner()
    runner.init_cuda_graphs()

    assert _modes(runner) == [Mode.EXTEND]


def test_ranks_that_do_not_agree_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Ranks, "all_say", lambda self, question, answer: False)

    assert _modes(_started()) == [Mode.EXTEND]
    assert "its ranks do not agree" in caplog.text


def test_a_draft_worker_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some ranks may have one."""

    def never(self: Any, question: str, answer: str) -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(Ranks, "all_say", never)
    monkeypatch.setattr(Runner, "is_draft_worker", True)
    runner = _started()

    assert _modes(runner) == [Mode.EXTEND]
    module._capture_dense(SimpleNamespace(model_runner=runner))


def _replayed(backend: Any, key: _Key) -> Any:
    return around_replay(lambda backend, key, *rest, **named: key, backend, key, "batch", x=1)


def test_a_dense_pass_replays_the_dense_graph_of_its_size() -> None:
    backend = SimpleNamespace()
    assert _replayed(backend, _Key(512)) == _Key(512)

    backend._nsa_tune_dense = _Dense()
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

    dense = graphs.backend._nsa_tune_dense = _Dense()
    assert around_prepare_metadata(prepare, graphs, live, static, 512) is None
    assert dense.prepared == [(512, live)]
    assert len(own) == 1


def test_capturing_dense_graphs_that_fails_leaves_sglangs_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(graphs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "_capture_dense", fails)
    graphs = SimpleNamespace()

    assert around_capture(lambda graphs: "captured", graphs) == "captured"
    assert vars(graphs) == {}
    assert "capturing dense prefill graphs failed" in caplog.text


def test_dense_graphs_are_not_captured_where_something_speaks_against_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "why_no_dense_graphs", lambda graphs: "it is Tuesday")
    graphs = SimpleNamespace(model_runner=Runner())
    with caplog.at_level("INFO"):
        around_capture(lambda graphs: None, graphs)

    assert set(vars(graphs)) == {"model_runner"}
    assert "no dense prefill graphs: it is Tuesday" in caplog.text


@pytest.mark.parametrize(
    ("against_absorbed", "modes"),
    [
        (None, {PassMode.DENSE_GRAPH: Kind.MHA, PassMode.DENSE_MLA_GRAPH: Kind.MLA}),
        ("it is Tuesday", {PassMode.DENSE_GRAPH: Kind.MHA}),
    ],
)
def test_all_sizes_are_captured_the_largest_first(
    against_absorbed: str | None, modes: dict[PassMode, Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SGLang does it, so that the smaller ones take the memory of the larger."""
    captured: list[tuple[Kind, int]] = []

    class Captures(Dense):
        def __init__(self, graphs: Any, index_topk: int, kind: Kind) -> None:
            super().__init__([], kind)
            assert index_topk == 2048

        def capture(self, size: int) -> None:
            captured.append((self.kind, size))
            self.sizes = sorted([*self.sizes, size])

    monkeypatch.setattr(module, "why_no_absorbed_graphs", lambda runner: against_absorbed)
    monkeypatch.setattr(module, "DenseGraphs", Captures)
    monkeypatch.setattr(module, "why_no_dense_graphs", lambda graphs: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (2**30, 2**31))
    graphs = SimpleNamespace(model_runner=Runner(), capture_num_tokens=[4, 512, 64])
    around_capture(lambda graphs: None, graphs)

    assert captured == [(kind, size) for kind in modes.values() for size in (512, 64, 4)]
    assert {mode: dense.kind for mode, dense in graphs._nsa_tune_dense.items()} == modes


@pytest.mark.parametrize(("free_mib", "captured"), [(2048, True), (500, False)])
def test_no_dense_graphs_are_captured_where_memory_may_run_out(
    free_mib: int, captured: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Captures(Dense):
        def __init__(self, graphs: Any, index_topk: int, kind: Kind) -> None:
            super().__init__([], kind)

        def capture(self, size: int) -> None:
            self.sizes = sorted([*self.sizes, size])

    monkeypatch.setattr(module, "why_no_absorbed_graphs", lambda runner: "it is Tuesday")
    monkeypatch.setattr(module, "why_no_dense_graphs", lambda graphs: None)
    monkeypatch.setattr(module, "DenseGraphs", Captures)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free_mib * 2**20, 2**40))
    graphs = SimpleNamespace(model_runner=Runner(), capture_num_tokens=[4, 64])
    with caplog.at_level("INFO"):
        around_capture(lambda graphs: None, graphs)

    assert (DENSE in graphs.__dict__) == captured
    assert ("500 MiB of memory are free" in caplog.text) != captured


def test_an_eager_pass_is_no_graph_and_any_other_is_what_sglang_says() -> None:
    graphs = SimpleNamespace()
    for own in (True, False):
        assert around_can_run(lambda graphs, batch, own=own: own, graphs, "batch") is own

    graphs._nsa_tune_eager = True
    assert around_can_run(lambda graphs, batch: True, graphs, "batch") is False
