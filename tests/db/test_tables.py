"""Where tables are looked for, and which one answers."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import platformdirs
import pytest

from nsa_tune._errors import StoreCorrupt, StoreError, StoreMissing
from nsa_tune.backend.types.records import Table
from nsa_tune.db import places
from nsa_tune.db.places import default_database, shipped, sources
from nsa_tune.db.reader import Wanted
from nsa_tune.db.search import find
from nsa_tune.db.text_table import format_table, read_text
from tests.records import KEY, ok, stored, table

WANTED = Wanted(KEY.gpu, KEY.model, KEY.heads, KEY.kv_layout)
SHIPPED = places._SHIPPED


@pytest.fixture(autouse=True)
def ships_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in the place of the shipped tables and of the site's."""
    directory = tmp_path / "shipped"
    directory.mkdir()
    monkeypatch.setattr(places, "_SHIPPED", directory)
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "site"))
    return directory


def _ship(directory: Path, name: str, shipped_table: Table) -> None:
    text = format_table(shipped_table)
    (directory / name).write_text(text, encoding="utf-8", newline="\n")


def _found(db: Path | None) -> list[str]:
    return [found.head.source for found in next(find(db, WANTED), [])]


def test_the_default_is_in_the_users_data_directory(clean_environment: Path) -> None:
    expected = clean_environment / ".local/share/nsa-tune/nsa-tune.db"

    assert default_database() == expected
    assert expected.parent == platformdirs.user_data_path("nsa-tune")


def test_the_default_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environment: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_database() == tmp_path / "data" / "nsa-tune" / "nsa-tune.db"

    monkeypatch.setenv("NSA_TUNE_DB", "~/mine.db")
    assert default_database() == clean_environment / "mine.db"


def test_a_relative_data_directory_is_ignored(
    monkeypatch: pytest.MonkeyPatch, clean_environment: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "data")

    assert default_database().is_relative_to(clean_environment)


def test_without_a_home_there_is_a_default_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(Path, "expanduser", no_home)

    assert default_database().name == "nsa-tune.db"
    assert default_database().is_absolute()
    assert "set NSA_TUNE_DB" in caplog.text


def test_the_order_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ships_nothing: Path
) -> None:
    monkeypatch.setenv("NSA_TUNE_DB", str(tmp_path / "named.db"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_DIRS", f"{tmp_path / 'site1'}:{tmp_path / 'site2'}")
    standard = [tmp_path / d / "nsa-tune" / "nsa-tune.db" for d in ("home", "site1", "site2")]
    for path in standard:
        path.parent.mkdir(parents=True)
        path.touch()
    _ship(ships_nothing, "h100.tsv", table(ok("extend:0+1")))

    assert list(sources(tmp_path / "given.db")) == [
        tmp_path / "given.db", tmp_path / "named.db", *standard, ships_nothing / "h100.tsv",
    ]  # fmt: skip


def test_a_source_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path / "nsa-tune" / "nsa-tune.db")
    monkeypatch.setenv("NSA_TUNE_DB", str(path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    assert list(sources(path)) == [path]


def test_the_first_source_with_the_key_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ships_nothing: Path
) -> None:
    given = stored(tmp_path / "given.db", table(ok("extend:0+1"), key=replace(KEY, heads=64)))
    named = stored(tmp_path / "named.db", table(ok("extend:0+2")))
    monkeypatch.setenv("NSA_TUNE_DB", str(named))
    _ship(ships_nothing, "h100.tsv", table(ok("extend:0+3")))

    assert _found(given) == [str(named)]
    monkeypatch.delenv("NSA_TUNE_DB")
    assert _found(given) == ["shipped:h100"]
    assert _found(None) == ["shipped:h100"]


@pytest.mark.parametrize(
    "other",
    [
        WANTED._replace(gpu="NVIDIA H200"),
        WANTED._replace(model="glm-5"),
        WANTED._replace(heads=64),
        WANTED._replace(kv_layout="bf16"),
    ],
)
def test_all_four_fields_must_match(other: Wanted, tmp_path: Path) -> None:
    path = stored(tmp_path / "a.db", table(ok("extend:0+1")))

    assert len(list(find(path, WANTED))) == 1
    assert list(find(path, other)) == []


def test_tables_of_other_drivers_and_libraries_are_found_newest_first(
    tmp_path: Path, ships_nothing: Path
) -> None:
    new, old = replace(KEY, driver="590"), KEY
    path = stored(tmp_path / "a.db", table(ok("extend:0+1"), key=old))
    stored(path, table(ok("extend:0+1"), key=new))
    assert [found.head.key for found in next(find(path, WANTED))] == [new, old]

    _ship(ships_nothing, "a.tsv", table(ok("extend:0+1"), key=old, measured_at="2026-01-01"))
    _ship(ships_nothing, "b.tsv", table(ok("extend:0+1"), key=new, measured_at="2026-02-01"))
    assert [found.head.key for found in next(find(None, WANTED))] == [new, old]


def test_a_text_table_may_be_given_in_place_of_a_database(
    tmp_path: Path, ships_nothing: Path
) -> None:
    _ship(tmp_path, "mine.tsv", table(ok("extend:0+3")))

    assert _found(tmp_path / "mine.tsv") == [str(tmp_path / "mine.tsv")]


def test_a_given_database_that_is_missing_or_damaged_raises(
    tmp_path: Path, ships_nothing: Path
) -> None:
    _ship(ships_nothing, "h100.tsv", table(ok("extend:0+3")))
    (tmp_path / "notes.db").write_text("no database\n" * 100)

    with pytest.raises(StoreMissing):
        _found(tmp_path / "none.db")
    with pytest.raises(StoreCorrupt, match=r"notes\.db"):
        _found(tmp_path / "notes.db")
    with pytest.raises(StoreError, match="is a directory"):
        _found(tmp_path)


def test_a_later_source_that_cannot_be_read_is_skipped_with_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ships_nothing: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = tmp_path / "notes.db"
    bad.write_text("no database\n" * 100)
    monkeypatch.setenv("NSA_TUNE_DB", str(bad))
    (ships_nothing / "a.tsv").write_text("no table")
    _ship(ships_nothing, "h100.tsv", table(ok("extend:0+3")))

    with caplog.at_level(logging.WARNING):
        assert _found(None) == ["shipped:h100"]

    assert f"{bad} is skipped: {bad} is not an SQLite database" in caplog.text
    assert "a.tsv is skipped" in caplog.text


def test_shipped_tables_that_do_not_match_are_not_read_past_their_head(
    ships_nothing: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = format_table(table(ok("extend:0+1"), key=replace(KEY, gpu="NVIDIA H200")))
    (ships_nothing / "h200.tsv").write_text(other.replace("prefill", "prefill\tdamaged"))

    assert _found(None) == []

    assert caplog.text == ""


def test_nothing_anywhere_is_no_table() -> None:
    assert _found(None) == []


def test_every_shipped_table_is_in_the_form_that_the_package_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "_SHIPPED", SHIPPED)

    for path in shipped():
        text = path.read_text(encoding="utf-8")
        assert format_table(read_text(path)) == text, path.name


def test_reading_and_writing_loads_the_standard_library_only(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.db", table(ok("extend:0+1")))
    code = (
        "import sys; from pathlib import Path; from nsa_tune.db.search import find; "
        "from nsa_tune.db.reader import Wanted; from nsa_tune.db.store import Store; "
        f"Store.open(Path({str(path)!r})).close(); "
        f"assert list(find(Path({str(path)!r}), Wanted(*{tuple(WANTED)!r}))); "
        "print({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    root = Path(__file__).parents[2]

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = [{str(root)!r}]; {code}"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip

    assert set(eval(done.stdout)) == {"nsa_tune", "__main__"}
