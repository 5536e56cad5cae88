"""Which tables a report takes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nsa_tune._errors import NoTunedData, StoreMissing
from nsa_tune.db import places
from nsa_tune.db.exchange import write_text
from nsa_tune.reports.analysis.selection import TableFilter, select_tables
from tests.records import stored
from tests.reports.synthetic import real_table


@pytest.fixture(autouse=True)
def no_shipped_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "shipped", list)
    monkeypatch.setenv("XDG_DATA_DIRS", "/nowhere")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return stored(
        tmp_path / "some.db",
        real_table(points=("indexer_layout",)),
        real_table(points=("indexer_layout",), heads=16),
        real_table(points=("indexer_layout",), model="glm-5", gpu="another"),
    )


def test_an_empty_filter_takes_everything(database: Path) -> None:
    assert len(select_tables(database, TableFilter())) == 3


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (TableFilter(heads=16), 1),
        (TableFilter(model="deepseek-v3.2"), 2),
        (TableFilter(gpu="another", model="glm-5"), 1),
        (TableFilter(kv_layout="fp8_packed"), 3),
    ],
)
def test_a_filter_picks_matching_tables(database: Path, wanted: TableFilter, count: int) -> None:
    assert len(select_tables(database, wanted)) == count


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (TableFilter(gpu="H200"), "gpu may be 'NVIDIA H100 80GB HBM3', 'another'"),
        (
            TableFilter(gpu="H200", heads=3),
            "gpu may be 'NVIDIA H100 80GB HBM3', 'another'; heads may be 16, 64, 128",
        ),
        (
            TableFilter(gpu="another", heads=16, model="glm-5"),
            "the nearest tables: 'another' glm-5 64 heads fp8_packed, "
            "'NVIDIA H100 80GB HBM3' deepseek-v3.2 16 heads fp8_packed, "
            "'NVIDIA H100 80GB HBM3' deepseek-v3.2 128 heads fp8_packed",
        ),
    ],
)
def test_a_miss_names_the_values_that_there_are_or_the_nearest_tables(
    database: Path, wanted: TableFilter, words: str
) -> None:
    with pytest.raises(NoTunedData) as raised:
        select_tables(database, wanted)

    assert str(raised.value) == f"nothing is measured for {wanted}; {words}"


def test_a_miss_among_many_tables_names_a_few(tmp_path: Path) -> None:
    every = [real_table(points=("indexer_layout",), gpu=f"GPU {number}") for number in range(9)]

    with pytest.raises(NoTunedData, match=r"gpu may be 'GPU 0', .*'GPU 3', and 5 more$"):
        select_tables(stored(tmp_path / "many.db", *every), TableFilter(gpu="foo"))


def test_nothing_anywhere_says_how_to_measure() -> None:
    with pytest.raises(NoTunedData, match="nsa-tune run"):
        select_tables(None, TableFilter())


def test_a_named_database_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing):
        select_tables(tmp_path / "none.db", TableFilter())


def test_a_damaged_place_is_passed_over_with_a_warning(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    broken = tmp_path / "data" / "nsa-tune" / "nsa-tune.db"
    broken.parent.mkdir(parents=True)
    broken.write_text("no database")
    shipped = tmp_path / "h100.tsv"
    write_text(real_table(points=("indexer_layout",)), shipped)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(places, "shipped", lambda: [shipped])
    monkeypatch.setattr(places, "_SHIPPED", tmp_path)

    with caplog.at_level(logging.WARNING):
        (table,) = select_tables(None, TableFilter())

    assert table.source == "shipped:h100"
    assert str(broken) in caplog.text


def test_the_first_place_that_has_a_match_is_the_only_one(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "h100.tsv"
    write_text(real_table(points=("indexer_layout",), heads=64), shipped)
    monkeypatch.setattr(places, "shipped", lambda: [shipped])

    h100 = select_tables(database, TableFilter(gpu="NVIDIA H100 80GB HBM3"))
    assert {table.key.heads for table in h100} == {128, 16}
    assert [
        table.key.heads
        for table in select_tables(database, TableFilter(heads=64, model="deepseek-v3.2"))
    ] == [64]
