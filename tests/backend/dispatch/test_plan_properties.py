"""Any batch, table, limit and machine: a plan is always made, and never passes a limit.

`PLANS=1000000`, as in `make nightly`, makes as many of them; the default keeps the suite short.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa_tune import Batch, Dispatcher, Plan
from nsa_tune.backend.baselines import BASELINES
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS, points_for
from nsa_tune.backend.types.batch import Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import PROFILES
from nsa_tune.backend.types.records import Device, Measurement, Status
from nsa_tune.db.places import shipped
from nsa_tune.db.text_table import format_table, read_text

H100 = KNOWN["NVIDIA H100 80GB HBM3"]
PLANS = int(os.environ.get("PLANS", "4000"))
_ROOT = Path(__file__).parents[3]
_PLANS_EACH = 200
_EXPLAINED_EACH = 3
_PREFILL = ("prefill_path", "mha_kernel", "sparse_prefill")


@cache
def _rows(stem: str) -> tuple[Measurement, ...]:
    (path,) = (path for path in shipped() if path.stem == stem)
    return read_text(path).measurements


def _damaged(rows: tuple[Measurement, ...], random: Random) -> list[Measurement]:
    """A part of a table in which arms are missing, failed, wrong, or of other times."""
    kept = random.sample(rows, random.choice((0, 1, 5, 40, 150)))
    lost = {row.arm for row in rows if random.random() < 0.2}
    scale = {row.arm: 2 ** random.uniform(-3, 3) for row in kept}
    found = []
    for row in kept:
        if row.arm in lost or row.latency_us is None:
            continue
        fate = random.random()
        if fate < 0.05:
            status = random.choice((Status.FAILED, Status.WRONG))
            found.append(replace(row, status=status, latency_us=None, reason="made up"))
        else:
            time_us = row.latency_us * scale[row.arm] * 2 ** random.gauss(0, 0.1)
            found.append(replace(row, latency_us=time_us, low_us=time_us, high_us=time_us))
    return found


def _made_up(setting: Setting, random: Random) -> list[Measurement]:
    """Rows of arms that no shipped table may have: any of any point, of any times."""
    found = []
    arising = points_for(setting.profile, (), POINTS)
    for point in random.sample(arising, min(2, len(arising))):
        batches = [point.sample(setting, random) for _ in range(random.choice((2, 6, 20)))]
        for arm in point.arms:
            slope, least = random.choice((0.0, 0.1, 1.0)), random.choice((1.0, 10.0, 10.05))
            for batch in batches if random.random() < 0.7 else ():
                time_us = least + slope * batch.q_tokens
                found.append(
                    Measurement(
                        point.name, str(batch), arm.name, Status.OK, time_us, time_us, time_us, 5
                    )
                )
    return found


def _setting(random: Random) -> Setting:
    devices = [
        *KNOWN.values(),
        replace(H100, shared_memory_optin=random.choice((0, 49152, 232448)), memory=2**33),
        Device("unheard of", random.choice(("", "cpu", "sm80", "sm120", "future")), 8),
    ]
    libraries = {"sgl-flash-mla": "1.0.0", "sgl-deep-gemm": "0.1.5", "sglang-kernel": "0.4.4"}
    profile = random.choice(list(PROFILES.values()))
    return Setting(
        profile,
        random.choice([h for h in range(1, profile.heads + 1) if profile.heads % h == 0]),
        random.choice(list(KVLayout)),
        random.choice(devices),
        {name: version for name, version in libraries.items() if random.random() < 0.7},
        random.choice((1, 4096, 131072)),
    )


def _lengths(random: Random, topk: int) -> list[int]:
    count = random.choice((1, 1, 2, 3, 16))
    return [max(round(topk * 2 ** random.uniform(-11, 6)), 1) for _ in range(count)]


def _batch(random: Random, setting: Setting) -> Batch:
    """Any batch, around the limits more often than elsewhere."""
    # A model without an indexer attends to every token: its index_topk is beyond all lengths.
    topk, captured = min(setting.profile.index_topk, 2048), random.random() < 0.2
    news = [random.choice((1, topk, new)) for new in _lengths(random, topk)]
    prefixes = [random.choice((0, 1, max(topk - new, 0), topk, 3 * new)) for new in news]
    if random.random() < 0.6:
        batch = Batch.extend(prefixes, news, captured=captured)
        return batch.sums if random.random() < 0.5 else batch
    if random.random() < 0.2:
        return Batch.from_totals(
            mode=random.choice(list(Mode)), q_tokens=random.randint(1, 2**21),
            kv_tokens=2**31 - 1, max_kv=2**31 - 1, captured=captured,
        )  # fmt: skip
    next_n = random.choice((1, 1, 2, 3, 4, 8))
    contexts = [length + next_n for length in _lengths(random, topk)]
    make = random.choice((Batch.verify, Batch.draft_extend))
    return (
        Batch.decode(contexts, captured=captured)
        if next_n == 1
        else make(contexts, next_n, captured=captured)
    )


def _check(plan: Plan, dispatcher: Dispatcher) -> None:
    """No choice without an arm that every guard allows; none of another kind of pass."""
    batch, setting = plan.batch, dispatcher.setting
    for policy in dispatcher.policies.values():
        for answer in policy.point.questions:
            choice = getattr(plan, answer.name)
            if batch.mode not in policy.point.modes:
                assert choice is None
                continue
            arms = [policy.point.arm(name) for name in answer.choices.get(choice or "", ())]
            here = {candidate.name for candidate in policy.candidates}
            if any(arm.name in here for arm in arms):
                assert any(arm.allowed(batch, setting) is None for arm in arms)
            else:
                # What only the engine's baseline knows, or nothing.
                assert choice is None or choice == dispatcher.baseline.choose(
                    answer, batch, setting
                )
    if batch.captured or batch.max_kv > setting.profile.index_topk:
        sparse = dispatcher.policies.get("prefill")
        assert plan.prefill_path != "mha" or sparse is None or not sparse.candidates
    if batch.mode is not Mode.EXTEND:
        assert [getattr(plan, name) for name in _PREFILL] == [None] * 3


def _explained(plan: Plan, dispatcher: Dispatcher) -> None:
    """The reasons are of the plan's own choices."""
    for name, reason in plan.reasons.items():
        assert reason.text
        if name in dispatcher.questions(plan.batch.mode) and _has_own_plan(plan.batch):
            choice = dispatcher.decide(plan.batch, name)
            assert choice.choice == getattr(plan, name)
            assert (choice.verdict is Verdict.NONE) == (choice.choice is None)
            assert all(low <= high for low, high in reason.intervals_us.values())
    assert dispatcher.explain(plan.batch)


def _has_own_plan(batch: Batch) -> bool:
    """All but those of a captured size, which is decided for every context at once."""
    return not (batch.captured and batch.mode is not Mode.EXTEND)


@given(st.sampled_from([path.stem for path in shipped()]), st.integers(0, 2**32))
@settings(max_examples=max(PLANS // _PLANS_EACH, 1), suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_fails_or_passes_a_limit(stem: str, seed: int) -> None:
    random = Random(seed)
    setting = _setting(random)
    rows = [*_damaged(_rows(stem), random), *_made_up(setting, random)]
    points = points_for(setting.profile, (), POINTS)
    policies = [Policy.fit(point, setting, rows) for point in points]
    baseline = random.choice(list(BASELINES.values()))
    dispatcher = Dispatcher(setting, policies, source="made up", baseline=baseline)

    for i in range(_PLANS_EACH):
        batch = _batch(random, setting)
        plan = dispatcher.plan(batch)
        _check(plan, dispatcher)
        if _has_own_plan(batch):
            for name in dispatcher.questions(batch.mode):
                assert getattr(plan, name) == dispatcher.decide(batch, name).choice
        if i < _EXPLAINED_EACH:
            _explained(plan, dispatcher)


_SMALL = replace(
    read_text(shipped()[0]), measurements=_rows(shipped()[0].stem)[::25], source="a part"
)


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_corrupted_table_never_raises_out_of_a_plan(tmp_path: Path, data: st.DataObject) -> None:
    text = bytearray(format_table(_SMALL).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "t.tsv"
    path.write_bytes(text[: data.draw(st.integers(len(text) // 2, len(text)))])
    key = _SMALL.key

    dispatcher = Dispatcher.open(path, key.gpu, model=key.model, heads=key.heads, kv_dtype="bf16")

    random = Random(data.draw(st.integers(0, 99)))
    for _ in range(5):
        _check(dispatcher.plan(_batch(random, dispatcher.setting)), dispatcher)


@pytest.mark.parametrize("stem", [path.stem for path in shipped()])
def test_a_plan_a_chooser_and_a_reason_choose_alike(stem: str) -> None:
    (path,) = (path for path in shipped() if path.stem == stem)
    key, random = read_text(path).key, Random(11)
    dispatcher = Dispatcher.open(
        path, key.gpu, model=key.model, heads=key.heads,
        kv_dtype="bf16" if key.kv_layout == "bf16" else "fp8",
    )  # fmt: skip
    for point in points_for(dispatcher.setting.profile, (), POINTS):
        for _ in range(8):
            whole = point.sample(dispatcher.setting, random)
            for batch in (whole, whole.sums):
                plan, names = dispatcher.plan(batch), dispatcher.questions(batch.mode)
                answers = tuple(getattr(plan, name) for name in names)
                assert tuple(dispatcher.decide(batch, name).choice for name in names) == answers
                assert tuple(dispatcher.chooser(n, batch.mode)(batch) for n in names) == answers
                assert dispatcher.choosers(names, batch.mode)(batch) == answers


_ANOTHER_PROCESS = """
import hashlib
from random import Random
from nsa_tune import Dispatcher
from nsa_tune.backend.points import POINTS, points_for
found = hashlib.sha256()
for heads, kv_dtype in ((128, "fp8"), (16, "bf16")):
    by = Dispatcher.open(
        gpu="NVIDIA H100 80GB HBM3", model="deepseek-v3.2", heads=heads, kv_dtype=kv_dtype
    )
    random = Random(6)
    for _ in range(200):
        for point in POINTS.values():
            batch = point.sample(by.setting, random)
            found.update(f"{by.plan(batch)} {by.plan(batch.sums)}".encode())
    for size in (1, 8, 64):
        found.update(f"{by.captured(size, 2)} {by.explain(batch)}".encode())
print(found.hexdigest())
"""


def test_two_processes_plan_alike_whatever_their_hash_seeds() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _ANOTHER_PROCESS], check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(_ROOT)},
        ).stdout
        for seed in ("1", "777")
    }  # fmt: skip

    assert len(digests) == 1
    assert len(digests.pop()) == 65
