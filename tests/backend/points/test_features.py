"""What the points compute and forbid, in the setting of every shipped table, on random batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path
from random import Random

import pytest

from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS, points_for
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.db.places import shipped
from nsa_tune.db.text_table import read_key

BATCHES = 120
MOST_TERMS = 7
TABLES = pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)


def _setting(path: Path) -> Setting:
    key = read_key(path)
    return Setting(
        profile_of(key.model), key.heads, KVLayout(key.kv_layout), KNOWN[key.gpu],
        dict(key.libraries),
    )  # fmt: skip


def _drawn(point: Point, setting: Setting) -> Iterator[Batch]:
    """What the point samples, some of it many times as large or captured, by lengths and sums."""
    random = Random(6)
    for i in range(BATCHES):
        batch = replace(point.sample(setting, random), captured=i % 5 == 0)
        if i % 3 == 0:
            batch = _times(batch, random.choice((7, 100, 2000)))
        yield batch if i % 2 else batch.sums


def _times(batch: Batch, many: int) -> Batch:
    """The same sequences `many` times, as far as int32 goes."""
    many = min(many, (2**31 - 1) // batch.kv_tokens)
    return Batch.from_totals(
        mode=batch.mode, batch_size=many * batch.batch_size, q_tokens=many * batch.q_tokens,
        kv_tokens=many * batch.kv_tokens, max_kv=batch.max_kv, pairs=many * batch.pairs,
        captured=batch.captured,
    )  # fmt: skip


@TABLES
def test_a_survey_refuses_what_the_first_guard_refuses(path: Path) -> None:
    setting, refusals = _setting(path), 0
    for point in points_for(setting.profile):
        policy = Policy.fit(point, setting, ())
        for batch in _drawn(point, setting):
            refused = policy.survey(batch).forbidden
            for arm in point.candidates(setting):
                reasons = (guard.check(batch, setting) for guard in arm.guards)
                first = next((reason for reason in reasons if reason is not None), None)
                assert refused.get(arm.name) == first == arm.allowed(batch, setting)
            refusals += len(refused)
    assert refusals


@TABLES
def test_every_feature_is_a_finite_number_that_is_not_negative(path: Path) -> None:
    setting = _setting(path)
    for point in points_for(setting.profile):
        features = point.features(setting)
        for batch in _drawn(point, setting):
            at = features.position(batch)
            assert len(at.features) == len(features.names)
            assert all(isfinite(term) and term >= 0 for term in at.features)
            assert all(map(isfinite, at.coordinates))
            assert type(at.regime) is int


@TABLES
def test_equal_sequences_have_the_regime_of_their_sums_and_features_that_these_bound(
    path: Path,
) -> None:
    """From sums alone rows of mixed lengths count as full, so that a sum tells too much."""
    setting = _setting(path)
    for point in points_for(setting.profile):
        features = point.features(setting)
        for batch in map(_equal, _drawn(point, setting)):
            by_lengths, by_sums = features.by_name(batch), features.by_name(batch.sums)
            for name, value in by_lengths.items():
                if not name.startswith("fa3_"):  # more pairs may be fewer parts
                    assert by_sums[name] >= value * (1 - 1e-9), (name, batch)
            assert features.regime(batch) == features.regime(batch.sums)


def _equal(batch: Batch) -> Batch:
    """A batch of few sequences about as long as those of `batch`, all equal."""
    count = min(batch.batch_size, 32)
    new = max(batch.q_tokens // batch.batch_size, 1)
    prefix = batch.prefix_tokens // batch.batch_size
    if batch.mode is Mode.EXTEND:
        return Batch.extend([prefix] * count, [new] * count)
    return Batch.verify([prefix + new] * count, new)


@TABLES
def test_more_sequences_are_not_less_work(path: Path) -> None:
    """The terms that a split or a wave may lower are those of schedules."""
    setting = _setting(path)
    for point in points_for(setting.profile):
        features = point.features(setting)
        for batch in map(_equal, _drawn(point, setting)):
            fewer, more = features.by_name(batch), features.by_name(_times(batch.sums, 2))
            for name in ("rows", "keys", "attended_pairs", "query_tiles", "tile_pairs", "scores"):
                assert more.get(name, 0) >= fewer.get(name, 0) * (1 - 1e-9), (name, batch)


@TABLES
def test_features_that_are_asked_for_are_those_of_all(path: Path) -> None:
    setting, random = _setting(path), Random(7)
    for point in points_for(setting.profile):
        features = point.features(setting)
        if features.some is None:
            continue
        for batch in _drawn(point, setting):
            wanted = frozenset(random.sample(features.names, random.choice((1, 3, 9))))
            some = dict(zip(features.names, features.some(wanted)(batch), strict=True))
            every = features.by_name(batch)
            assert {name: some[name] for name in wanted} == {name: every[name] for name in wanted}


@pytest.mark.parametrize("point", POINTS.values(), ids=list(POINTS))
def test_an_arm_has_few_terms_which_its_point_computes(point: Point) -> None:
    model = "deepseek-v4" if "v4" in point.families else "deepseek-v3.2"
    profile = profile_of(model)
    layouts = [profile.layout("fp8")] + [KVLayout.BF16] * (model == "deepseek-v3.2")
    names = {
        name
        for layout in layouts
        for name in point.features(Setting(profile, 64, layout, KNOWN["NVIDIA H200"])).names
    }  # fmt: skip
    for arm in point.arms:
        own = names if arm.features is None else set(arm.features)
        assert own <= names
        assert arm.reference or len(own) <= MOST_TERMS
