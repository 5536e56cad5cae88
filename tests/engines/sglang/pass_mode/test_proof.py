"""A start runs a few batches in each way, and leaves out those that compute something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nsa_tune.engines.sglang.pass_mode import made_up
from nsa_tune.engines.sglang.pass_mode import proof as module
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.proof import difference, prove, sentinels
from nsa_tune.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.engines.sglang.pass_mode.steering.steering import Steering
from nsa_tune.engines.sglang.prefill import PROVEN_KERNEL
from nsa_tune.engines.sglang.ranks import Ranks
from tests.engines.sglang.pass_mode.fakes import (
    TOPK,
    Alone,
    Dense,
    Hidden,
    Mode,
    Speculation,
    batch,
    runner,
)

SIZES, ROWS = (64, 512, 4096), (8, 64, 256)
DENSE, DECODE, EAGER = PassMode.DENSE_GRAPH, PassMode.DECODE_GRAPH, PassMode.EAGER
TABLE, ENGINE = PassMode.TABLE_KERNEL, PassMode.ENGINE

Noise = dict[PassMode, float]
"""By way: how far its logits are from SGLang's, as a share of their norm."""


class _Engine:
    """A made-up model: a pass returns logits that follow from all keys that a sequence has."""

    def __init__(self, noise: Noise | None = None, **changes: Any) -> None:
        self.noise = noise or {}
        self.fails: PassMode | None = None
        self.ran: list[tuple[PassMode, Any]] = []
        self.runner = runner(SIZES, ROWS, **changes)
        graphs = self.runner.prefill_cuda_graph_runner
        graphs.device = "cpu"
        graphs.capture_prepare = lambda size: (batch([0], [size]), "backend")
        self.runner.max_total_num_tokens = 80_000
        self.runner.model_config = SimpleNamespace(context_len=40_000, vocab_size=1000)
        self.runner.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.zeros(20, 40_100, dtype=torch.int32)
        )
        self.steering = Steering(
            self.runner, TOPK, cast("Ranks", Alone()), graphs=cast("Any", {DENSE: Dense(SIZES)}),
            decode=RowGraphs.of(self.runner),
        )  # fmt: skip
        # All ways compute the same here: which one was asked for is all that is seen.
        self.runner._forward_raw = self._forward
        self._pool = torch.zeros(80_000)
        self._calls = 0

    def _forward(self, forward_batch: Any, proxy: Any) -> Any:
        mode = self.steering.forced
        assert mode is not None and forward_batch.forward_mode is Mode.EXTEND
        self.ran.append((mode, forward_batch))
        if mode is self.fails:
            raise RuntimeError("made up: no such kernel")
        self._pool[forward_batch.out_cache_loc] = forward_batch.input_ids.float() + 1
        table = self.runner.req_to_token_pool.req_to_token
        requests, kv_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        keys = [
            self._pool[table[request, :kv_len].long()]
            for request, kv_len in zip(requests.tolist(), kv_lens.tolist(), strict=True)
        ]
        assert all(bool(of.all()) for of in keys), "a key that nobody has written"
        generator = torch.Generator().manual_seed(1)
        words = torch.randn(50, generator=generator)
        logits = torch.stack([words * of.sum().log() for of in keys])
        self._calls += 1
        noise = torch.randn(logits.shape, generator=generator.manual_seed(self._calls))
        scale = self.noise.get(mode, 0.0) * logits.norm() / noise.norm()
        output = SimpleNamespace(next_token_logits=logits + scale * noise, hidden_states=None)
        return SimpleNamespace(logits_output=output)

    def prove(self, ranks: Any = None) -> module.Proof:
        return prove(self.runner, self.steering, cast("Ranks", ranks or Proving()))


class Proving(Alone):
    """The one rank of an engine; or one of two, of which the other has its own opinion."""

    def __init__(self, *, others: Callable[[str], bool] = lambda topic: True) -> None:
        self._others = others
        self.topics: list[str] = []

    def together(self, what: str, call: Callable[[], Any]) -> Any:
        return call()

    def agree(self, topic: str, value: str | None) -> bool:
        self.topics.append(topic)
        return bool(value) and self._others(topic)


def test_ways_that_compute_the_same_are_right() -> None:
    engine = _Engine()
    proof = engine.prove()

    assert proof.wrong == {}
    assert set(proof.errors) == {TABLE, EAGER, DENSE, DECODE}
    assert max(proof.errors.values()) == 0
    assert engine.steering.forced is None
    assert not engine.runner.req_to_token_pool.req_to_token.any()


def test_each_way_runs_batches_with_and_without_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _Engine()
    vars(engine.runner.attn_backend).update(use_mha=False, dsa_prefill_impl="own")
    monkeypatch.setattr(module, "chosen", lambda *lens: "fa3" if any(lens[1][1:]) else "own")
    engine.prove()

    def of(mode: PassMode) -> list[tuple[tuple[int, ...], int]]:
        return [
            (tuple(ran.extend_prefix_lens_cpu), ran.extend_num_tokens)
            for way, ran in engine.ran if way is mode
        ]  # fmt: skip

    mixed = (TOPK + 517, 0, 1301, 2 * TOPK + 9)
    assert len(of(ENGINE)) == 6 + 8, "eight are chunks of prefixes"
    assert [size for _, size in of(DENSE)] == [37, 485, 3807]
    assert [prefix for prefix, _ in of(DECODE)] == [
        (0,), (0,) * 8, (700, 1301, 64), (TOPK + 1003,), mixed,
    ]  # fmt: skip
    assert [prefix for prefix, _ in of(TABLE)] == [(700, 1301, 64), mixed]


@pytest.mark.parametrize(
    ("eager", "decode", "right"),
    [
        # At least so far apart are ways that round otherwise.
        (0.0, 0.04, True), (0.0, 0.1, False), (0.0, math.nan, False),
        # Twice what SGLang's own passes without a graph differ by, and never more than half.
        (0.08, 0.1, True), (0.08, 0.3, False), (0.4, 0.45, True), (0.4, 0.6, False),
    ],
)  # fmt: skip
def test_a_way_may_be_as_far_away_as_sglangs_own_flags_are(
    eager: float, decode: float, *, right: bool
) -> None:
    proof = _Engine({EAGER: eager, DECODE: decode}).prove()

    assert (DECODE not in proof.wrong) == right
    assert right or "are allowed" in proof.wrong[DECODE]
    assert EAGER not in proof.wrong, "it is SGLang's own"


@pytest.mark.parametrize("behind_a_prefix", [0.04, 0.2, math.nan])
def test_dense_mla_that_is_expanded_behind_a_prefix_is_no_flag_of_sglangs(
    behind_a_prefix: float,
) -> None:
    engine = _Engine(attn_backend=SimpleNamespace())
    forward = engine.runner._forward_raw

    def noisy(forward_batch: Any, proxy: Any) -> Any:
        prefix = any(forward_batch.extend_prefix_lens_cpu)
        engine.noise[EAGER] = behind_a_prefix if prefix else 0.01
        return forward(forward_batch, proxy)

    engine.runner._forward_raw = noisy
    proof = engine.prove()

    assert proof.bound == pytest.approx(0.05)
    assert set(proof.wrong) == (set() if behind_a_prefix == 0.04 else {EAGER})


def test_a_kernel_is_compared_in_sglangs_own_way_and_may_be_wrong_alone() -> None:
    engine, wrong = _Engine(), "triton_sparse_mla_union4"
    backend, forward = engine.runner.attn_backend, engine.runner._forward_raw
    answers = SimpleNamespace(impls=frozenset({"fa3", "triton_sparse_mla", wrong}))
    backend._nsa_tune_prefill = SimpleNamespace(answers=answers)
    seen = set()

    def noisy(forward_batch: Any, proxy: Any) -> Any:
        kernel, _, union = vars(backend).get(PROVEN_KERNEL, "fa3").partition("_union")
        backend.dsa_prefill_impl, backend.dsa_triton_union = kernel, int(union or 0)
        if kernel != "fa3":
            seen.add(int(forward_batch.seq_lens.max()))
        engine.noise[TABLE] = 0.6 if union else 0.0
        return forward(forward_batch, proxy)

    engine.runner._forward_raw = noisy
    proof = engine.prove()

    assert set(proof.wrong) == {wrong}
    assert proof.errors["triton_sparse_mla"] == 0
    assert PROVEN_KERNEL not in vars(backend)
    assert min(seen) > TOPK, "below it SGLang may take MHA, which would say nothing"
    engine.runner.max_total_num_tokens = 1500
    assert engine.prove().wrong.keys() == {"triton_sparse_mla", wrong}


def test_a_kernel_that_did_not_run_was_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    engine, kernel = _Engine(), "triton_sparse_mla"
    answers = SimpleNamespace(impls=frozenset({"fa3", kernel}))
    backend = engine.runner.attn_backend
    backend.dsa_prefill_impl, backend._nsa_tune_prefill = "fa3", SimpleNamespace(answers=answers)

    assert engine.prove().wrong == {kernel: "it failed"}
    assert "another kernel has run" in caplog.text


def test_all_ranks_compare_the_same_kernels() -> None:
    """One whose table is off would else leave the others waiting in their passes."""

    class Second(Proving):
        def from_first(self, value: Any) -> Any:
            return ["triton_sparse_mla"] if type(value) is list else value

    engine = _Engine()
    engine.runner.attn_backend.dsa_prefill_impl = "fa3"
    assert engine.prove(Second()).wrong == {"triton_sparse_mla": "it failed"}


def test_sglang_itself_may_differ_from_run_to_run() -> None:
    assert _Engine({ENGINE: 0.1, DECODE: 0.1}).prove().wrong == {}


@pytest.mark.parametrize("fails", [DECODE, EAGER])
def test_a_way_that_fails_is_wrong_and_not_run_again(
    fails: PassMode, caplog: pytest.LogCaptureFixture
) -> None:
    engine = _Engine()
    engine.fails = fails

    assert engine.prove().wrong == {fails: "it failed"}
    assert sum(mode is fails for mode, _ in engine.ran) == 1
    assert "no such kernel" in caplog.text


def test_sglangs_own_way_that_fails_proves_nothing() -> None:
    engine = _Engine()
    engine.fails = ENGINE

    with pytest.raises(RuntimeError, match="no such kernel"):
        engine.prove()
    assert engine.steering.forced is None


def test_one_rank_that_finds_a_way_wrong_is_enough() -> None:
    ranks = Proving(others=lambda topic: "dense_graph" not in topic)
    proof = _Engine().prove(ranks)

    assert proof.wrong == {DENSE: "it is wrong on another rank"}
    # Each rank votes on the ways in the same order, or they would wait for each other.
    assert ranks.topics == [f"{mode} is right" for mode in (TABLE, EAGER, DENSE, DECODE)]


def test_another_rank_whose_own_passes_failed_ends_the_proof() -> None:
    class Silent(Proving):
        def together(self, what: str, call: Callable[[], Any]) -> Any:
            call()

    with pytest.raises(RuntimeError, match="another rank"):
        _Engine().prove(Silent())


def test_same_numerics_keeps_to_what_differs_as_little_as_sglang_from_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NSA_TUNE_SAME_NUMERICS", "1")
    assert _Engine({ENGINE: 0.02}).prove().bound > 0.01
    proof = _Engine({DENSE: 0.01, EAGER: 0.01}).prove()

    assert set(proof.wrong) == {DENSE, EAGER}
    assert proof.bound == 0


def test_hidden_states_are_compared_where_a_draft_layer_reads_them() -> None:
    rows = torch.eye(3)

    assert difference([rows, rows], [rows, rows]) == 0
    assert difference([rows, rows], [rows, -rows]) > 1
    assert difference([rows, rows], [rows]) == math.inf
    assert difference([rows], [rows[:2]]) == math.inf
    assert difference([], []) == math.inf


def test_one_wrong_row_of_many_shows() -> None:
    engine = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    other = engine.clone()
    other[3] = engine[4]

    assert difference([engine], [other]) == pytest.approx(0.5, abs=0.1)


def test_batches_that_there_is_no_room_for_are_left_out() -> None:
    engine = _Engine()
    assert len(list(sentinels(engine.runner))) == 6
    engine.runner.max_total_num_tokens = 1500
    assert [max(batch.kv_lens) for batch in sentinels(engine.runner)] == [37, 128]
    engine.runner.req_to_token_pool.req_to_token = torch.zeros(2, 40_100)
    assert [max(batch.kv_lens) for batch in sentinels(engine.runner)] == [37]
    engine.runner.model_config.context_len = 30
    assert list(sentinels(engine.runner)) == []


def test_without_an_indexer_a_long_prefix_is_compared_too() -> None:
    engine = _Engine()
    engine.runner.attn_backend = SimpleNamespace()

    assert [one.prefix_lens for one in sentinels(engine.runner)][-1] == (9001,)


def test_with_drafts_all_hidden_states_are_asked_for() -> None:
    made = _Engine(spec_algorithm=Speculation.NONE).runner
    made.spec_algorithm = Speculation.EAGLE

    assert made_up.prefill(made, [0], [37]).capture_hidden_mode is Hidden.FULL
