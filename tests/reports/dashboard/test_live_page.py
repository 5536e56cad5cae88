"""The dashboard in a real browser: it follows a run, and hostile words stay words."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("vl_convert")

from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.db.store import Store
from nsa_tune.db.text_table import format_table
from tests.reports.browsing import Visit
from tests.reports.dashboard.served import served
from tests.reports.dashboard.test_application import TABLE, store
from tests.reports.html.test_html import HOSTILE
from tests.reports.synthetic import key_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def _visit(browser: Browser, url: str) -> Visit:
    visit = Visit(browser, url)
    visit.hurry()
    return visit


def test_a_run_is_followed_while_it_goes_on(browser: Browser, tmp_path: Path) -> None:
    half = replace(TABLE, measurements=TABLE.measurements[:200])
    path = store(tmp_path / "some.db", half, outcome=None)
    with served(path) as dashboard, _visit(browser, dashboard.url) as visit:
        page = visit.open("#t0-indexer_layout-0=1")
        page.wait_for_selector("#live .run :text('200 measurements')")
        line = page.locator("#t0-indexer_layout-0 select.line")
        assert line.input_value() == "1"

        with Store.open(path) as opened:
            opened.add(1, TABLE.measurements[200:])
        page.wait_for_selector(f"#live :text('{len(TABLE.measurements)} measurements')")
        shown = f"dd:text-is('{len(TABLE.measurements)} ok')"
        page.wait_for_selector(shown, state="attached")
        page.wait_for_selector("article.panel[data-drawn] .map svg")
        assert line.input_value() == "1"

        with Store.open(path) as opened:
            opened.end_run(1, "done")
        page.wait_for_selector("#live :text('no run is going on')")
        assert "(done, " in page.inner_text("#live")
        assert visit.complaints == []
        assert {url.removeprefix(dashboard.url).partition("/")[0] for url in visit.requests} == {
            "", "assets", "api",
        }  # fmt: skip
        page.screenshot(full_page=True, path=tmp_path / "dashboard.png")


def test_a_run_with_a_budget_tells_what_is_left_of_it(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "some.db"
    with Store.open(path) as opened:
        run = opened.begin_run(
            TABLE.key,
            TABLE.device,
            {"points": ["indexer_layout"], "target_regret": 0.01, "budget_s": 3600.0},
        )
        opened.add(run, TABLE.measurements[:50])
        half = (datetime.now(UTC) - timedelta(seconds=1800)).isoformat()
        opened._connection.execute("UPDATE runs SET started_at = ?", [half])
        opened._connection.commit()
    with served(path) as dashboard, _visit(browser, dashboard.url) as visit:
        page = visit.open()
        page.wait_for_selector("#live .run progress")

        assert "50 measurements; at most 30 min left; the last" in page.inner_text("#live")
        share = page.locator("#live progress").evaluate("bar => bar.value")
        assert share == pytest.approx(0.5, abs=0.02)


def test_tables_of_several_databases_are_told_apart(browser: Browser, tmp_path: Path) -> None:
    one = store(tmp_path / "one.db")
    other = store(tmp_path / "other.db", replace(TABLE, key=key_of(driver="999.1")))
    text = tmp_path / "table.tsv"
    text.write_text(format_table(replace(TABLE, key=key_of(driver="1.1"))), encoding="utf-8")
    with served(one, other, text) as dashboard, _visit(browser, dashboard.url) as visit:
        page = visit.open()
        assert page.locator("section.table:visible").count() == 1
        tables = page.locator("select[name=filter-table]")
        assert tables.locator("option").count() == 3
        tables.select_option(index=1)
        assert "other.db, driver 999.1" in page.locator("section.table:visible h2").inner_text()
        assert page.evaluate("location.hash").startswith("#table=")
        assert visit.complaints == []


def test_hostile_words_in_a_running_database_stay_words(browser: Browser, tmp_path: Path) -> None:
    bad = [
        Measurement("indexer_layout", "decode:n1:64", arm, Status.FAILED, reason=HOSTILE)
        for arm in ("native/deep_gemm", HOSTILE)
    ]
    key = replace(TABLE.key, gpu=HOSTILE)
    hostile = replace(TABLE, key=key, measurements=(*TABLE.measurements, *bad))
    path = store(tmp_path / "<img src=x onerror=alert(1)>.db", hostile, outcome=None)
    with served(path) as dashboard, _visit(browser, dashboard.url) as visit:
        page = visit.open()
        page.wait_for_selector("#live .run ol li")

        assert HOSTILE in page.inner_text("#live")
        assert page.evaluate("window.hostile === undefined")
        assert page.locator("img").count() == 0
        assert visit.complaints == []
