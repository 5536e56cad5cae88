"""Which tables are compared with which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa_tune._errors import NoTunedData, StoreMissing, UsageError
from nsa_tune.backend.types.records import Table
from nsa_tune.db.exchange import write_text
from nsa_tune.reports.analysis.selection import TableFilter
from nsa_tune.reports.compare.sides import pairs_of, side_of
from tests.records import stored
from tests.reports.synthetic import real_table

TABLE = real_table(points=("indexer_layout",))
OTHER = real_table(points=("indexer_layout",), heads=16)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return stored(tmp_path / "so@me.db", TABLE, OTHER)


def _changed(**changes: Any) -> Table:
    return replace(TABLE, key=replace(TABLE.key, **changes))


def test_a_database_gives_all_its_tables_or_the_one_of_a_digest(database: Path) -> None:
    assert len(side_of(str(database), TableFilter())) == 2
    (one,) = side_of(f"{database}@{OTHER.key.digest[:6]}", TableFilter())
    assert one.key == OTHER.key
    (one,) = side_of(str(database), TableFilter(heads=16))
    assert one.key == OTHER.key


def test_a_run_is_a_table_of_its_own(database: Path) -> None:
    (one,) = side_of(f"{database}@run:2", TableFilter())

    assert one.key == OTHER.key
    assert one.source.endswith("@run:2")


def test_a_text_table_is_a_side(tmp_path: Path) -> None:
    write_text(TABLE, tmp_path / "some.tsv")

    (one,) = side_of(str(tmp_path / "some.tsv"), TableFilter())

    assert one.key == TABLE.key


@pytest.mark.parametrize(
    ("chosen", "error"),
    [
        ("@run:x", UsageError),
        (f"@run:{10**20}", UsageError),
        ("@run:9", NoTunedData),
        ("@ffffffff", NoTunedData),
    ],
)
def test_what_is_not_there_is_a_sentence(
    database: Path, chosen: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        side_of(f"{database}{chosen}", TableFilter())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing):
        side_of(str(tmp_path / "none.db"), TableFilter())


def test_tables_of_one_setting_belong_together_whatever_their_versions() -> None:
    newer = _changed(driver="999.1")

    assert pairs_of([TABLE, OTHER], [newer], across_gpus=False) == [(TABLE, newer)]


def test_different_gpus_are_refused_unless_asked_for() -> None:
    h200 = _changed(gpu="NVIDIA H200")

    with pytest.raises(
        UsageError, match=r"'NVIDIA H100 80GB HBM3' and 'NVIDIA H200'; compare them with --across"
    ):
        pairs_of([TABLE], [h200], across_gpus=False)
    assert pairs_of([TABLE], [h200], across_gpus=True) == [(TABLE, h200)]


def test_different_settings_have_nothing_to_compare() -> None:
    with pytest.raises(NoTunedData, match=r"128 local heads.*16 local heads"):
        pairs_of([TABLE], [OTHER], across_gpus=True)


def test_two_timing_protocols_do_not_compare() -> None:
    with pytest.raises(UsageError, match="timing protocols"):
        pairs_of([TABLE], [_changed(protocol="wall-clock/1")], across_gpus=False)


def test_several_tables_of_one_setting_must_be_chosen_from() -> None:
    newer = _changed(driver="999.1")

    with pytest.raises(UsageError, match=f"{TABLE.key.digest}, {newer.key.digest}"):
        pairs_of([TABLE, newer], [TABLE], across_gpus=False)
