"""Weights beside the rows: an engine that finds current ones fits nothing; others are ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune._errors import StoreCorrupt
from nsa_tune.backend.costmodel.features import Features
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.costmodel.weights import fit_weights, fitted_of, stamp_of
from nsa_tune.backend.types.records import Table, Weights
from nsa_tune.db.exchange import import_text, write_text
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import read_text
from tests.backend.fake_point import FAKE, KEY, SETTING, Times, sharing_rows, table_of
from tests.backend.machine import SLOW_DENSE, TIMES, opened, set_up, written

_SHORT = Batch.extend([0], [64])
FEATURES = Features(FAKE, SETTING)


def _weights(table: Table) -> Weights:
    """What the machine of tests would keep: of its setting, as `opened` asks for it."""
    setting = replace(SETTING, libraries=dict(table.key.libraries))
    return fit_weights([Features(FAKE, setting)], table.measurements)


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A database with a fitted table, on the machine of tests."""
    set_up(monkeypatch, tmp_path)
    path = _add(tmp_path / "t.db", TIMES, "2025-01-01T00:00:00Z")
    _fit(path)
    return path


def _add(path: Path, times: Times, at: str) -> Path:
    text = written(path.with_suffix(".tsv"), table_of(times, measured_at=at))
    with Store.open(path) as store:
        import_text(store, text)
    text.unlink()
    return path


def _fit(path: Path) -> None:
    with Store.open(path) as store:
        table = store.table(KEY)
        assert store.set_weights(table, _weights(table))


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each policy that is fitted."""
    found: list[int] = []
    original = Policy.fit.__func__  # type: ignore[attr-defined]

    def fitting(*arguments: object) -> Policy:
        found.append(1)
        policy: Policy = original(*arguments)
        return policy

    monkeypatch.setattr(Policy, "fit", classmethod(fitting))
    return found


def _same(ours: Dispatcher, theirs: Dispatcher) -> None:
    random = Random(2)
    for _ in range(50):
        batch = FAKE.sample(SETTING, random)
        assert ours.plan(batch) == theirs.plan(batch)
        assert dict(ours.plan(batch).reasons) == dict(theirs.plan(batch).reasons)
    assert ours.table == theirs.table
    assert (ours.source, ours.match) == (theirs.source, theirs.match)


def test_a_fitted_database_is_opened_without_a_fit(
    database: Path, fits: list[int], tmp_path: Path
) -> None:
    from_weights = opened(database)
    assert fits == []

    unfitted = _add(tmp_path / "u.db", TIMES, "2025-01-01T00:00:00Z")
    fitted_now = opened(unfitted)
    assert fits == [1]
    batch = Batch.extend([700], [90])
    ours, theirs = (d.decide(batch, "prefill_path") for d in (from_weights, fitted_now))
    assert (ours.choice, ours.estimates) == (theirs.choice, theirs.estimates)


def test_a_fitted_text_table_is_opened_without_a_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fits: list[int]
) -> None:
    set_up(monkeypatch, tmp_path)
    path = written(tmp_path / "t.tsv", table_of(TIMES))
    unfitted = opened(path)
    assert fits == [1]

    table = read_text(path)
    write_text(table, path, _weights(table))

    _same(opened(path), unfitted)
    assert fits == [1]


def test_rows_that_came_later_are_fitted(database: Path, fits: list[int]) -> None:
    assert opened(database).plan(_SHORT).prefill_path == "mha"

    _add(database, SLOW_DENSE, "2025-02-01T00:00:00Z")

    assert opened(database).plan(_SHORT).prefill_path == "mla"
    assert fits == [1]
    _fit(database)
    assert opened(database).plan(_SHORT).prefill_path == "mla"
    assert fits == [1]


def test_a_changed_row_of_a_text_table_makes_its_weights_void(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fits: list[int]
) -> None:
    set_up(monkeypatch, tmp_path)
    path = written(tmp_path / "t.tsv", table_of(TIMES))
    table = read_text(path)
    write_text(table, path, _weights(table))
    last = path.read_text().rstrip("\n").rpartition("\n")[2]
    changed = last.replace("\tok\t", "\tok\t9", 1)

    path.write_text(path.read_text().replace(last, changed))

    opened(path)
    assert fits == [1]


def test_weights_of_rows_that_changed_meanwhile_are_not_kept(database: Path) -> None:
    with Store.open(database) as store:
        table = store.table(KEY)
        older = replace(table, measurements=table.measurements[1:])
        assert not store.set_weights(older, _weights(older))


def test_another_stamp_is_fitted_anew(database: Path, fits: list[int]) -> None:
    with Store.open(database) as store:
        table = store.table(KEY)
        store.set_weights(table, _weights(table)._replace(stamp="of another version"))

    opened(database)
    assert fits == [1]


def test_the_stamp_covers_what_a_fit_depends_on() -> None:
    point = FEATURES.point
    arm = replace(point.arms[0], features=("q_tokens",))
    others = [
        Features(replace(point, arms=(arm, *point.arms[1:])), SETTING),
        Features(replace(point, questions=point.questions[:1]), SETTING),
        Features(replace(point, regimes_alike=2), SETTING),
        Features(
            replace(point, formulas=lambda s: point.formulas(s)._replace(regime="0")), SETTING
        ),
    ]
    stamps = {stamp_of([one]) for one in (FEATURES, *others)}
    assert len(stamps) == 5


def test_the_stamp_covers_how_many_layers_share_a_pass() -> None:
    def stamp(layers: int) -> str:
        return stamp_of([Features(FAKE, replace(SETTING, layers=layers))])

    assert len({stamp(layers) for layers in (0, 1, 60)}) == 3
    assert stamp(0) == stamp(SETTING.profile.layers), "the whole model's"


@pytest.mark.parametrize(("layers", "faster"), [(1, "mla/wide"), (61, "mla/packed")])
def test_weights_are_of_times_with_a_layer_s_share_of_the_pass(layers: int, faster: str) -> None:
    rows, batch = sharing_rows(), Batch.extend([3000], [300])
    features = Features(FAKE, replace(SETTING, layers=layers))
    fitted = fitted_of(fit_weights([features], rows), features)

    assert fitted == Policy.fit(FAKE, features.setting, rows).fitted
    times = Policy(features, fitted, lambda: rows).survey(batch).latencies
    known = {name: time for name, time in times.items() if time is not None}
    assert min(known, key=known.__getitem__) == faster


def test_fewer_layers_than_the_weights_were_fitted_for_are_fitted_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fits: list[int]
) -> None:
    set_up(monkeypatch, tmp_path)
    table = replace(table_of(TIMES), measurements=tuple(sharing_rows()))
    path = tmp_path / "t.tsv"
    write_text(table, path, _weights(table))
    batch = Batch.extend([3000], [300])

    assert opened(path).plan(batch).sparse_prefill == "packed"
    assert opened(path, layers=61).plan(batch).sparse_prefill == "packed"
    assert fits == []
    assert opened(path, layers=1).plan(batch).sparse_prefill == "wide"
    assert fits == [1]


def test_what_is_read_is_what_was_written() -> None:
    table = table_of(TIMES)
    weights = fit_weights([FEATURES], table.measurements)

    assert fitted_of(weights, FEATURES) == Policy.fit(FAKE, SETTING, table.measurements).fitted


def _spoilt(change: object) -> Weights:
    weights = fit_weights([FEATURES], table_of(TIMES).measurements)
    plain = json.loads(weights.points["fake"])
    return weights._replace(points={"fake": json.dumps({**plain, **dict([change])})})  # type: ignore[list-item]


@pytest.mark.parametrize(
    "change",
    [
        ("models", {"mla/wide": {"0": [1.0, 2.0]}}),
        ("models", {"mla/wide": {"0": [1.0, float("nan"), 1.0]}}),
        ("models", {"mla/wide": {"0": [1.0, -2.0, 1.0]}}),
        ("models", {"mla/wide": {"0": [1.0, float("inf"), 1.0]}}),
        ("models", {"mla/wide": {"here": [1.0, 2.0, 1.0]}}),
        ("models", 7),
        ("failures", {"mla/wide": [None, {"0": [[[0, 0, 0], [None] * 4, "short"]]}]}),
        ("by_surfaces", None),
        ("by_surfaces", [*range(10_000)]),
        ("extent", [1]),
    ],
)
def test_weights_that_cannot_be_are_refused(change: object) -> None:
    with pytest.raises(StoreCorrupt, match="the weights of fake cannot be read"):
        fitted_of(_spoilt(change), FEATURES)


def test_a_stranger_s_weights_do_not_stop_the_table(database: Path, fits: list[int]) -> None:
    with Store.open(database) as store:
        table = store.table(KEY)
        current = _weights(table)
        store.set_weights(table, current._replace(points={"fake": '{"models": 7}'}))

    assert opened(database).plan(_SHORT).prefill_path == "mha"
    assert fits == [1]
