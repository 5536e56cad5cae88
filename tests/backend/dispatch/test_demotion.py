"""A table that failed `nsa-tune check` here answers last, where a dispatcher is told so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune import Batch, NoTunedData
from nsa_tune.backend.dispatch.table_planner import Match
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.types.records import Key
from nsa_tune.db.checks import Anchor, Check, failed_checks
from nsa_tune.db.exchange import import_text
from nsa_tune.db.store import Store
from tests.backend.fake_point import DEVICE, KEY, Times, table_of
from tests.backend.machine import SLOW_DENSE, TIMES, opened, set_up, written

_SHORT = Batch.extend([0], [64])
_ANCHORS = (Anchor("fake", "extend:0+1", {"a": 1.0}, {}, "mla/wide failed: gone"),)
_OLDER = replace(KEY, driver="0.9")
"""Another driver's: stale here, and in SLOW_DENSE's table with another answer."""


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A database with an exact table, on the machine of tests."""
    set_up(monkeypatch, tmp_path)
    return _add(tmp_path / "t.db", TIMES, KEY)


def _add(path: Path, times: Times, key: Key) -> Path:
    text = written(path.with_suffix(".tsv"), table_of(times, key))
    with Store.open(path) as store:
        import_text(store, text)
    text.unlink()
    return path


def _check(path: Path, *, holds: bool, at: str = "2026-01-01", drift: float = 0.0) -> None:
    anchors = () if drift or holds else _ANCHORS
    check = Check(KEY.digest, "1.0", KEY.libraries, at, holds, drift, anchors)
    with Store.open(path) as store:
        store.add_check(check)


def test_a_failed_table_answers_as_stale_and_names_the_check(database: Path) -> None:
    _check(database, holds=False)

    found = opened(database, demote_failed=True)

    assert found.match is Match.STALE
    assert found.plan(_SHORT).prefill_path == "mha"
    assert (
        "stale: failed nsa-tune check here at 2026-01-01 (extend:0+1: mla/wide failed: gone)"
        in found.source
    )


def test_times_that_moved_are_named(database: Path) -> None:
    _check(database, holds=False, drift=0.25)

    assert "(times moved by +25%)" in opened(database, demote_failed=True).source


def test_nothing_is_demoted_unless_that_is_asked_for(database: Path) -> None:
    _check(database, holds=False)

    assert opened(database, strict=True).match is Match.EXACT


def test_the_variable_asks_for_it(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(database, holds=False)
    monkeypatch.setenv("NSA_TUNE_DEMOTE_FAILED", "1")

    assert opened(database).match is Match.STALE


def test_strict_refuses_a_failed_table(database: Path) -> None:
    _check(database, holds=False)

    with pytest.raises(NoTunedData, match=r"t\.db is stale: failed nsa-tune check here at 2026"):
        opened(database, strict=True, demote_failed=True)


def test_another_table_of_the_database_comes_first_even_a_stale_one(database: Path) -> None:
    _add(database, SLOW_DENSE, _OLDER)
    assert opened(database).plan(_SHORT).prefill_path == "mha"
    _check(database, holds=False)

    for _ in range(2):  # compiled, and then as it was kept
        found = opened(database, demote_failed=True)
        assert found.plan(_SHORT).prefill_path == "mla"
        assert "driver: measured with 0.9" in found.source

    kept = opened(database)
    assert (kept.match, kept.plan(_SHORT).prefill_path) == (Match.EXACT, "mha")


def test_a_table_that_is_searched_later_comes_first(database: Path, tmp_path: Path) -> None:
    written(tmp_path / "shipped" / "other.tsv", table_of(SLOW_DENSE, _OLDER))
    _check(database, holds=False)

    found = opened(database, demote_failed=True)

    assert found.source.startswith("shipped:other")
    assert found.plan(_SHORT).prefill_path == "mla"


def test_a_failed_table_comes_before_another_gpu_s(
    database: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sibling = replace(DEVICE, name="Test GPU Mini")
    monkeypatch.setitem(detect.KNOWN, sibling.name, sibling)
    written(tmp_path / "shipped" / "mini.tsv", table_of(SLOW_DENSE, replace(KEY, gpu=sibling.name)))
    _check(database, holds=False)

    assert opened(database, demote_failed=True).match is Match.STALE


def test_an_earlier_opening_does_not_answer_after_the_check(database: Path) -> None:
    assert opened(database, demote_failed=True).match is Match.EXACT

    _check(database, holds=False)

    for _ in range(2):
        assert opened(database, demote_failed=True).match is Match.STALE


def test_a_check_kept_elsewhere_demotes_too(
    database: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert opened(database, demote_failed=True).match is Match.EXACT
    elsewhere = tmp_path / "checks.db"
    monkeypatch.setenv("NSA_TUNE_DB", str(elsewhere))

    _check(elsewhere, holds=False)

    assert opened(database, demote_failed=True).match is Match.STALE


def test_a_later_check_that_holds_lifts_it(database: Path) -> None:
    found = opened(database, demote_failed=True)
    _check(database, holds=False)
    assert found.reload() is None
    assert str(found.match) == "stale"

    _check(database, holds=True, at="2026-01-02")

    assert found.reload() is None
    assert str(found.match) == "exact"


def test_another_machine_s_check_says_nothing(database: Path) -> None:
    _check(database, holds=False)

    assert failed_checks([database], "1.0", KEY.libraries).keys() == {KEY.digest}
    assert failed_checks([database], "1.1", KEY.libraries) == {}
