"""What a dashboard answers, over a real connection."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.places import shipped
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import format_table
from nsa_tune.reports.dashboard.access import HEADERS
from nsa_tune.reports.formats.json_document import SCHEMA
from tests.records import stored
from tests.reports.dashboard.served import Served, served
from tests.reports.html.test_html import HOSTILE
from tests.reports.synthetic import key_of, real_table

TABLE = real_table(points=("indexer_layout",))


def store(path: Path, table: Table = TABLE, *, outcome: str | None = "done") -> Path:
    """A database with one run that measured `table`."""
    with Store.open(path) as opened:
        run = opened.begin_run(table.key, table.device, {"points": ["indexer_layout"]})
        opened.add(run, table.measurements)
        if outcome is not None:
            opened.end_run(run, outcome)
    return path


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("served")
    text = place / "other.tsv"
    text.write_text(format_table(replace(TABLE, key=key_of(heads=16))), encoding="utf-8")
    with served(store(place / "some.db"), text, place / "none.db") as running:
        yield running


def test_the_page_has_every_table_and_loads_its_own_files_only(dashboard: Served) -> None:
    question = dashboard.get("/")

    page = question.body.decode()
    assert question.status == 200
    assert question.headers["content-type"] == "text/html; charset=utf-8"
    assert page.count('<section class="table"') == 2
    assert "deepseek-v3.2, 128 local heads, fp8_packed</h2>" in page
    assert "deepseek-v3.2, 16 local heads, fp8_packed</h2>" in page
    assert "<style" not in page
    assert 'src="assets/page.js"' in page


@pytest.mark.parametrize("name", ["page.css", "page.js", "live.css", "live.js"])
def test_assets_are_served_with_their_type(dashboard: Served, name: str) -> None:
    question = dashboard.get(f"/assets/{name}")

    kind = "css" if name.endswith(".css") else "javascript"
    assert question.headers["content-type"] == f"text/{kind}; charset=utf-8"
    assert question.body


@pytest.mark.parametrize("path", ["/assets/../serving.py", "/assets/none.js", "/elsewhere"])
def test_nothing_else_is_there(dashboard: Served, path: str) -> None:
    assert dashboard.get(path).status == 404


@pytest.mark.parametrize("path", ["/", "/assets/page.js", "/api/live", "/api/report"])
def test_what_is_known_already_is_not_sent_again(dashboard: Served, path: str) -> None:
    first = dashboard.get(path)

    again = dashboard.get(path, If_None_Match=f'"x", {first.headers["etag"]}')
    other = dashboard.get(path, If_None_Match='"x"')

    assert (again.status, again.body) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"] == other.headers["etag"]
    assert (other.status, other.body) == (200, first.body)


def test_the_report_is_the_one_that_the_command_prints(dashboard: Served) -> None:
    document = dashboard.get("/api/report").document

    assert document["schema"] == SCHEMA
    assert [section["key"]["heads"] for section in document["sections"]] == [128, 16]


def test_a_missing_database_is_told_and_hides_no_other(dashboard: Served) -> None:
    databases = dashboard.get("/api/live").document["databases"]

    assert [one["name"] for one in databases] == ["some.db", "other.tsv", "none.db"]
    assert [bool(one["problem"]) for one in databases] == [False, False, True]
    assert "there is no" in databases[2]["problem"]


def test_without_a_database_the_tables_that_ship_are_listed_and_open(tmp_path: Path) -> None:
    with served(tmp_path / "none.db") as running:
        page = running.get("/").body.decode()
        links = re.findall(r'href="(\?table=[^"]+)"', page)
        table = running.get(f"/{links[0]}")
        unknown = running.get("/?table=..%2F..%2Fsecret")
        (live,) = running.get("/api/live").document["databases"]

    assert len(links) == len(shipped())
    assert "Nothing is measured here yet" in page
    assert live["problem"] == ""
    assert table.status == 200
    assert table.body.decode().count('<section class="table"') == 1
    assert unknown.status == 404


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "localhost:8400"])
def test_this_machines_names_are_answered(dashboard: Served, host: str) -> None:
    assert dashboard.get("/api/live", Host=host).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.7:8400"])
def test_a_request_by_another_name_is_refused(dashboard: Served, host: str) -> None:
    answer = dashboard.get("/", Host=host)

    assert answer.status == 400
    assert b"Invalid host" in answer.body
    assert HEADERS.items() <= answer.headers.items()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading_is_allowed(dashboard: Served, method: str) -> None:
    assert dashboard.get("/", method=method).status == 405


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    some = TABLE.measurements[:20]
    path = store(tmp_path / "some.db", replace(TABLE, measurements=some), outcome=None)
    with served(path) as running:
        first = running.get("/api/live")
        page = running.get("/")
        with Store.open(path) as opened:
            failed = Measurement("indexer_layout", "decode:n1:64", "native/deep_gemm",
                                 Status.FAILED, reason="boom")  # fmt: skip
            opened.add(1, [TABLE.measurements[20], failed])
        second = running.get("/api/live", If_None_Match=first.headers["etag"])
        with Store.open(path) as opened:
            opened.end_run(1, "done")
        third = running.get("/api/live")

        (run,) = first.document["databases"][0]["runs"]
        assert (run["measurements"], run["outcome"], run["failed"]) == (20, None, 0)
        database = second.document["databases"][0]
        assert second.status == 200
        assert (database["runs"][0]["measurements"], database["runs"][0]["failed"]) == (22, 1)
        assert database["newest"][0]["reason"] == "boom"
        assert [one["batch"] for one in database["failures"]] == ["decode:n1:64"]
        assert third.document["databases"][0]["runs"][0]["outcome"] == "done"
        assert len({first.document["state"], second.document["state"],
                    third.document["state"]}) == 3  # fmt: skip
        assert running.get("/", If_None_Match=page.headers["etag"]).status == 200


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    bad = Measurement(
        "indexer_layout", "decode:n1:64", "native/deep_gemm", Status.FAILED, error=float("inf"),
        reason=HOSTILE,
    )  # fmt: skip
    key = replace(TABLE.key, gpu=HOSTILE, driver=HOSTILE, libraries=((HOSTILE, HOSTILE),))
    hostile = replace(TABLE, key=key, measurements=(*TABLE.measurements, bad))
    with served(store(tmp_path / "<b>.db", hostile)) as running:
        page = running.get("/").body.decode()
        live = running.get("/api/live")
        document = running.get("/api/report").document

    assert "<script>window.hostile" not in page
    assert "<img src=x" not in page
    assert live.headers["content-type"] == "application/json"
    assert live.document["databases"][0]["failures"][0]["reason"] == HOSTILE
    (failure,) = document["sections"][0]["failures"]
    assert failure["reason"] == HOSTILE


def test_a_table_of_an_unknown_model_hides_no_other(tmp_path: Path) -> None:
    strange = replace(TABLE, key=replace(TABLE.key, model="gpt-2"))
    path = stored(tmp_path / "some.db", TABLE, strange)

    with served(path) as running:
        assert running.get("/").body.decode().count('<section class="table"') == 1


def test_an_empty_database_and_a_damaged_one_are_pages_too(tmp_path: Path) -> None:
    empty, damaged = tmp_path / "empty.db", tmp_path / "damaged.db"
    Store.open(empty).close()
    damaged.write_text("no database at all")

    with served(empty, damaged) as running:
        page = running.get("/")
        live = running.get("/api/live").document

    assert page.status == 200
    assert "Nothing is measured here yet" in page.body.decode()
    assert "not an SQLite database" in live["databases"][1]["problem"]


def test_looking_writes_nothing(tmp_path: Path) -> None:
    path = store(tmp_path / "some.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    path.chmod(0o444)
    before = path.read_bytes()

    with served(path) as running:
        assert running.get("/").status == running.get("/api/report").status == 200

    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["some.db"]
