"""The comparison of two measurements of one grid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.repeat import Changed, cells_of, changed, differences, main
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.exchange import write_text
from tests.reports.synthetic import real_table


def table(*rows: tuple[str, str, float, float]) -> Table:
    """Batch, arm, time and half its interval."""
    measured = [
        Measurement("decode", batch, arm, Status.OK, time, time - half, time + half, 8)
        for batch, arm, time, half in rows
    ]
    failed = Measurement("decode", "decode:n1:9", "a", Status.FAILED, reason="no")
    return replace(real_table(), measurements=(*measured, failed))


BEFORE = table(
    ("decode:n1:1", "a", 10.0, 0.01), ("decode:n1:1", "b", 20.0, 0.01),
    ("decode:n1:2", "a", 10.0, 0.01), ("decode:n1:2", "b", 10.5, 0.01),
    ("decode:n1:3", "a", 10.0, 0.3), ("decode:n1:3", "b", 10.1, 0.3),
)  # fmt: skip
AFTER = table(
    ("decode:n1:1", "a", 10.0, 0.01), ("decode:n1:1", "b", 20.0, 0.01),
    ("decode:n1:2", "a", 10.5, 0.01), ("decode:n1:2", "b", 10.5, 0.01),
    ("decode:n1:3", "a", 10.2, 0.3), ("decode:n1:3", "b", 10.1, 0.3),
)  # fmt: skip


def test_times_differ_by_what_the_second_is_off_the_first() -> None:
    off = differences(cells_of(BEFORE), cells_of(AFTER))

    assert off == pytest.approx([0, 0, 0, 0, 0.02, 0.05])


def test_a_batch_that_changed_winner_says_by_how_much_and_how_surely() -> None:
    assert [*changed(cells_of(BEFORE), cells_of(BEFORE))] == []
    (one,) = changed(cells_of(BEFORE), cells_of(AFTER))

    assert isinstance(one, Changed)
    assert (one.batch, one.winner_before, one.winner_after) == ("decode:n1:3", "a", "b")
    assert (one.lead_before, one.lead_after) == pytest.approx((0.01, 0.0099), rel=1e-2)
    assert (one.verdict_before, one.verdict_after) == ("unsure", "unsure")


def test_tables_of_two_keys_are_refused_by_the_field_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a.tsv", tmp_path / "b.tsv"]
    other = replace(BEFORE.key, heads=BEFORE.key.heads + 1)
    for path, one in zip(paths, (BEFORE, replace(BEFORE, key=other)), strict=True):
        write_text(one, path)
    monkeypatch.setattr("sys.argv", ["repeat", *map(str, paths)])

    with pytest.raises(SystemExit, match=f"differ: heads: {BEFORE.key.heads} and {other.heads}"):
        main()


def test_a_lead_beyond_its_intervals_is_a_win() -> None:
    swapped = table(("decode:n1:1", "a", 30.0, 0.01), ("decode:n1:1", "b", 20.0, 0.01))

    (one,) = changed(cells_of(BEFORE), cells_of(swapped))
    assert (one.verdict_before, one.verdict_after) == ("win", "win")
