"""What the points declare, in the setting of every shipped table, on random batches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from nsa_tune.backend.baselines import Baseline, Default
from nsa_tune.backend.costmodel.features import Features
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.compiled import Decisions, PointCode
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS, points_for
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.formula import FIELDS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Point, Question, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.db.reader import shipped
from nsa_tune.db.text_table import read_key

BATCHES = 300
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
        batch = point.sample(setting, random)
        batch = replace(batch, captured=i % 5 == 0)
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
def test_the_code_of_a_table_allows_what_every_guard_allows(path: Path) -> None:
    setting, forbidden, allowed = _setting(path), 0, 0
    neither = Baseline("made up", {"arms": Default(lambda setting: "neither", "here")})
    for point in points_for(setting.profile):
        arms = list(point.candidates(setting))
        question = Question("arms", {arm.name: (arm.name,) for arm in arms})
        # Nothing is measured, and the baseline takes none of them, so that the key says which
        # choices are allowed; None stands for no choice.
        policy = Policy.fit(replace(point, questions=(question,)), setting, ())
        decisions = Decisions([PointCode(policy, neither, [question])])
        key = decisions.function((), (), tuple, ["return found"], {"slow": None}, {})
        for batch in _drawn(point, setting):
            checked = [
                all(guard.check(batch, setting) is None for guard in arm.guards) for arm in arms
            ]
            (note,) = key(batch)
            assert ([False] * len(arms) if note is None else [*note[2:]]) == checked
            assert checked == [arm.allowed(batch, setting) is None for arm in arms]
            allowed += sum(checked)
            forbidden += len(arms) - sum(checked)
    assert allowed
    assert forbidden


@TABLES
def test_equal_sequences_have_the_features_of_their_sums(path: Path) -> None:
    setting = _setting(path)
    for point in points_for(setting.profile):
        features = Features(point, setting)
        for batch in map(_equal, _drawn(point, setting)):
            by_lengths, by_sums = features.by_name(batch), features.by_name(batch.sums)
            for name, value in by_lengths.items():
                if _is_exact(name, batch, setting):
                    assert by_sums[name] == pytest.approx(value, rel=1e-9), (name, batch)
                elif name not in _STEPS:
                    assert by_sums[name] >= value * (1 - 1e-9), (name, batch)
            assert features.regime(batch) == features.regime(batch.sums)


_STEPS = ("blocks_of_the_busiest", "parts_merged", "merges")
"""More pairs may be fewer parts: of these the sums tell no bound."""


def _equal(batch: Batch) -> Batch:
    """A batch of few sequences about as long as those of `batch`, all equal."""
    count = min(batch.batch_size, 32)
    new = max(batch.q_tokens // batch.batch_size, 1)
    prefix = batch.prefix_tokens // batch.batch_size
    if batch.mode is Mode.EXTEND:
        return Batch.extend([prefix] * count, [new] * count)
    return Batch.verify([prefix + new] * count, new)


def _is_exact(name: str, batch: Batch, setting: Setting) -> bool:
    """Whether sums tell as much of equal sequences as their lengths do; else a bound."""
    topk = setting.profile.index_topk
    assert batch.lens is not None
    if setting.profile.family == "v4":
        return name != "gathered_tokens"
    # A query attends to topk tokens at most: exact while that is so for all queries, or for none.
    prefix = batch.lens[0][0]
    of_pairs = name.startswith("attended_pairs") or name in (
        *_STEPS,
        "distinct_keys",
        "missed_pairs",
        "pairs_in_steps",
        "steps_in_turn",
    )
    return not of_pairs or batch.max_kv <= topk or prefix >= topk


@TABLES
def test_every_feature_is_a_positive_number_or_0_and_every_regime_is_declared(path: Path) -> None:
    setting = _setting(path)
    for point in points_for(setting.profile):
        features = Features(point, setting)
        regimes = features.formulas.regimes
        for batch in _drawn(point, setting):
            at = features.position(batch)
            assert min(at.features) >= 0
            assert type(at.regime) is int
            assert regimes is None or at.regime in regimes


@pytest.mark.parametrize("point", POINTS.values(), ids=list(POINTS))
def test_no_value_has_a_name_of_the_code_around_it(point: Point) -> None:
    setting = _setting(shipped()[0])
    profile = profile_of("deepseek-v4" if "v4" in point.families else "deepseek-v3.2")
    formulas = point.formulas(replace(setting, profile=profile))

    around = {
        "batch",
        "plan",
        "key",
        "held",
        "found",
        "make",
        "slow",
        "mode",
        "regime",
        "inf",
        "max",
        "min",
    }
    numbered = re.compile(r"(t|best|most|path|note)_[0-9_]+")
    for names in formulas.values:
        for name in names.split(", "):
            assert name not in {*around, *FIELDS, *formulas.functions}
            assert not numbered.fullmatch(name)
