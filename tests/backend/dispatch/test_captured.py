"""What a CUDA graph may hold: one choice a size, by the contexts that it will serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from nsa_tune import Batch, BatchError, Dispatcher
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.dispatch.table_planner import _unequal
from nsa_tune.backend.points import POINTS
from nsa_tune.db.places import shipped
from nsa_tune.db.text_table import read_text

H100 = "NVIDIA H100 80GB HBM3"
(_TABLE,) = (path for path in shipped() if path.stem == "h100-80gb-hbm3_deepseek-v3.2_h128_fp8")


def _opened() -> Dispatcher:
    return Dispatcher.open(gpu=H100, model="deepseek-v3.2", heads=128, kv_dtype="fp8")


def test_a_size_is_weighed_by_sequences_as_unequal_as_an_engine_s() -> None:
    """Whole waves of equal rows suit FlashMLA's kernel, unequal ones FlashAttention-3."""
    opened = Dispatcher.open(gpu="NVIDIA H200", model="deepseek-v3.2", heads=16, kv_dtype="bf16")

    assert opened.plan(Batch.decode([2000] * 192)).decode == "flashmla_sparse"
    assert opened.plan(Batch.decode(list(range(404, 1940, 8)))).decode == "fa3"
    assert opened.captured(192).decode == "fa3"
    other = Dispatcher.open(gpu="NVIDIA H200", model="deepseek-v3.2", heads=16, kv_dtype="bf16")
    assert other.captured(192, contexts={2000: 1}).decode == "flashmla_sparse"


@pytest.mark.parametrize(
    ("mode", "next_n"), [("decode", 1), ("target_verify", 3), ("draft_extend", 3)]
)
def test_unequal_sequences_go_from_a_quarter_of_a_context_to_all_of_it(
    mode: str, next_n: int
) -> None:
    equal = Batch.from_totals(
        mode=mode, batch_size=40, q_tokens=40 * next_n, kv_tokens=40 * 1000, max_kv=1000,
        next_n=next_n, captured=True,
    )  # fmt: skip
    made = _unequal(equal)

    assert (made.mode, made.q_tokens, made.next_n, made.captured) == (
        equal.mode, equal.q_tokens, next_n, True,
    )  # fmt: skip
    assert made.kv_lens is not None
    assert 250 <= min(made.kv_lens) < 300 and made.max_kv == 1000
    assert len(set(made.kv_lens)) == 40 and list(made.kv_lens) != sorted(made.kv_lens)


def test_no_sequence_is_shorter_than_its_new_tokens() -> None:
    short = Batch.from_totals(mode="target_verify", batch_size=9, q_tokens=36, kv_tokens=45,
                              max_kv=5, next_n=4)  # fmt: skip

    assert set(_unequal(short).kv_lens or ()) == {4, 5}


def test_a_decode_of_several_tokens_a_sequence_stays_equal() -> None:
    odd = Batch.from_totals(mode="decode", batch_size=9, q_tokens=18, kv_tokens=900, max_kv=100,
                            next_n=2)  # fmt: skip

    assert _unequal(odd) is odd


@pytest.mark.parametrize("next_n", [2, 4])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_over_growing_contexts_the_choice_of_a_graph_is_constant(size: int, next_n: int) -> None:
    opened = _opened()
    graph = opened.captured(size, next_n)
    eager = set()

    for context in range(512, 65536, 997):
        lens = [context] * size
        replay = opened.plan(Batch.verify(lens, next_n, captured=True))
        assert replay.indexer_layout == graph.indexer_layout
        assert replay.batch.captured
        eager.add(opened.plan(Batch.verify(lens, next_n)).indexer_layout)
    assert graph.indexer_layout in eager


def test_eager_plans_change_where_a_graph_s_do_not() -> None:
    opened = _opened()
    contexts = [2**k for k in range(9, 17)]

    eager = {opened.plan(Batch.verify([one], 2)).indexer_layout for one in contexts}
    held = {opened.plan(Batch.verify([one], 2, captured=True)).indexer_layout for one in contexts}

    assert len(eager) == 2
    assert len(held) == 1


def _favoured(contexts: Mapping[int, float]) -> str | None:
    return _opened().captured(1, 2, contexts=contexts).indexer_layout


def test_a_histogram_of_contexts_decides() -> None:
    opened = _opened()
    short, long = 600, 120_000
    by_length = {one: opened.plan(Batch.verify([one], 2)).indexer_layout for one in (short, long)}

    assert by_length[short] != by_length[long]
    assert _favoured({short: 1}) == by_length[short]
    assert _favoured({long: 1}) == by_length[long]
    assert _favoured({short: 1, long: 1e-6}) == by_length[short]
    assert _favoured({short: 1e-6, long: 1}) == by_length[long]


def test_a_size_is_decided_for_one_histogram() -> None:
    opened = _opened()
    graph = opened.captured(4, 2, contexts={4096: 3, 8192: 1})

    assert opened.captured(4, 2) is graph
    assert opened.captured(4, 2, contexts={4096: 3, 8192: 1, 9000: 0}) is graph
    with pytest.raises(BatchError, match="decided for other contexts already"):
        opened.captured(4, 2, contexts={4096: 1})


@pytest.mark.parametrize("contexts", [{}, {4096: 0}, {1: 1.0}, {4096: -1.0}, {4096.5: 1.0}])
def test_a_histogram_that_is_none_is_refused(contexts: Any) -> None:
    with pytest.raises(BatchError, match="histogram"):
        _opened().captured(4, 2, contexts=contexts)


@pytest.mark.parametrize("new", [1, 64, 1900])
@pytest.mark.parametrize("prefix", [0, 100])
def test_dense_is_never_planned_under_capture(prefix: int, new: int) -> None:
    opened = _opened()
    batch = Batch.extend([prefix], [new], captured=True)

    for asked in (batch, batch.sums):
        plan = opened.plan(asked)
        assert (plan.prefill_path, plan.mha_kernel) == ("mla", None)
        assert "dense MHA plans on the host" in plan.reasons["prefill_path"].guards["mha"]


def test_a_replay_that_passes_a_limit_says_so_and_names_nothing_else() -> None:
    opened = _opened()
    opened.captured(64, 4)
    # 256 rows of 2**25 keys in fp32 are 32 GiB.
    replay = opened.plan(Batch.verify([2**25] * 63 + [2**20], 4, captured=True))

    assert replay.indexer_layout is None
    reason = replay.reasons["indexer_layout"]
    assert reason.verdict is Verdict.NONE
    assert "must not run on this batch" in reason.text


def test_the_points_of_decoding_are_all_captured() -> None:
    opened = _opened()
    names = {
        answer.name
        for point in POINTS.values()
        for answer in point.questions
        if opened.captured(8, 2).batch.mode in point.modes
    }

    assert names
    assert set(opened.captured(8, 2).reasons) >= names


@pytest.mark.parametrize("next_n", [2, 4])
def test_over_the_measured_contexts_no_choice_beats_a_graph_s_by_more_than_a_tie(
    next_n: int,
) -> None:
    times: dict[str, dict[str, float]] = {}
    for row in read_text(_TABLE).measurements:
        if row.point == "indexer_layout" and row.latency_us is not None:
            times.setdefault(row.batch, {})[row.arm.partition("/")[0]] = row.latency_us
    sizes: dict[int, dict[int, dict[str, float]]] = {}
    for word, by_choice in times.items():
        batch = Batch.parse(word)
        if batch.next_n == next_n and batch.kv_tokens == batch.max_kv * batch.batch_size:
            sizes.setdefault(batch.batch_size, {})[batch.max_kv] = by_choice
    opened = _opened()

    for size, by_context in sizes.items():
        chosen = opened.captured(size, next_n, contexts=dict.fromkeys(by_context, 1))
        lost = {
            choice: sum(one[choice] / min(one.values()) - 1 for one in by_context.values())
            for choice in next(iter(by_context.values()))
        }
        assert chosen.indexer_layout is not None
        assert lost[chosen.indexer_layout] - min(lost.values()) < 0.012 * len(by_context)
