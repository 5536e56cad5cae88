"""The builders' own bodies on random steps: off is vLLM's answer, on is the table's."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.baselines import VLLM_0_33_0
from nsa_tune.engines.vllm.facts import Facts, facts_of
from nsa_tune.engines.vllm.prefill import ATTRIBUTE, Prefill, steer
from nsa_tune.engines.vllm.priced import priced
from tests.engines.vllm.engine import (
    LAYERS,
    Engine,
    Lens,
    builder_of,
    compared,
    config,
    fp8_kind,
    random_lens,
    stand_in_modules,
    step_of,
)
from tests.engines.wheels import Wheel

STEPS = 400
_GPU = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def engine(wheel: Wheel) -> Engine:
    return Engine(wheel)


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch)


def _stand_in(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    for name, module in stand_in_modules(**names).items():
        monkeypatch.setitem(sys.modules, name, module)


@cache
def _table(heads: int, kv_dtype: str) -> Dispatcher:
    return Dispatcher.open(
        gpu=_GPU, model="deepseek-v3.2", heads=heads, kv_dtype=kv_dtype, strict=True,
        baseline=VLLM_0_33_0, layers=61,
    )  # fmt: skip


def _steered(builder: Any, kv_dtype: str = "fp8", **changes: Any) -> tuple[Facts, Dispatcher]:
    facts = facts_of(builder, LAYERS)
    table = priced(_table(facts.heads, kv_dtype), facts.layers, facts.workspace_tokens)
    steer(builder, Prefill(builder, table, facts, changes.get("log")))
    return facts, table


def _steps(seed: int, decode: int = 1) -> list[Lens]:
    random = Random(seed)
    return [random_lens(random, decode=decode) for _ in range(STEPS)]


@pytest.mark.parametrize("heads", [16, 128])
def test_without_a_table_every_step_is_the_engines_own(engine: Engine, heads: int) -> None:
    given = config(heads=heads)
    plain = builder_of(engine.flashmla(hooked=False), given)
    hooked = builder_of(engine.flashmla(hooked=True), given)
    for lens in _steps(heads):
        own, ours = plain.build(0, step_of(lens)), hooked.build(0, step_of(lens))
        assert compared(own) == compared(ours), lens


def _asked(extends: Lens) -> Batch:
    """As the plug-in asks the table: by lengths where sums do not tell how many keys are read."""
    batch = Batch.extend(*zip(*extends, strict=True))
    exact = batch.max_kv <= 2048 or min(prefix for prefix, _ in extends) >= 2048
    return batch.sums if exact else batch


def _extends(lens: Lens, decode_tokens: int) -> Lens:
    first = next((i for i, (_, new) in enumerate(lens) if new > decode_tokens), len(lens))
    return lens[first:]


@pytest.mark.parametrize("heads", [16, 128])
def test_with_a_table_every_step_is_the_tables(engine: Engine, heads: int) -> None:
    """Whatever the table says is done, and what it leaves open is the engine's own."""
    given = config(heads=heads)
    plain = builder_of(engine.flashmla(hooked=False), given)
    builder = builder_of(engine.flashmla(hooked=True), given)
    facts, table = _steered(builder)
    leaving = priced(table, facts.layers, facts.workspace_tokens, leaving=True)
    changed = 0
    for lens in _steps(heads + 1):
        extends = _extends(lens, 1)
        own, ours = plain.build(0, step_of(lens)), builder.build(0, step_of(lens))
        if not extends:
            assert compared(own) == compared(ours), lens
            continue
        plan = table.plan(_asked(extends))
        paged = fp8_kind(own) == "mixed" or own.num_prefills == 0
        kernel = (leaving if paged else table).plan(_asked(extends)).sparse_prefill
        exact = max(map(sum, extends)) <= 2048
        own_mha = own.num_prefills > 0 and exact
        changed += compared(own) != compared(ours)
        if exact and plan.prefill_path == "mha":
            assert ours.prefill is not None and ours.prefill.use_dense_mha
            assert ours.num_prefills == len(extends)
            assert fp8_kind(ours) == fp8_kind(own)
        elif own_mha:
            assert compared(own) == compared(ours)
        elif kernel == "flashmla_sparse":
            # The indexer has run, and nobody attends without it.
            assert fp8_kind(ours) == "separate"
            assert ours.num_prefills == (len(extends) if heads == 16 else ours.num_prefills)
            assert not (ours.prefill and ours.prefill.use_dense_mha)
        else:
            paged = fp8_kind(ours) == "mixed" or ours.num_prefills == 0
            assert paged or sum(new for _, new in lens) > facts.most_tokens // 8
            assert not (ours.prefill and ours.prefill.use_dense_mha)
    assert changed > STEPS // 10


def test_the_decode_kernel_as_vllm_calls_it_is_the_decode_kernel(engine: Engine) -> None:
    given = config(heads=32)
    plain = builder_of(engine.flashmla(hooked=False), given)
    builder = builder_of(engine.flashmla(hooked=True), given)
    facts = facts_of(builder, LAYERS)
    table = priced(_fast_mixed_calls(), facts.layers, facts.workspace_tokens)
    steer(builder, Prefill(builder, table, facts, None))
    lens: Lens = [(30720, 160)]

    assert table.plan(_asked(lens)).sparse_prefill == "flashmla_kv_mixed"
    assert fp8_kind(plain.build(0, step_of(lens))) == "separate"
    assert fp8_kind(builder.build(0, step_of(lens))) == "mixed"


def _fast_mixed_calls() -> Dispatcher:
    """By a table that ships, but for calls with all queries in one row: they take half as long."""
    found = Dispatcher.open(
        gpu="NVIDIA H200", model="deepseek-v3.2", heads=32, kv_dtype="fp8",
        baseline=VLLM_0_33_0, layers=61,
    )  # fmt: skip
    assert found.table is not None
    rows = [
        replace(row, latency_us=row.latency_us / 2, low_us=None, high_us=None)
        if row.arm == "mla/flashmla_kv_mixed" and row.latency_us
        else row
        for row in found.table.measurements
    ]
    return Dispatcher(
        found.setting, found.policies.values(), source="made faster", baseline=VLLM_0_33_0,
        table=replace(found.table, measurements=tuple(rows)),
    )  # fmt: skip


@pytest.mark.parametrize("spec", [1, 4])
@pytest.mark.parametrize("heads", [16, 128])
def test_the_builder_is_as_it_was_after_every_step(
    engine: Engine, heads: int, spec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stand_in(monkeypatch, decode_tokens=spec)
    builder = builder_of(engine.flashmla(hooked=True), config(heads=heads))
    _steered(builder)
    before = {name: value for name, value in vars(builder).items() if name != ATTRIBUTE}
    for lens in _steps(spec, decode=spec)[:300]:
        builder.build(0, step_of(lens))
        after = {name: value for name, value in vars(builder).items() if name != ATTRIBUTE}
        assert all(after[name] is before[name] for name in before)


@pytest.mark.parametrize("spec", [1, 2, 4])
def test_a_step_of_decodes_alone_is_never_changed(
    engine: Engine, spec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a step a FULL graph may replay."""
    _stand_in(monkeypatch, decode_tokens=spec)
    plain = builder_of(engine.flashmla(hooked=False), config())
    builder = builder_of(engine.flashmla(hooked=True), config())
    _steered(builder)
    for lens in ([(9000, spec)] * 17, [(5, spec)], [(70000, 1)] * 3):
        own, ours = plain.build(0, step_of(lens)), builder.build(0, step_of(lens))
        assert compared(own) == compared(ours)


_CHANGED: Lens = [(30000, 2000)]
"""At 16 heads the engine takes the decode kernel, and the table does not."""


def test_capturing_and_drafting_are_left_alone(engine: Engine) -> None:
    plain = builder_of(engine.flashmla(hooked=False), config())
    builder = builder_of(engine.flashmla(hooked=True), config())
    _steered(builder)

    own = compared(plain.build(0, step_of(_CHANGED)))
    assert compared(builder.build(0, step_of(_CHANGED))) != own
    assert compared(builder.build_for_cudagraph_capture(step_of(_CHANGED))) == own
    assert compared(builder.build_for_drafting(step_of(_CHANGED), 0)) == own
    assert compared(builder.build(0, step_of(_CHANGED))) != own


@pytest.mark.parametrize(
    "changes",
    [{"seq_lens_cpu_upper_bound": None}, {"causal": False}],
    ids=["no lengths on the host", "no causal mask"],
)
def test_a_step_that_is_none_of_the_measured_is_left_alone(
    engine: Engine, changes: dict[str, Any]
) -> None:
    builder = builder_of(engine.flashmla(hooked=True), config())
    _steered(builder)
    step = step_of(_CHANGED, **changes)

    assert builder.__dict__[ATTRIBUTE].step(builder, step).unchanged


def test_a_step_whose_indexer_rows_are_shared_is_left_alone(engine: Engine) -> None:
    """There a rank that skips the indexer would let the others wait."""
    given = config(attention_config__indexer_tp_shard_min_rows=2000)
    plain = builder_of(engine.flashmla(hooked=False), given)
    builder = builder_of(engine.flashmla(hooked=True), given)
    _steered(builder)
    own = plain.build(0, step_of(_CHANGED))

    assert compared(builder.build(0, step_of(_CHANGED))) == compared(own)
    assert compared(builder.build(0, step_of([(30000, 1999)]))) != compared(own)


def test_mha_that_the_user_forbids_stays_forbidden(engine: Engine) -> None:
    given = config(attention_config__sparse_mla_force_mqa=True)
    builder = builder_of(engine.flashmla(hooked=True), given)
    _steered(builder)
    for lens in _steps(5)[:500]:
        metadata = builder.build(0, step_of(lens))
        assert not (metadata.prefill and metadata.prefill.use_dense_mha)


def test_a_bf16_pool_is_steered_to_mha_and_to_nothing_else(engine: Engine) -> None:
    given = config(heads=128, cache_dtype="auto")
    for kind in (engine.fa3, engine.flashmla):
        plain = builder_of(kind(hooked=False), given)
        builder = builder_of(kind(hooked=True), given)
        _, table = _steered(builder, "bf16")
        changed = 0
        for lens in _steps(7):
            own, ours = plain.build(0, step_of(lens)), builder.build(0, step_of(lens))
            if compared(own) == compared(ours):
                continue
            changed += 1
            extends = _extends(lens, 1)
            assert table.plan(_asked(extends)).prefill_path == "mha"
            assert ours.prefill.use_dense_mha
            assert ours.num_prefills == len(extends)
        assert changed > 20


@pytest.mark.parametrize("lens", [_CHANGED, [(9000, 9)]], ids=["changed", "the engine's own"])
def test_a_step_is_decided_once(
    engine: Engine, lens: Lens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashMLA's `build` calls that of the base class, and both are hooked."""
    builder = builder_of(engine.flashmla(hooked=True), config())
    _steered(builder)
    asked = []
    decide = Prefill.step

    def counted(prefill: Prefill, *rest: Any) -> Any:
        asked.append(decide(prefill, *rest))
        return asked[-1]

    monkeypatch.setattr(Prefill, "step", counted)
    for _ in range(2):
        builder.build(0, step_of(lens))

    assert [step.unchanged for step in asked] == [lens is not _CHANGED] * 2


def test_a_fault_gives_the_engine_back_its_builder(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    builder = builder_of(engine.flashmla(hooked=True), config())
    plain = builder_of(engine.flashmla(hooked=False), config())
    _steered(builder)
    builder.__dict__[ATTRIBUTE]._kernel_for_decodes = lambda batch: 1 / 0
    own = compared(plain.build(0, step_of(_CHANGED)))
    for _ in range(2):
        assert compared(builder.build(0, step_of(_CHANGED))) == own

    assert ATTRIBUTE not in builder.__dict__
    (record,) = caplog.records
    assert "steering a prefill failed, so vLLM decides by itself: ZeroDivision" in record.message


def test_a_fault_of_the_engine_under_other_values_is_the_plug_ins(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    builder = builder_of(engine.flashmla(hooked=True), config())
    plain = builder_of(engine.flashmla(hooked=False), config())
    _steered(builder)
    builder._build_fp8_separate_prefill_decode = None
    own = compared(plain.build(0, step_of(_CHANGED)))

    assert compared(builder.build(0, step_of(_CHANGED))) == own
    assert ATTRIBUTE not in builder.__dict__
    assert (builder.reorder_batch_threshold, builder.fp8_use_mixed_batch) == (128, True)
    assert "steering a prefill failed" in caplog.text
