"""The hook around V4's own switch, whose body is the wheel's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.costmodel.regret import MARGIN
from nsa_tune.engines.decision_log import DecisionLog, read_decisions
from nsa_tune.engines.extends import batch_of
from nsa_tune.engines.sglang.v4.prefill import V4Prefill, around_sparse_prefill
from nsa_tune.engines.v4_answers import Layers, V4Answers
from tests.engines.sglang.engine_v4 import ForwardBatch, V4Engine
from tests.engines.sglang.tables import v4_dispatcher
from tests.engines.sglang.wheels import Wheel

HOOKS = {"_use_sparse_prefill": around_sparse_prefill}
BOTH = Layers({4: 30, 128: 30}, 0)
ROUNDS = 700
PAGED = {"with_kvcache"}
QUESTIONS = {4: "v4_prefill_c4", 128: "v4_prefill_c128"}


@pytest.fixture
def engine(newest: Wheel, monkeypatch: pytest.MonkeyPatch) -> V4Engine:
    return V4Engine.of(newest, monkeypatch)


def _answers(
    table: Dispatcher | None = None, layers: Layers = BOTH, most_q: int = 2048
) -> V4Answers:
    return V4Answers(table or v4_dispatcher(), layers, most_q=most_q)


def _steered(
    engine: V4Engine, answers: V4Answers | None = None, log: DecisionLog | None = None
) -> Any:
    backend = engine.backend(engine.hooked(HOOKS))
    V4Prefill.attach(backend, answers or _answers(), log)
    return backend


def _passes(engine: V4Engine, random: Random, count: int) -> Iterator[tuple[Any, bool]]:
    """Random passes, and whether the plug-in may change anything; the state is set for each."""
    for _ in range(count):
        state = engine.state
        state.sparse = random.random() < 0.9
        state.context_parallel = random.random() < 0.05
        state.sm120 = random.random() < 0.02
        sequences = random.choice((1, 1, 2, 4, 16))
        longest = random.choice((100, 4000, 60_000, 500_000 // sequences))
        most = random.choice((2, 20, 100, 1000, 20_000 // sequences))
        prefixes = [random.randrange(longest) for _ in range(sequences)]
        news = [random.randrange(1, most) for _ in range(sequences)]
        mode = random.choices(
            ("EXTEND", "MIXED", "SPLIT_PREFILL", "DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"),
            (16, 1, 1, 1, 1, 1),
        )[0]
        batch = engine.batch(prefixes, news, mode)
        kind = random.random()
        if kind < 0.05:
            batch.extend_prefix_lens_cpu = torch.tensor(prefixes)
        elif kind < 0.1:
            batch.tbo_children = [batch]
        elif kind < 0.15:
            batch.tbo_parent_token_range = (0, 1)
        yield batch, mode == "EXTEND" and kind >= 0.15


@pytest.mark.parametrize("seed", range(2))
def test_without_the_plug_in_the_hook_changes_nothing(engine: V4Engine, seed: int) -> None:
    hooked, plain = engine.backend(engine.hooked(HOOKS)), engine.backend()
    tail = SimpleNamespace(late_layer_tail=object())
    heard = set()

    for i, (batch, _) in enumerate(_passes(engine, Random(seed), ROUNDS)):
        for backend in (hooked, plain):
            backend.forward_metadata = (
                tail if i % 10 == 0 else SimpleNamespace(late_layer_tail=None)
            )
        for rows in (0, sum(batch.extend_seq_lens_cpu), 11673, 11674):
            own = plain._use_sparse_prefill(batch, num_qo_tokens=rows)
            assert hooked._use_sparse_prefill(batch, num_qo_tokens=rows) is own
            heard.add(own)

    assert heard == {True, False}


@pytest.mark.parametrize("layers", [BOTH, Layers({4: 20, 128: 20}, 3), Layers({128: 7}, 0)])
@pytest.mark.parametrize("seed", range(2))
def test_with_the_plug_in_a_yes_may_become_a_no_and_never_the_other_way(
    engine: V4Engine, seed: int, layers: Layers
) -> None:
    table = v4_dispatcher()
    backend = _steered(engine, _answers(table, layers))
    plain = engine.backend()
    off = kept = differ = 0

    for batch, may_change in _passes(engine, Random(100 + seed), ROUNDS):
        own, answers = engine.asked(plain, batch), engine.asked(backend, batch)
        if own != {True} or not may_change:
            assert answers == own
            continue
        # One answer, whatever the number of rows it is asked with.
        (answer,) = answers
        plan = table.plan(Batch.extend(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu))
        chosen = {getattr(plan, QUESTIONS[ratio]) for ratio in layers.compressed}
        if chosen == {"sparse_fwd"} or plan.batch.q_tokens > 2048:
            assert answer is True
        elif chosen == {"with_kvcache"} and not layers.window:
            assert answer is False
        differ += len(chosen) > 1
        off, kept = off + (not answer), kept + answer

    assert off > 15
    assert kept > 100
    assert differ > 15 or len(layers.compressed) == 1


@pytest.mark.parametrize(("c4", "c128"), [(1, 0), (30, 30), (1, 30), (40, 2), (30, 1)])
def test_where_the_ratios_differ_the_layers_are_weighed(c4: int, c128: int) -> None:
    counts = {ratio: n for ratio, n in ((4, c4), (128, c128)) if n}
    table = v4_dispatcher()
    answers = _answers(table, Layers(counts, 0))
    seen = set()
    for prefix in range(20_000, 400_000, 20_000):
        for new in (1, 16, 48, 96):
            batch = Batch.extend([prefix], [new])
            times = {ratio: table.policies[QUESTIONS[ratio]].estimates(batch) for ratio in counts}
            sparse_us, paged_us = (
                sum(n * times[ratio][arm].latency_us for ratio, n in counts.items())
                for arm in ("sparse_fwd", "with_kvcache")
            )
            faster = paged_us * (1 + MARGIN) < sparse_us
            plan = table.plan(batch)
            chosen = {getattr(plan, QUESTIONS[ratio]) for ratio in counts}
            assert answers.paged(batch) == (faster if len(chosen) > 1 else chosen == PAGED)
            seen.add((faster, len(chosen)))
    assert {faster for faster, _ in seen} == {True, False}
    assert max(count for _, count in seen) == len(counts)


def test_the_same_batch_goes_either_way_by_what_the_model_is_made_of() -> None:
    batch = Batch.extend([80_000], [1])
    plan = v4_dispatcher().plan(batch)

    assert (plan.v4_prefill_c4, plan.v4_prefill_c128) == ("with_kvcache", "sparse_fwd")
    assert _answers(layers=Layers({4: 40, 128: 2}, 0)).paged(batch)
    assert not _answers(layers=Layers({4: 2, 128: 40}, 0)).paged(batch)


def test_layers_of_the_window_alone_count_against_the_paged_kernel() -> None:
    """It spares nothing there, for a window is as short behind any prefix."""
    table = v4_dispatcher()
    without, few, many = (
        _answers(table, Layers({4: 10, 128: 10}, window)) for window in (0, 2, 400)
    )
    at = [Batch.extend([prefix], [8]) for prefix in range(50_000, 500_000, 10_000)]
    counts = [sum(map(one.paged, at)) for one in (without, few, many)]

    assert counts[0] >= counts[1] > counts[2] == 0


def test_a_forbidden_paged_kernel_is_not_taken(engine: V4Engine) -> None:
    """However fast: more rows than FlashMLA's offsets reach."""
    answers = _answers(v4_dispatcher(paged_us=1.0), most_q=10**9)
    batch = Batch.extend([4], [2**20])
    refused = v4_dispatcher(paged_us=1.0).policies["v4_prefill_c4"].survey(batch).refused

    assert "with_kvcache" in refused
    assert answers.paged(Batch.extend([4], [2**10]))
    assert not answers.paged(batch)


def test_more_tokens_than_there_is_scratch_for_are_left_to_the_engine() -> None:
    answers = _answers(v4_dispatcher(paged_us=1.0), most_q=500)

    assert answers.paged(Batch.extend([1000, 3000], [499, 1]))
    assert not answers.paged(Batch.extend([1000, 3000], [500, 1]))


def test_a_batch_is_decided_once_and_another_anew(engine: V4Engine) -> None:
    answers = _answers(v4_dispatcher(paged_us=1.0))
    asked: list[Batch] = []
    real = answers.paged

    def counted(batch: Batch) -> bool:
        asked.append(batch)
        return real(batch)

    answers.paged = counted  # type: ignore[method-assign]
    backend = _steered(engine, answers)

    for _ in range(2):
        for new in (7, 9):
            batch = engine.batch([70_000], [new])
            assert engine.asked(backend, batch) == {False}
    assert [batch.q_tokens for batch in asked] == [7, 9, 7, 9]


def test_a_batch_that_has_gone_is_not_taken_for_a_new_one(engine: V4Engine) -> None:
    """Python gives a new object the address of an old one."""
    backend = _steered(engine)
    heard = set()
    for i in range(200):
        short = i % 2 == 0
        batch = engine.batch([100 if short else 400_000], [4])
        heard.add((short, backend._use_sparse_prefill(batch, num_qo_tokens=4)))
        del batch
        gc.collect(0)

    assert heard == {(True, True), (False, False)}


def test_the_pass_keeps_its_answer_when_its_lengths_are_padded_later(engine: V4Engine) -> None:
    backend = _steered(engine)
    batch = engine.batch([400_000], [4])
    first = engine.asked(backend, batch)
    batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = [0], [8000]

    assert engine.asked(backend, batch) == first == {False}


def test_a_fault_leaves_the_engines_answer_for_good_and_is_said_once(
    engine: V4Engine, caplog: pytest.LogCaptureFixture
) -> None:
    answers = _answers(v4_dispatcher(paged_us=1.0))
    backend = _steered(engine, answers)
    batch = engine.batch([70_000], [4])
    assert engine.asked(backend, batch) == {False}

    def broken(batch: Batch) -> bool:
        raise ZeroDivisionError("made up")

    answers.paged = broken  # type: ignore[method-assign]
    assert engine.asked(backend, batch) == {False}
    other = engine.batch([70_000], [5])
    assert engine.asked(backend, other) == {True}
    del answers.paged
    assert engine.asked(backend, engine.batch([70_000], [4])) == {True}
    assert engine.asked(backend, other) == {True}
    assert len([r for r in caplog.records if "steering a V4 prefill failed" in r.message]) == 1


def test_a_fault_of_the_log_comes_before_any_answer(engine: V4Engine) -> None:
    class Broken:
        def due(self) -> int:
            raise OSError("no such log")

    answers = _answers(v4_dispatcher(paged_us=1.0))
    backend = _steered(engine, answers, Broken())  # type: ignore[arg-type]

    assert engine.asked(backend, engine.batch([70_000], [4])) == {True}


def test_a_batch_of_another_shape_is_no_exception(engine: V4Engine) -> None:
    backend = _steered(engine)
    batch = ForwardBatch(forward_mode=engine.modes.EXTEND)

    assert backend._use_sparse_prefill(batch, num_qo_tokens=4) is True


def test_the_engines_own_exceptions_pass(engine: V4Engine) -> None:
    backend = _steered(engine)
    backend.forward_metadata = None

    with pytest.raises(AttributeError):
        backend._use_sparse_prefill(engine.batch([0], [4]), num_qo_tokens=4)


def test_decisions_are_logged_once_a_pass(engine: V4Engine, tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "d.jsonl", lines_a_second=1e9)
    backend = _steered(engine, _answers(v4_dispatcher(paged_us=1.0)), log)
    engine.asked(backend, engine.batch([0, 70_000, 0], [64, 7, 0]))
    engine.asked(backend, engine.batch([70_000], [4000]))
    engine.state.sparse = False
    engine.asked(backend, engine.batch([70_000], [7]))

    one, other = read_decisions(tmp_path / "d.jsonl")
    assert one.batch == Batch.extend([0, 70_000], [64, 7])
    assert one.own == dict.fromkeys(QUESTIONS.values(), "sparse_fwd") == other.taken
    assert one.taken == dict.fromkeys(QUESTIONS.values(), "with_kvcache")
    assert (one.model, one.heads, one.kv_layout) == ("deepseek-v4", 128, "v4_paged")


def test_padding_does_not_count() -> None:
    assert batch_of([5, 0, 0], [3, 0, 0]) == batch_of([5], [3]) == Batch.extend([5], [3])


@pytest.mark.parametrize(
    ("prefixes", "news"),
    [(None, [1]), ([0], None), (torch.tensor([0]), [1]), ([0], torch.tensor([1])), ([0], [0]),
     ([], []), ([1, 2], [3]), ((0,), (1,))],
)  # fmt: skip
def test_what_is_no_pair_of_lists_is_left_alone(prefixes: Any, news: Any) -> None:
    assert batch_of(prefixes, news) is None


def test_the_packages_own_table_turns_it_off_for_few_tokens() -> None:
    table = Dispatcher.open(
        gpu="NVIDIA H100 80GB HBM3", model="deepseek-v4", heads=128, kv_dtype="fp8"
    )
    answers = _answers(table)

    assert all(answers.paged(Batch.extend([prefix], [1])) for prefix in (0, 131_072, 262_144))
    assert not any(answers.paged(Batch.extend([0], [new])) for new in (1024, 4096))
    assert not any(answers.paged(Batch.extend([131_072], [new])) for new in (512, 2048))
