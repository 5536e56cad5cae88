"""Remaining regret, by leaving measured batches out of the fit."""

from __future__ import annotations

from dataclasses import replace
from math import log2
from statistics import fmean

import pytest

from nsa_tune import Batch
from nsa_tune.autotune.search.left_out import LeftOut, left_out
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import FeatureFunctions, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Measurement, Status
from nsa_tune.db.places import shipped
from nsa_tune.db.text_table import read_text
from tests.autotune.fake_point import runnable
from tests.autotune.search.recorded import (
    held_out_of,
    regrets,
    replay,
    same_arms,
    setting_of,
)

SETTING = Setting(profile_of("tiny"), 4, KVLayout.FP8_PACKED, Device("CPU", "cpu"))
FEATURES = FeatureFunctions(
    ("kv_tokens",), lambda batch: (batch.kv_tokens,), lambda batch: (log2(batch.kv_tokens),)
)
POINT = replace(runnable("fast", "slow", batches=40), features=lambda setting: FEATURES)


def row(tokens: int, arm: str, us: float) -> Measurement:
    batch = str(Batch.decode([tokens]))
    return Measurement(POINT.name, batch, arm, Status.OK, us, 0.99 * us, 1.01 * us, 8)


def rows(*, broken: int = 0) -> list[Measurement]:
    """Forty batches on which "fast" is faster by a fifth; on every `broken`-th "slow" is."""
    found = []
    for i, tokens in enumerate(range(1, 81, 2)):
        turned = broken and i % broken == 0
        found += [row(tokens, "fast", 150.0 if turned else 100.0), row(tokens, "slow", 120.0)]
    return found


def test_choices_that_hold_everywhere_lose_nothing_and_may_lose_a_little() -> None:
    (one,) = left_out([POINT], SETTING, rows()).values()

    assert (one.mean, one.batches) == (0.0, 40)
    assert 0 < one.most < 0.005


def test_what_no_model_foresees_is_counted() -> None:
    """Every fourth batch loses a quarter by the choice that the others suggest."""
    (one,) = left_out([POINT], SETTING, rows(broken=4)).values()

    assert one.mean == pytest.approx(0.25 / 4, rel=0.5)
    assert one.mean < one.most


def test_a_layer_s_share_of_the_pass_counts() -> None:
    """By the time of a layer alone "fast" would be right everywhere."""
    share = 40.0 * SETTING.sharing
    shared = [replace(one, pass_us=share) if one.arm == "fast" else one for one in rows()]
    (one,) = left_out([POINT], SETTING, shared).values()

    assert one.mean == 0
    (plain,) = left_out([POINT], SETTING, [replace(r, pass_us=None) for r in shared]).values()
    assert plain.mean == 0


def test_a_choice_that_was_not_timed_is_taken_for_slow() -> None:
    """On the last batches "fast" was left out, as clearly slower, beside a third arm."""
    point = replace(runnable("fast", "slow", "wrong"), features=lambda setting: FEATURES)
    found = [one for one in rows() if one.arm != "fast" or Batch.parse(one.batch).kv_tokens < 60]
    more = [row(tokens, "wrong", 130.0) for tokens in range(1, 81, 2)]
    (one,) = left_out([point], SETTING, [*found, *more]).values()

    assert one.mean > 0.01


def test_nothing_is_said_of_a_single_batch_or_of_single_arms() -> None:
    assert left_out([POINT], SETTING, rows()[:2]) == {}
    assert left_out([POINT], SETTING, [one for one in rows() if one.arm == "fast"]) == {}
    assert left_out([POINT], SETTING, []) == {}


def test_in_words() -> None:
    assert str(LeftOut(0.0005, 0.004, 30)) == "0.05% (at most 0.4%)"
    assert str(LeftOut(0.4, 0.9, 30)) == "unknown after 30 batches"
    assert str(LeftOut(0.0005, 0.004, 11)) == "unknown after 11 batches"


def test_arms_that_held_out_batches_were_not_timed_with_are_left_out_of_their_points() -> None:
    (table,) = (
        read_text(path) for path in shipped() if path.stem == "h100-80gb-hbm3_deepseek-v3.2_h16_fp8"
    )
    ours = [row(9, "fast", 1.0), row(9, "slow", 2.0), row(9, "new", 0.5)]
    other = replace(row(9, "new", 0.5), point="another")
    judged = same_arms(
        replace(table, measurements=(*ours, other)), replace(table, measurements=tuple(ours[:2]))
    )

    assert judged.measurements == (*ours[:2], other)


@pytest.mark.parametrize("most_rows", [300, 0])
def test_the_truth_on_held_out_batches_is_within_what_a_partial_run_says(most_rows: int) -> None:
    path = next(path for path in shipped() if path.stem == "h200_deepseek-v3.2_h128_fp8")
    held_out = held_out_of(path.stem)
    table = same_arms(read_text(path), held_out)
    rows = replay(table, most_rows=most_rows)
    estimates = left_out(POINTS.values(), setting_of(table), rows)

    truth = {name: fmean(losses) for name, losses in regrets(rows, table, held_out).items()}
    assert truth.keys() <= estimates.keys()
    assert all(truth[name] <= estimates[name].most for name in truth)
    if not most_rows:
        # Most of it is mha_kernel's: without some batches its models choose badly.
        assert fmean(estimates[name].mean for name in truth) < 0.01
