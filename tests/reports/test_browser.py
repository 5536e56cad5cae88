"""The page in a real browser that has no network: charts draw, filters and the URL work."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from nsa_tune.backend.records import Measurement, Status
from nsa_tune.reports.html import as_html, charts_javascript
from nsa_tune.reports.report import Report, build
from tests.reports.synthetic import real_table

pytest.importorskip("vl_convert")

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--no-first-run",
]  # fmt: skip
Scheme = Literal["light", "dark"]
HOSTILE = "</script><img src=x onerror='window.hostile=1'><script>window.hostile=1</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    report = build([real_table(), real_table(heads=16)])
    path.write_text(as_html(report, charts_javascript()), encoding="utf-8")
    return path


def _centre(element: Locator) -> tuple[float, float]:
    """Where the mouse goes; a number or a hatch may lie over the element."""
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


class Visit:
    """One page in a context of its own, and what it complained of."""

    def __init__(self, browser: Browser, path: Path, scheme: Scheme = "light") -> None:
        self.context = browser.new_context(
            offline=True, color_scheme=scheme, viewport={"width": 1280, "height": 1000}
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = path.as_uri()

    def open(self, hash_text: str = "") -> Page:
        """The page, when the charts in view are drawn."""
        self.page.goto(self.url + hash_text)
        self.page.wait_for_selector("article.panel[data-drawn]")
        return self.page

    def drawn(self, panel: str) -> None:
        """Bring a panel into view and wait for its charts."""
        self.page.locator(f"#{panel}").scroll_into_view_if_needed()
        self.page.wait_for_selector(f"#{panel}[data-drawn] .curves svg")


@pytest.fixture
def visit(browser: Browser, page_file: Path) -> Iterator[Visit]:
    visit = Visit(browser, page_file)
    yield visit
    visit.context.close()


PANELS = ("t0-prefill_path-0", "t0-sparse_prefill-0", "t0-indexer_layout-0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_draws_offline_without_a_complaint(
    browser: Browser, page_file: Path, tmp_path: Path, scheme: Scheme
) -> None:
    visit = Visit(browser, page_file, scheme)
    page = visit.open()
    for panel in PANELS:
        visit.drawn(panel)

    for panel in PANELS:
        cells = page.locator(f"#{panel} .map .mark-rect path")
        lines = page.locator(f"#{panel} .curves .mark-line path")
        assert cells.count() > 10
        assert lines.count() >= 2
        assert page.locator(f"#{panel} .role-legend").count() == 2
    assert visit.complaints == []
    assert visit.requests == [visit.url]
    picture = page.screenshot(full_page=True, path=tmp_path / f"report-{scheme}.png")
    assert len(picture) > 50_000
    visit.context.close()


def test_dark_and_light_pages_differ_in_their_charts(browser: Browser, page_file: Path) -> None:
    fills = {}
    schemes: tuple[Scheme, ...] = ("light", "dark")
    for scheme in schemes:
        visit = Visit(browser, page_file, scheme)
        cell = visit.open().locator("#t0-prefill_path-0 .map .mark-rect path").first
        fills[scheme] = cell.get_attribute("fill")
        visit.context.close()

    assert fills["light"] != fills["dark"]


def test_a_change_of_scheme_draws_anew(visit: Visit) -> None:
    page = visit.open()
    cell = page.locator("#t0-prefill_path-0 .map .mark-rect path").first
    before = cell.get_attribute("fill")

    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("#t0-prefill_path-0[data-drawn$=true]")

    assert cell.get_attribute("fill") != before


def test_a_filter_changes_what_is_shown_and_the_url_restores_it(visit: Visit) -> None:
    page = visit.open()
    assert page.locator("section.table:visible").count() == 1

    page.locator("select[name=filter-heads]").select_option("16")
    page.locator("select[name=filter-question]").select_option("indexer_layout")
    page.wait_for_selector("#t1-indexer_layout-0[data-drawn]")
    shown = page.locator("article.panel:visible").evaluate_all("all => all.map(one => one.id)")
    hash_text = page.evaluate("location.hash")

    assert shown == ["t1-indexer_layout-0"]
    assert hash_text == "#heads=16&question=indexer_layout"
    page.goto("about:blank")
    again = visit.open(hash_text)
    restored = again.locator("article.panel:visible").evaluate_all("all => all.map(one => one.id)")
    assert restored == shown
    assert again.locator("select[name=filter-heads]").input_value() == "16"
    assert visit.complaints == []


def test_another_line_changes_the_charts_and_the_url(visit: Visit) -> None:
    page = visit.open()
    panel = page.locator("#t0-prefill_path-0")
    before = panel.locator(".sentence").inner_text()

    panel.locator("select.line").select_option(label="4 sequences, prefix 1024")
    page.wait_for_function(
        "old => document.querySelector('#t0-prefill_path-0 .sentence').textContent !== old",
        arg=before,
    )

    assert "new tokens each" in panel.locator(".sentence").inner_text()
    assert "4 sequences" in panel.locator(".map figcaption").inner_text()
    assert "t0-prefill_path-0=" in page.evaluate("location.hash")


def test_a_line_without_a_crossover_draws_too(visit: Visit) -> None:
    page = visit.open()
    panel = page.locator("#t0-prefill_path-0")

    panel.locator("select.line").select_option(label="prefix 1792")
    page.wait_for_selector("#t0-prefill_path-0 .sentence:text('mla throughout')")

    assert panel.locator(".curves .mark-line path").count() == 2
    assert panel.locator(".curves .mark-rule.role-mark").count() == 0
    assert visit.complaints == []


def test_a_click_on_the_map_picks_the_line(visit: Visit) -> None:
    page = visit.open()
    panel = page.locator("#t0-prefill_path-0")
    chosen = panel.locator("select.line").input_value()

    page.mouse.click(*_centre(panel.locator(".map .mark-rect path").last))
    page.wait_for_function(
        "old => document.querySelector('#t0-prefill_path-0 select').value !== old", arg=chosen
    )

    assert panel.locator("select.line").input_value() != chosen


def test_a_tooltip_tells_times_and_limits_as_text(visit: Visit) -> None:
    page = visit.open()

    page.mouse.move(*_centre(page.locator("#t0-prefill_path-0 .map .mark-rect path").first))
    page.wait_for_selector("dl.tip:visible")

    words = page.locator("dl.tip").inner_text()
    assert "extend:" in words
    assert " us (" in words
    assert visit.complaints == []


def test_the_keyboard_reaches_filters_lines_and_tables(visit: Visit) -> None:
    page = visit.open()

    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.className || document.activeElement.name")
        )

    # A chart that is wider than the window scrolls, and then the keyboard reaches it too.
    steps = [name for name in reached if name != "chart vega-embed"]
    assert steps[:5] == ["skip", "filter-heads", "filter-question", "line", "scroll"]


def test_a_hash_of_nonsense_is_passed_over(visit: Visit) -> None:
    page = visit.open("#heads=99&question=<b>&t0-prefill_path-0=-7&t0-indexer_layout-0=1e9")

    assert page.locator("select[name=filter-heads]").input_value() == "128"
    assert page.locator("select[name=filter-question]").input_value() == "all"
    assert visit.complaints == []


def test_hostile_strings_stay_text(browser: Browser, tmp_path: Path) -> None:
    table = real_table(points=("indexer_layout",))
    bad = Measurement(
        "indexer_layout", "decode:n1:64", "native/deep_gemm", Status.FAILED, reason=HOSTILE
    )
    key = replace(table.key, gpu=HOSTILE, libraries=((HOSTILE, HOSTILE),))
    report = build([replace(table, key=key, measurements=(*table.measurements, bad))])
    path = tmp_path / "hostile.html"
    path.write_text(as_html(report, charts_javascript()), encoding="utf-8")
    visit = Visit(browser, path)

    page = visit.open()

    assert page.evaluate("window.hostile === undefined")
    assert page.locator("img").count() == 0
    assert HOSTILE in page.locator("h1").inner_text()
    assert visit.complaints == []
    assert visit.requests == [visit.url]
    visit.context.close()


@pytest.mark.parametrize("javascript", [None, "charts"])
def test_a_page_of_nothing_or_without_charts_stands(
    browser: Browser, tmp_path: Path, javascript: str | None
) -> None:
    path = tmp_path / "page.html"
    report = Report((), "a rule") if javascript else build([real_table()])
    text = as_html(report, charts_javascript() if javascript else None)
    path.write_text(text, encoding="utf-8")
    visit = Visit(browser, path)

    visit.page.goto(visit.url)
    visit.page.wait_for_load_state()

    assert visit.page.locator("h1").is_visible()
    assert visit.page.locator(".charts:visible").count() == 0
    assert visit.complaints == []
    visit.context.close()
