"""Tables out of a database into text, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa_tune._errors import StoreCorrupt, StoreReadOnly
from nsa_tune.db.exchange import import_text, write_text
from nsa_tune.db.reader import read_database
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import read_text
from tests.records import DEVICE, KEY, failed, ok, table

ROWS = (ok("extend:0+128"), failed("extend:0+128", "mla", "no kernel"))


def test_a_table_goes_out_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "h100.tsv"
    original = table(*ROWS)

    write_text(original, path)
    with Store.open(tmp_path / "nsa-tune.db") as store:
        assert import_text(store, path) == 2
        imported = store.table(KEY)

    assert imported == replace(original, source=str(tmp_path / "nsa-tune.db"))
    assert [p.name for p in tmp_path.glob("*.tsv*")] == ["h100.tsv"]


def test_importing_ones_own_export_keeps_all_digits(tmp_path: Path) -> None:
    path = tmp_path / "h100.tsv"
    with Store.open(tmp_path / "nsa-tune.db") as store:
        store.add(store.begin_run(KEY, DEVICE, {}), [ok("extend:0+128", latency_us=123.456789)])
        write_text(store.table(KEY), path)

        assert import_text(store, path) == 0
        assert store.table(KEY).measurements[0].latency_us == 123.456789


def test_an_old_table_does_not_hide_newer_measurements(tmp_path: Path) -> None:
    path = tmp_path / "h100.tsv"
    old = "2020-01-01T00:00:00.000000+00:00"
    write_text(table(ok("extend:0+128"), ok("extend:0+256"), measured_at=old), path)
    with Store.open(tmp_path / "nsa-tune.db") as store:
        store.add(store.begin_run(KEY, DEVICE, {}), [ok("extend:0+128", latency_us=90.0)])

        assert import_text(store, path) == 2

        latencies = {row.batch: row.latency_us for row in store.table(KEY).measurements}
        assert latencies == {"extend:0+128": 90.0, "extend:0+256": 100.0}
        assert import_text(store, path) == 0


def test_a_damaged_text_adds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "h100.tsv"
    write_text(table(*ROWS), path)
    path.write_text(path.read_text()[:-20])
    with Store.open(tmp_path / "nsa-tune.db") as store:
        with pytest.raises(StoreCorrupt, match=r"h100\.tsv, line"):
            import_text(store, path)

        assert read_database(store.path) == []


def test_a_text_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StoreReadOnly, match="cannot be written"):
        write_text(table(*ROWS), tmp_path / "none" / "h100.tsv")
    (tmp_path / "taken").mkdir()
    with pytest.raises(StoreReadOnly, match="cannot be written"):
        write_text(table(*ROWS), tmp_path / "taken")

    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_limits_travel_with_a_table_and_do_not_replace_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "h100.tsv"
    write_text(replace(table(*ROWS), limits={"rows": 100, "next_n": 2}), path)

    assert read_text(path).limits == {"next_n": 2, "rows": 100}
    with Store.open(tmp_path / "nsa-tune.db") as store:
        store.add_limits(store.begin_run(KEY, DEVICE, {}), {"rows": (90, "SIGSEGV")})
        import_text(store, path)
        import_text(store, path)
        assert store.table(KEY).limits == {"rows": 90, "next_n": 2}


def test_a_limit_that_is_no_number_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "h100.tsv"
    write_text(replace(table(*ROWS), limits={"rows": 100}), path)
    path.write_text(path.read_text().replace("# limit rows = 100", "# limit rows = many"))

    with pytest.raises(StoreCorrupt, match="limit rows is 'many'"):
        read_text(path)


def test_two_that_write_one_file_do_not_take_each_others_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "h100.tsv", Path.write_text

    def write_while_another_does(draft: Path, *arguments: Any, **named: Any) -> int:
        monkeypatch.setattr(Path, "write_text", written)
        count = written(draft, *arguments, **named)
        write_text(table(*ROWS), path)
        return count

    monkeypatch.setattr(Path, "write_text", write_while_another_does)
    write_text(table(ROWS[0]), path)

    assert read_text(path).measurements == (ROWS[0],)
    assert list(tmp_path.iterdir()) == [path]
