"""The adaptive schedule: coarse, then where arms are close, then its end; without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, log, log2
from random import Random
from statistics import fmean

import pytest

from nsa_tune import Batch
from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.search import adaptive
from nsa_tune.autotune.search.adaptive import Adaptive
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import FeatureFunctions, Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Measurement, Status
from nsa_tune.db.places import shipped
from nsa_tune.db.text_table import read_text
from tests.autotune.fake_point import runnable
from tests.autotune.search.recorded import (
    held_out_of,
    recorded_part,
    regrets,
    replay,
    same_arms,
    setting_of,
)

SETTING = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))
TABLE = next(path for path in shipped() if path.stem.startswith("h100") and "h128_fp8" in path.stem)
CROSSOVER = 300
FEATURES = FeatureFunctions(
    ("kv_tokens",), lambda batch: (batch.kv_tokens,), lambda batch: (log2(batch.kv_tokens),)
)


def _sample(setting: Setting, random: Random) -> Batch:
    return Batch.decode([round(exp(random.uniform(log(10), log(4000))))])


def point() -> Point:
    """Contexts of 1 to 4000 tokens; "fast" is faster below `CROSSOVER`, "slow" above."""
    return replace(
        runnable("fast", "slow"),
        grid=lambda setting: [Batch.decode([n]) for n in range(10, 4000, 10)],
        features=lambda setting: FEATURES,
        sample=_sample,
    )


def latency_us(arm: str, batch: Batch) -> float:
    return 100 + 2 * batch.kv_tokens if arm == "fast" else 400 + batch.kv_tokens


def measured(job: Job) -> list[Measurement]:
    rows = []
    for arm in job.arms:
        us = latency_us(arm.name, job.batch)
        row = Measurement(
            job.point.name, str(job.batch), arm.name, Status.OK, us, 0.995 * us, 1.005 * us, 8
        )
        rows.append(row)
    return rows


def sweep(
    schedule: Adaptive, answer: Callable[[Job], Sequence[Measurement]] = measured
) -> list[Job]:
    jobs = []
    while (job := schedule.next()) is not None:
        jobs.append(job)
        schedule.done(job, answer(job))
    return jobs


def lengths(jobs: Sequence[Job]) -> list[int]:
    return [job.batch.kv_tokens for job in jobs]


def test_it_measures_a_small_part_of_the_grid() -> None:
    schedule = Adaptive([point()], SETTING, ())
    jobs = sweep(schedule)

    assert len(jobs) < 0.2 * len(point().grid(SETTING))
    assert schedule.remaining() == 0
    assert schedule.next() is None


def test_coarse_batches_cover_the_whole_grid() -> None:
    first = lengths(sweep(Adaptive([point()], SETTING, ()))[:8])

    assert min(first) < 50
    assert max(first) > 3000
    assert len(set(first)) == 8


def test_coarse_batches_have_each_feature_as_often_as_a_model_needs() -> None:
    """FlashAttention-2 splits the keys of few batches, and what that costs is in these only."""
    prefill = POINTS["prefill"]
    setting = Setting(profile_of("deepseek-v3.2"), 16, KVLayout.FP8_PACKED, KNOWN["NVIDIA H200"])
    features = prefill.features(setting)
    schedule = Adaptive([prefill], setting, ())
    coarse = [job.batch for job in iter(schedule.next, None)]

    def having(batches: Sequence[Batch]) -> Counter[tuple[int, str]]:
        return Counter(
            (features.regime(batch), name)
            for batch in batches
            for name, value in features.by_name(batch).items()
            if value
        )

    wanted, found = having(prefill.grid(setting)), having(coarse)
    assert len(coarse) < 0.2 * len(prefill.grid(setting))
    assert wanted[0, "fa2_splits"] >= 3
    assert all(found[name] >= min(count, 3) for name, count in wanted.items())


def test_no_batch_is_asked_for_twice() -> None:
    jobs = sweep(Adaptive([point()], SETTING, ()))

    assert len({str(job.batch) for job in jobs}) == len(jobs)


def test_refinement_goes_where_two_arms_are_close() -> None:
    """Noise of some per cent leaves a doubt, and only near the crossover."""
    random = Random(0)

    def noisy(job: Job) -> list[Measurement]:
        rows = measured(job)
        factors = [1 + random.uniform(-0.1, 0.1) for _ in rows]
        return [
            replace(row, latency_us=row.latency_us * f)  # type: ignore[operator]
            for row, f in zip(rows, factors, strict=True)
        ]

    jobs = sweep(Adaptive([point()], SETTING, (), target_regret=0.002), noisy)
    later = lengths(jobs[31:])

    assert later, "the doubt was not looked into"
    assert all(CROSSOVER / 3 < length < CROSSOVER * 3 for length in later[:6])


def test_stored_rows_are_not_measured_again() -> None:
    known: list[Measurement] = []

    def remembered(job: Job) -> list[Measurement]:
        known.extend(measured(job))
        return measured(job)

    first = sweep(Adaptive([point()], SETTING, ()), remembered)
    again = sweep(Adaptive([point()], SETTING, known))

    assert not {str(job.batch) for job in first} & {str(job.batch) for job in again}
    assert len(again) < len(first)


@pytest.mark.parametrize("length", [500, 3900])
def test_a_missing_arm_of_a_stored_batch_is_measured(length: int) -> None:
    """A row may be missing because the run was killed."""
    (slow,) = (arm for arm in point().arms if arm.name == "slow")
    row = measured(Job(point(), Batch.decode([length]), (slow,)))

    jobs = sweep(Adaptive([point()], SETTING, row))

    found = [job.arms for job in jobs if job.batch == Batch.decode([length])]
    assert [[arm.name for arm in arms] for arms in found] == [["fast"]]


def test_batches_of_a_trace_are_measured() -> None:
    trace = [(Batch.decode([301]), 50.0), (Batch.decode([303, 307]), 1.0)]
    words = {str(batch) for batch, _ in trace}

    plain = sweep(Adaptive([point()], SETTING, ()))
    traced = sweep(Adaptive([point()], SETTING, (), trace=trace))

    assert not words & {str(job.batch) for job in plain}
    assert words & {str(job.batch) for job in traced}


def test_batches_of_a_trace_that_are_another_point_s_are_ignored() -> None:
    trace = [(Batch.extend([0], [301]), 50.0)]

    jobs = sweep(Adaptive([point()], SETTING, (), trace=trace))

    assert {job.batch.mode for job in jobs} == {Batch.decode([1]).mode}


def test_it_ends_although_an_arm_always_fails() -> None:
    def half(job: Job) -> list[Measurement]:
        return [
            row if row.arm == "fast" else replace(row, status=Status.FAILED, latency_us=None)
            for row in measured(job)
        ]

    assert len(sweep(Adaptive([point()], SETTING, ()), half)) < 100


def test_it_ends_although_an_arm_is_quarantined() -> None:
    jobs = sweep(
        Adaptive([point()], SETTING, ()),
        lambda job: [row for row in measured(job) if row.arm == "fast"],
    )

    assert len(jobs) < 100


def test_a_lower_target_takes_more_measurements() -> None:
    def odd(job: Job) -> list[Measurement]:
        """Every other batch is off by 30 %, which no surface can predict."""
        off = 1.3 if job.batch.kv_tokens % 20 else 1.0
        return [
            replace(row, latency_us=row.latency_us * off if row.arm == "fast" else row.latency_us)  # type: ignore[operator]
            for row in measured(job)
        ]

    loose = sweep(Adaptive([point()], SETTING, (), target_regret=0.05), odd)
    strict = sweep(Adaptive([point()], SETTING, (), target_regret=0.005), odd)

    assert len(loose) < len(strict)


@pytest.mark.parametrize("target", [0.02, 0.3, 1.0])
def test_a_higher_target_still_covers_the_whole_grid(target: float) -> None:
    first = lengths(sweep(Adaptive([point()], SETTING, (), target_regret=target)))

    assert min(first) < 50
    assert max(first) > 3000


def test_a_small_grid_is_covered_although_that_is_more_than_a_fifth_of_it() -> None:
    small = replace(point(), grid=lambda setting: [Batch.decode([2**n]) for n in range(4, 12)])

    assert len(sweep(Adaptive([small], SETTING, ()))) >= 5


def test_no_point_is_refined_before_all_are_covered() -> None:
    """Noise would have the small grid, whose coarse batches are done first, refined for long."""
    random = Random(0)

    def noise(job: Job) -> list[Measurement]:
        return [replace(row, latency_us=random.uniform(1, 100)) for row in measured(job)]

    few = replace(
        point(), name="few", grid=lambda setting: [Batch.decode([30 * n]) for n in range(1, 40)]
    )
    alone = lengths(sweep(Adaptive([point()], SETTING, ()))[:30])
    jobs = sweep(Adaptive([few, point()], SETTING, ()), noise)

    assert [job.batch.kv_tokens for job in jobs if job.point.name != "few"][:30] == alone
    assert len([job for job in jobs if job.point.name == "few"]) > 10


def test_the_most_measurements_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Coarse batches take most of the allowed measurements, and noise keeps the regret high."""
    monkeypatch.setattr(adaptive, "_FEW", 0)
    random = Random(0)

    def noise(job: Job) -> list[Measurement]:
        return [replace(row, latency_us=random.uniform(1, 100)) for row in measured(job)]

    few = replace(point(), grid=lambda setting: [Batch.decode([30 * n]) for n in range(1, 130)])
    schedule = Adaptive([few], SETTING, ())
    jobs = sweep(schedule, noise)

    assert sum(len(job.arms) for job in jobs) <= 2 * 129 / 5
    assert schedule.remaining() == 0


def test_jobs_in_progress_do_not_delay_others() -> None:
    """Eight GPUs ask for a job before the first one is done."""
    schedule = Adaptive([point()], SETTING, ())
    waiting = [schedule.next() for _ in range(8)]
    assert all(waiting)
    for job in waiting:
        assert job is not None
        schedule.done(job, measured(job))

    assert len({str(job.batch) for job in [*waiting, *sweep(schedule)] if job}) >= 8


def test_jobs_without_rows_do_not_end_a_search() -> None:
    """The arms of a job may be quarantined by the time it is handed out."""
    random, jobs = Random(0), []

    def noise(job: Job) -> list[Measurement]:
        jobs.append(job)
        if 30 < len(jobs) <= 36:
            return []
        return [replace(row, latency_us=random.uniform(1, 100)) for row in measured(job)]

    sweep(Adaptive([point()], SETTING, ()), noise)

    assert len(jobs) > 36


def test_the_same_seed_asks_for_the_same_batches() -> None:
    table = read_text(TABLE)

    assert replay(table, seed=1) == replay(table, seed=1)


def test_a_replay_asks_only_for_what_was_recorded() -> None:
    table = read_text(TABLE)
    recorded = {
        (row.point, row.batch, row.arm) for row in table.measurements if row.point in POINTS
    }
    asked = [recorded_part(point, table) for point in POINTS.values()]

    assert {(p.name, arm.name) for p in asked for arm in p.arms} == {
        (point, arm) for point, _, arm in recorded
    }
    assert {(p.name, str(batch)) for p in asked for batch in p.grid(setting_of(table))} == {
        (point, batch) for point, batch, _ in recorded
    }


def test_points_take_turns() -> None:
    table = read_text(TABLE)
    points = [POINTS["prefill"], POINTS["indexer_layout"]]
    schedule = Adaptive(points, setting_of(table), ())
    names = [job.point.name for job in (schedule.next() for _ in range(6)) if job]

    assert names == ["prefill", "indexer_layout"] * 3


@pytest.mark.parametrize("gpu", ["h100-80gb-hbm3", "h200"])
def test_a_fifth_of_the_grid_answers_as_well_as_all_of_it(gpu: str) -> None:
    """On held-out batches, from a recorded grid."""
    stem = f"{gpu}_deepseek-v3.2_h128_fp8"
    held_out = held_out_of(stem, later=False)
    table = same_arms(read_text(TABLE.with_name(f"{stem}.tsv")), held_out)
    rows = replay(table)

    assert len(rows) <= 0.2 * len(table.measurements)
    swept, whole = regrets(rows, table, held_out), regrets(table.measurements, table, held_out)
    assert swept.keys() >= {"prefill_path", "sparse_prefill", "indexer_layout"}
    for question, losses in swept.items():
        assert fmean(losses) <= fmean(whole[question]) + 0.002
