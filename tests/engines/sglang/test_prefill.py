"""The prefill hook around the engine's own decisions, release by release."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.decision_log import DecisionLog
from nsa_tune.engines.extends import sums_of
from nsa_tune.engines.sglang.costs import untaken, without_unsupported
from nsa_tune.engines.sglang.facts import facts_of
from nsa_tune.engines.sglang.prefill import (
    ENGINE_KERNEL,
    MADE_UP,
    PROVEN_KERNEL,
    Answers,
    Prefill,
    around_prefill,
    changed,
    kernels_to_prove,
    leave_out,
    start_looking,
)
from tests.engines.sglang.engine import Engine, model_runner
from tests.engines.sglang.tables import dispatcher
from tests.engines.sglang.wheels import Wheel

PACKED = frozenset({"flashmla_kv", "flashmla_sparse"})
TOPK = 2048
ROUNDS = 1500


@pytest.fixture
def engine(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine.of(wheel, monkeypatch)


def _steered(
    engine: Engine, table: Dispatcher, log: DecisionLog | None = None, **changes: Any
) -> tuple[Any, Answers]:
    """A backend under the hook, and its answers."""
    backend = engine.backend(engine.hooked({"set_dsa_prefill_impl": around_prefill}), **changes)
    facts = facts_of(backend, model_runner())
    impls = PACKED if facts.layout is KVLayout.FP8_PACKED else frozenset({"flashmla_sparse"})
    answers = Answers(table, facts, impls)
    Prefill.attach(backend, answers, log)
    return backend, answers


class Pass(NamedTuple):
    """One forward pass of the random sequence."""

    batch: Any
    """None where the engine decides for a decode graph."""
    plain: bool
    """Whether the plug-in may change anything."""


def _passes(engine: Engine, random: Random, count: int) -> Iterator[Pass]:
    """Random passes; the engine's state is set for each before it is yielded."""
    for _ in range(count):
        engine.state.in_breakable = random.random() < 0.15
        engine.state.in_piecewise = random.random() < 0.05
        if random.random() < 0.1:
            yield Pass(None, False)
            continue
        sequences = random.choice((1, 1, 2, 4, 16))
        # Together never so long that a prefix could not be read back.
        most = random.choice((100, 1000, 2000, 20_000, 1_600_000 // sequences))
        cold = random.random() < 0.3
        prefixes = [0 if cold else random.randrange(most) for _ in range(sequences)]
        news = [random.randrange(1, max(most // 4, 2)) for _ in range(sequences)]
        mode = random.choices(
            ("EXTEND", "MIXED", "DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"), (16, 1, 1, 1, 1)
        )[0]
        batch = engine.batch(prefixes, news, mode)
        kind = random.random()
        if kind < 0.05:
            batch.extend_prefix_lens_cpu = torch.tensor(prefixes)
        elif kind < 0.1:
            batch.tbo_children = [batch]
        elif kind < 0.15:
            batch.tbo_parent_token_range = (0, 1)
        yield Pass(batch, mode == "EXTEND" and kind >= 0.15)


def _setup(random: Random) -> dict[str, Any]:
    fp8 = random.random() < 0.7
    impls = ("flashmla_kv", "flashmla_sparse", "flashmla_auto") if fp8 else ("flashmla_sparse",)
    return {"fp8": fp8, "dsa_prefill_impl": random.choice(impls)}


@pytest.mark.parametrize("seed", range(3))
def test_without_the_plug_in_the_hook_changes_nothing(engine: Engine, seed: int) -> None:
    random = Random(seed)
    setup = _setup(random)
    hooked = engine.backend(engine.hooked({"set_dsa_prefill_impl": around_prefill}), **setup)
    plain = engine.backend(**setup)

    for one in _passes(engine, random, ROUNDS):
        for backend in (hooked, plain):
            backend.set_dsa_prefill_impl(forward_batch=one.batch)
        assert type(hooked.use_mha) is type(plain.use_mha)
        assert bool(hooked.use_mha) == bool(plain.use_mha)
        assert hooked.dsa_prefill_impl == plain.dsa_prefill_impl


@pytest.mark.parametrize("seed", range(4))
def test_with_the_plug_in_the_plan_is_followed_and_no_bound_is_left(
    engine: Engine, seed: int
) -> None:
    random = Random(100 + seed)
    setup = _setup(random)
    fp8 = setup["fp8"]
    table = dispatcher("fp8" if fp8 else "bf16")
    backend, _ = _steered(engine, table, **setup)
    plain = engine.backend(**setup)
    changed = turned_off = 0

    for one in _passes(engine, random, ROUNDS):
        plain.set_dsa_prefill_impl(one.batch)
        own_mha, own_impl = bool(plain.use_mha), plain.dsa_prefill_impl
        if one.batch is None:
            backend.set_dsa_prefill_impl(forward_batch=None)
            assert (bool(backend.use_mha), backend.dsa_prefill_impl) == (own_mha, own_impl)
            continue
        mha, impl, transform = engine.decided(backend, one.batch)
        if not one.plain:
            assert (mha, impl) == (own_mha, own_impl)
            continue
        plan = table.plan(_asked(one.batch))
        assert mha == (own_mha and plan.prefill_path == "mha")
        if not mha:
            # Where every kernel is forbidden the engine keeps its own.
            assert impl == (plan.sparse_prefill or own_impl)
            assert impl in (PACKED if fp8 else {"flashmla_sparse"})
        assert not (mha and (engine.state.in_breakable or engine.state.in_piecewise))
        ragged = fp8 and impl == "flashmla_sparse"
        assert transform == (engine.transforms.RAGGED if ragged else engine.transforms.PAGED)
        changed += impl != own_impl
        turned_off += own_mha and not mha

    assert turned_off > 20
    assert changed > 20 or not fp8


def _asked(batch: Any) -> Batch:
    """By its lengths where sums do not tell how many keys its queries select."""
    lengths = Batch.extend(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu)
    exact = lengths.max_kv <= TOPK or min(batch.extend_prefix_lens_cpu) >= TOPK
    return lengths.sums if exact else lengths


def test_queries_that_select_all_of_their_keys_are_counted_as_what_they_read(
    engine: Engine,
) -> None:
    """By its sums each of 8192 tokens reads 2048 keys, which one kernel is as good at."""
    table = Dispatcher.open(gpu="NVIDIA H200", model="deepseek-v3.2", heads=16, kv_dtype="bf16")
    backend = engine.backend(fp8=False)
    impls = frozenset({"fa3", "flashmla_sparse"})
    answers = Answers(table, facts_of(backend, model_runner()), impls)
    batch, by_sums = answers.asked([0], [8192]), sums_of([0], [8192])

    assert batch is not None and by_sums is not None
    assert answers.of(by_sums, engine_mha=False) == "flashmla_sparse"
    assert answers.of(batch, engine_mha=False) == "fa3"


def test_mha_is_never_turned_on(engine: Engine) -> None:
    """The user's own threshold, or a condition of the engine, has turned it off."""
    backend, _ = _steered(engine, dispatcher("fp8", mha_us=1.0))
    engine.state.dense_threshold = 0

    assert engine.decided(backend, engine.batch([0], [300]))[0] is False


def test_a_threshold_beyond_index_topk_is_the_users_choice(engine: Engine) -> None:
    """There dense attention is another function, which no table compares."""
    backend, _ = _steered(engine, dispatcher("fp8", mha_us=1e6))
    engine.state.dense_threshold = 8192

    assert engine.decided(backend, engine.batch([0], [TOPK + 1]))[0] is True
    assert engine.decided(backend, engine.batch([0], [TOPK]))[0] is False


def test_mha_turned_off_leaves_a_kernel_even_where_the_engine_has_named_none(
    engine: Engine,
) -> None:
    """With flashmla_auto the engine names a kernel for MLA only, and MHA was its choice."""
    backend, _ = _steered(engine, dispatcher("fp8", mha_us=1e6), dsa_prefill_impl="flashmla_auto")

    assert engine.decided(backend, engine.batch([0], [300]))[:2] in {
        (False, impl) for impl in PACKED
    }
    backend.set_dsa_prefill_impl(None)
    assert backend.dsa_prefill_impl in PACKED


def test_a_kernel_without_an_answer_leaves_mha_on(engine: Engine) -> None:
    backend = engine.backend(engine.hooked({"set_dsa_prefill_impl": around_prefill}))
    answers = Answers(
        dispatcher("fp8", mha_us=1e6), facts_of(backend, model_runner()), frozenset({"tilelang"})
    )
    Prefill.attach(backend, answers, None)

    assert engine.decided(backend, engine.batch([0], [300]))[:2] == (True, "flashmla_kv")


def test_a_prefix_that_would_not_fit_is_left_to_the_engine(engine: Engine) -> None:
    table = dispatcher("fp8", sparse_us=1.0)
    backend = engine.backend(engine.hooked({"set_dsa_prefill_impl": around_prefill}))
    facts = facts_of(backend, model_runner(chunked_prefill_size=256))
    Prefill.attach(backend, Answers(table, facts, PACKED), None)
    most = facts.scratch_bytes // (2 * 576)

    assert facts.scratch_bytes == 256 * 128 * 512 * 4
    assert engine.decided(backend, engine.batch([most - 64], [64]))[1] == "flashmla_sparse"
    assert engine.decided(backend, engine.batch([most - 63], [64]))[1] == "flashmla_kv"


@pytest.mark.parametrize("impl", ["flashmla_sparse", "flashmla_auto"])
def test_a_kernels_scratch_that_would_not_fit_is_left_to_the_engine(
    engine: Engine, impl: str
) -> None:
    """Without chunks a batch may be longer than what flashmla_kv has memory for."""
    table = dispatcher("fp8", sparse_us=1e6, mha_us=1e9)
    kind = engine.hooked({"set_dsa_prefill_impl": around_prefill})
    backend, plain = (engine.backend(one, dsa_prefill_impl=impl) for one in (kind, None))
    facts = facts_of(backend, model_runner(chunked_prefill_size=-1))
    Prefill.attach(backend, Answers(table, facts, PACKED), None)

    assert engine.decided(backend, engine.batch([0], [8192]))[1] == "flashmla_kv"
    batch = engine.batch([0], [8193])
    assert engine.decided(backend, batch)[1] == engine.decided(plain, batch)[1]


def test_the_engines_kernel_comes_back_after_each_pass(engine: Engine) -> None:
    backend, _ = _steered(engine, dispatcher("fp8", sparse_us=1.0))

    assert engine.decided(backend, engine.batch([4000], [64]))[1] == "flashmla_sparse"
    assert engine.decided(backend, engine.batch([4000], [64], "MIXED"))[1] == "flashmla_kv"
    assert engine.decided(backend, engine.batch([4000], [64]))[1] == "flashmla_sparse"
    backend.set_dsa_prefill_impl(forward_batch=None)
    assert backend.dsa_prefill_impl == "flashmla_kv"


def test_a_pass_that_keeps_sglangs_kernel_is_not_steered_and_the_next_one_is(
    engine: Engine,
) -> None:
    backend, _ = _steered(engine, dispatcher("fp8", sparse_us=1.0, mha_us=1e6))
    dense, sparse = engine.batch([0], [64]), engine.batch([4000], [64])
    steered = (False, "flashmla_sparse")
    assert [engine.decided(backend, one)[:2] for one in (dense, sparse)] == [steered, steered]
    assert changed(backend)

    setattr(backend, ENGINE_KERNEL, True)
    assert engine.decided(backend, dense)[:2] == (True, "flashmla_kv")
    assert engine.decided(backend, sparse)[:2] == (False, "flashmla_kv")
    assert not changed(backend)

    delattr(backend, ENGINE_KERNEL)
    assert [engine.decided(backend, one)[:2] for one in (dense, sparse)] == [steered, steered]


def test_nothing_is_changed_where_the_table_agrees_or_there_is_none(engine: Engine) -> None:
    backend, _ = _steered(engine, dispatcher("fp8", sparse_us=1e6))
    engine.decided(backend, engine.batch([4000], [64]))

    assert not changed(backend)
    assert not changed(engine.backend())


def test_a_fault_gives_the_engine_back_its_decision_and_is_said_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    backend, answers = _steered(engine, dispatcher("fp8", sparse_us=1.0))
    assert engine.decided(backend, engine.batch([4000], [64]))[1] == "flashmla_sparse"

    def broken(batch: Batch, **given: object) -> str | None:
        del batch, given
        raise ZeroDivisionError(f"a fault of {engine.backend_class}")

    answers.of = broken  # type: ignore[method-assign]
    for _ in range(3):
        assert engine.decided(backend, engine.batch([0], [64]))[:2] == (True, "flashmla_kv")
        assert engine.decided(backend, engine.batch([4000], [64]))[:2] == (False, "flashmla_kv")
    assert len([r for r in caplog.records if "steering a prefill failed" in r.message]) == 1


def test_a_fault_after_the_change_undoes_it(engine: Engine) -> None:
    class Broken:
        def due(self) -> int:
            raise OSError("no such log")

    backend, _ = _steered(engine, dispatcher("fp8", mha_us=1e6), Broken())  # type: ignore[arg-type]

    assert engine.decided(backend, engine.batch([0], [64]))[:2] == (True, "flashmla_kv")


def test_the_engines_own_exceptions_pass(engine: Engine) -> None:
    backend, _ = _steered(engine, dispatcher("fp8"))
    batch = engine.batch([0], [64])
    batch.seq_lens_cpu = None

    with pytest.raises(AssertionError):
        backend.set_dsa_prefill_impl(batch)
    assert engine.decided(backend, engine.batch([0], [64]))[1] in PACKED


def test_decisions_are_logged_with_what_the_engine_would_have_done(
    engine: Engine, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from nsa_tune.engines.decision_log import read_decisions

    caplog.set_level(logging.WARNING)
    log = DecisionLog(tmp_path / "d.jsonl")
    backend, _ = _steered(engine, dispatcher("fp8", mha_us=1e6), log)
    engine.decided(backend, engine.batch([0, 100, 0], [64, 7, 0]))

    (decision,) = read_decisions(tmp_path / "d.jsonl")
    assert decision.batch == Batch.extend([0, 100], [64, 7])
    assert decision.own == {"prefill_path": "mha", "sparse_prefill": "flashmla_kv"}
    assert decision.taken["prefill_path"] == "mla"
    assert (decision.model, decision.heads, decision.kv_layout) == (
        "deepseek-v3.2", 128, "fp8_packed",
    )  # fmt: skip
    assert not caplog.records


def test_what_is_left_to_the_engine_is_logged_and_what_no_user_sent_is_not(engine: Engine) -> None:
    seen: list[str] = []
    log: Any = SimpleNamespace(
        due=lambda: 1,
        write=lambda count, batch, own, taken, table: seen.append(f"{batch} {own == taken}"),
    )
    backend, answers = _steered(engine, dispatcher("fp8", sparse_us=1.0), log)
    answers.impls = frozenset()
    for new in (0, 64):
        engine.decided(backend, engine.batch([4000], [new]))
    setattr(backend, MADE_UP, True)
    engine.decided(backend, engine.batch([4000], [65]))

    assert seen == ["extend:4000+64 True"]


@pytest.mark.parametrize("sequences", [1, 2, 3, 64])
def test_sums_are_those_of_the_batch(sequences: int) -> None:
    random = Random(sequences)
    for _ in range(50):
        prefixes = [random.randrange(100_000) for _ in range(sequences)]
        news = [random.randrange(1, 10_000) for _ in range(sequences)]

        assert sums_of(prefixes, news) == Batch.extend(prefixes, news).sums


def test_padding_does_not_count() -> None:
    assert sums_of([5, 0, 0], [3, 0, 0]) == sums_of([5], [3])


@pytest.mark.parametrize(
    ("prefixes", "news"),
    [(None, [1]), ([0], None), (torch.tensor([0]), [1]), ([0], torch.tensor([1])), ([0], [0]),
     ([], []), ([1, 2], [3]), ((0,), (1,))],
)  # fmt: skip
def test_what_is_no_pair_of_lists_is_left_alone(prefixes: Any, news: Any) -> None:
    assert sums_of(prefixes, news) is None


GLM5 = {
    "fp8": False, "dsa_prefill_impl": "fa3", "num_q_heads": 8, "qk_nope_head_dim": 192,
    "dsa_triton_union": 0,
}  # fmt: skip


def _glm5(engine: Engine, wheel: Wheel, **changes: Any) -> tuple[Any, Answers]:
    """A backend of GLM-5, which the shipped table has 8 local heads of."""
    impls = wheel.release.prefill_impls[KVLayout.BF16]
    table = Dispatcher.open(gpu="NVIDIA H200", model="glm-5", heads=8, kv_dtype="bf16")
    backend = engine.backend(
        engine.hooked({"set_dsa_prefill_impl": around_prefill}), **GLM5 | changes
    )
    runner = model_runner()
    runner.model_config.hf_text_config.index_n_heads, runner.model_config.v_head_dim = 32, 256
    facts = facts_of(backend, runner)
    answers = Answers(without_unsupported(table, untaken(impls)), facts, impls)
    Prefill.attach(backend, answers, None)
    return backend, answers


def _kernel(engine: Engine, backend: Any, batch: Any) -> tuple[str, int]:
    return engine.decided(backend, batch)[1], backend.dsa_triton_union


def test_a_union_is_taken_where_the_table_has_it_fastest_and_given_back(
    engine: Engine, wheel: Wheel
) -> None:
    backend, _ = _glm5(engine, wheel)
    long, short = engine.batch([0], [8192]), engine.batch([8192], [32])
    union = ("triton_sparse_mla", 4) if wheel.version == "0.5.23" else ("fa3", 0)

    for _ in range(2):
        assert _kernel(engine, backend, long) == union
        assert _kernel(engine, backend, short) == ("fa3", 0)
        backend.set_dsa_prefill_impl(None)
        assert (backend.dsa_prefill_impl, backend.dsa_triton_union) == ("fa3", 0)


def test_behind_long_prefixes_a_union_is_taken_if_queries_were_seen_to_share(
    engine: Engine, wheel: Wheel
) -> None:
    _, answers = _glm5(engine, wheel)
    batch = answers.asked([30720], [8192])
    assert batch is not None
    taken = [answers.of(batch, engine_mha=False, kept=kept / 20) for kept in range(21)]
    union = "triton_sparse_mla_union4"

    assert taken[0] != union, "by chance they share few"
    assert (taken[-1] == union) == (union in answers.impls)
    assert taken == sorted(taken, key=lambda one: one == union)
    assert taken[8] != union, "an H200 takes 3980 us by unions then, and 3729 without"


def test_selections_are_looked_at_once_an_engine_serves(engine: Engine, wheel: Wheel) -> None:
    backend, answers = _glm5(engine, wheel)
    batch = engine.batch([30720], [8192])
    runner = SimpleNamespace(attn_backend=backend)
    same = torch.arange(TOPK, dtype=torch.int32).expand(8192, -1)
    for _ in range(10):
        before = _kernel(engine, backend, batch)
        for _ in range(20):
            backend.forward_extend(topk_indices=same)
    assert before[1] == 0, "what a start runs is made up"
    start_looking(runner)
    for _ in range(10):
        after = _kernel(engine, backend, batch)
        for _ in range(20):
            backend.forward_extend(topk_indices=same)

    assert after[1] == (4 if "triton_sparse_mla_union4" in answers.impls else 0)
    few, some = engine.batch([30720], [1024]), engine.batch([30720], [2048])
    assert _kernel(engine, backend, some) == after
    before = _kernel(engine, backend, few)
    if backend._nsa_tune_prefill.shared_keys is not None:
        assert backend._nsa_tune_prefill.shared_keys.share == 1
        backend._nsa_tune_prefill.shared_keys.share = 0.0
    assert _kernel(engine, backend, few) == before, "its host may have more to do by unions"
    start_looking(runner)
    backend._nsa_tune_prefill.answers = None
    engine.decided(backend, batch)
    assert "forward_extend" not in vars(backend), "it cannot be steered"


def test_what_another_plug_in_put_on_a_backend_stays(engine: Engine, wheel: Wheel) -> None:
    backend, _ = _glm5(engine, wheel)
    start_looking(SimpleNamespace(attn_backend=backend))
    theirs = backend.forward_extend = object()
    for _ in range(2):
        engine.decided(backend, engine.batch([30720], [8192]))
    assert backend.forward_extend is theirs


def test_a_kernel_is_compared_by_its_name_and_left_out_for_good(
    engine: Engine, wheel: Wheel
) -> None:
    backend, _ = _glm5(engine, wheel)
    batch = engine.batch([30720], [8192])
    kernels = kernels_to_prove(backend)
    assert len(kernels) == (2 if wheel.version == "0.5.23" else 0)
    for kernel, union in zip(kernels, (0, 4), strict=False):
        setattr(backend, PROVEN_KERNEL, kernel)
        assert _kernel(engine, backend, batch) == ("triton_sparse_mla", union)
        leave_out(backend, [kernel])
        assert _kernel(engine, backend, batch) == ("fa3", 0)
    assert kernels_to_prove(backend) == []


def test_an_engine_that_starts_with_a_union_may_be_taken_off_it(
    engine: Engine, wheel: Wheel
) -> None:
    own = {"dsa_prefill_impl": "triton_sparse_mla", "dsa_triton_union": 4}
    backend, _ = _glm5(engine, wheel, **own)

    assert _kernel(engine, backend, engine.batch([30720], [64]))[0] == "fa3"
    backend.set_dsa_prefill_impl(None)
    assert {name: getattr(backend, name) for name in own} == own
