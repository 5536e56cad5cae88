"""The pages of a service, in a real browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("vl_convert")

from nsa_tune.db.text_table import format_table
from nsa_tune.fleet.service.auth.tokens import Role
from tests.fleet.service.served import served
from tests.reports.browsing import Visit
from tests.reports.dashboard.test_application import TABLE
from tests.reports.html.test_html import HOSTILE
from tests.reports.synthetic import key_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_AT = "2026-11-20T12:00:00.000000+00:00"
_CLAIM = {"claim": "c" * 16, "worker": "gpu-7", "gpu": "NVIDIA H200"}
_JOB = {"gpu": "NVIDIA H200", "model": "deepseek-v3.2", "kv_dtype": "fp8"}


def test_a_visitor_with_a_token_goes_from_the_tables_to_a_report(
    browser: Browser, tmp_path: Path
) -> None:
    table = replace(TABLE, measured_at=_AT)
    other = replace(table, key=key_of(heads=16))
    with served(tmp_path / "t.db") as service:
        for pushed in (table, other):
            assert service.post("/v1/tables", format_table(pushed).encode()).status == 200
        with Visit(browser, f"{service.url}/?token={service.tokens[Role.READ]}") as visit:
            page = visit.page
            page.set_default_timeout(60_000)
            page.goto(visit.url)
            assert page.url == f"{service.url}/"
            assert page.inner_text("h1").startswith("2 tables, ")
            assert page.locator("tbody tr").count() == 2
            page.locator("tr:has(td:text-is('16')) a").click()
            page.wait_for_selector("section.table", state="attached")
            assert page.locator("section.table").count() == 1
            assert "16" in page.locator("section.table h2").first.inner_text()
            assert page.evaluate("document.cookie") == "", "no script sees the token"
            page.click("text=All tables")
            page.wait_for_selector("h1:has-text('2 tables')")
            assert visit.complaints == []


def test_the_first_page_tells_how_far_a_job_is(browser: Browser, tmp_path: Path) -> None:
    with served(tmp_path / "t.db") as service:
        service.post("/v1/jobs", _JOB, role=Role.ADMIN)
        service.post("/v1/jobs/claim", _CLAIM)
        with Visit(browser, f"{service.url}/?token={service.tokens[Role.READ]}") as visit:
            visit.page.goto(visit.url)
            assert "starting" in visit.page.inner_text("tbody tr")
            beat = {**_CLAIM, "rows": 36, "batches_done": 12, "batches": 80}
            assert service.post("/v1/jobs/1/beat", beat).status == 200
            visit.page.reload()
            row = visit.page.inner_text("tbody tr")
            assert "gpu-7" in row
            assert "12 of 80 batches (15 %)" in row


def test_the_queue_is_a_link_away_and_hostile_words_stay_words(
    browser: Browser, tmp_path: Path
) -> None:
    with served(tmp_path / "t.db") as service:
        claim = {"claim": "c" * 16, "worker": HOSTILE, "gpu": HOSTILE, "driver": HOSTILE,
                 "libraries": {HOSTILE: HOSTILE}}  # fmt: skip
        assert service.post("/v1/jobs", {**_JOB, "gpu": HOSTILE}, role=Role.ADMIN).status == 201
        assert service.post("/v1/jobs/claim", claim).document["job"]["id"] == 1
        with Visit(browser, f"{service.url}/?token={service.tokens[Role.READ]}") as visit:
            visit.page.set_default_timeout(60_000)
            visit.page.goto(visit.url)
            visit.page.click("text=Jobs and workers")
            visit.page.wait_for_selector("h3:text-is('Workers')")
            cells = visit.page.locator("tbody tr").first.locator("td").all_inner_texts()
            assert cells[:2] == ["1", "running"]
            assert cells[2].startswith(f"{HOSTILE}, deepseek-v3.2")
            assert visit.page.locator("img").count() == 0
            assert visit.page.evaluate("window.hostile === undefined")
            visit.page.click("header a")
            visit.page.wait_for_selector("text=Nothing is measured yet")
            assert visit.complaints == []


def test_a_visitor_without_a_token_sees_a_sentence(browser: Browser, tmp_path: Path) -> None:
    with served(tmp_path / "t.db") as service, Visit(browser, f"{service.url}/") as visit:
        answer = visit.page.goto(visit.url)
        assert answer is not None
        assert answer.status == 401
        assert "this needs a token" in visit.page.inner_text("body")
        assert "?token=TOKEN" in visit.page.inner_text("body")
