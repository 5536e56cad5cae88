"""The page in a real browser that has no network: charts draw, filters and the URL work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.places import shipped
from nsa_tune.db.text_table import read_text
from nsa_tune.reports.analysis.report import Report, build
from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.html.cards import VIEWS
from nsa_tune.reports.html.frame import offline
from nsa_tune.reports.html.markup import html_table
from nsa_tune.reports.html.page import as_html
from nsa_tune.reports.html.vega_bundle import charts_javascript
from tests.reports.browsing import Scheme, Visit, centre
from tests.reports.html.test_html import HOSTILE
from tests.reports.synthetic import CEILINGS, real_table

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("vl_convert")

SCHEMES: tuple[Scheme, ...] = ("light", "dark")
PANELS = ("t0-prefill_path-0", "t0-sparse_prefill-0", "t0-indexer_layout-0")
H100_16 = "NVIDIA H100 80GB HBM3, deepseek-v3.2, 16 local heads, bf16"
PATH = "#t0-prefill_path-0"


def _shipped(name: str) -> Table:
    return next(read_text(path) for path in shipped() if name in path.name)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two H100 tables that ship, the first with made-up ceilings."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    first = _shipped("h100-80gb-hbm3_deepseek-v3.2_h128_fp8")
    first = replace(first, measurements=(*first.measurements, *CEILINGS))
    report = build([first, _shipped("h100-80gb-hbm3_deepseek-v3.2_h16_bf16")])
    path.write_text(as_html(report, charts_javascript()), encoding="utf-8")
    return path


@pytest.fixture
def visit(browser: Browser, page_file: Path) -> Iterator[Visit]:
    with Visit(browser, page_file) as visit:
        yield visit


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_chart_draws_offline_without_a_complaint(
    browser: Browser, page_file: Path, tmp_path: Path, scheme: Scheme
) -> None:
    with Visit(browser, page_file, scheme) as visit:
        page = visit.open()
        for name in PANELS:
            panel = visit.drawn(name)
            assert panel.locator(".map .mark-rect path").count() > 10
            assert panel.locator(".curves .mark-line path").count() >= 2
            assert panel.locator(".role-legend").count() == 2
        visit.view("cost")
        assert page.locator("article:visible table").count() == 2
        _photographed(page, tmp_path / f"cost-{scheme}.png")
        visit.view("failures")
        assert "No arm failed" in page.locator("article:visible").inner_text()
        _photographed(page, tmp_path / f"failures-{scheme}.png", 20_000)

        assert visit.complaints == []
        assert visit.requests == [visit.url]


def _photographed(page: Page, path: Path, least: int = 50_000) -> None:
    assert len(page.screenshot(full_page=True, path=path)) > least


def test_a_change_of_scheme_draws_anew(visit: Visit) -> None:
    page = visit.open()
    cell = page.locator(f"{PATH} .map .mark-rect path").first
    before = cell.get_attribute("fill")

    page.emulate_media(color_scheme="dark")
    page.wait_for_selector(f"{PATH}[data-drawn$=true]")

    assert cell.get_attribute("fill") != before


def test_a_filter_changes_what_is_shown_and_the_url_restores_it(visit: Visit) -> None:
    page = visit.open()
    assert page.locator("section.table:visible").count() == 1
    page.locator("select[name=filter-table]").select_option(H100_16)
    page.wait_for_selector("#t1-prefill_path-0[data-drawn]")
    shown = page.locator("article.panel:visible").evaluate_all("all => all.map(one => one.id)")
    hash_text = page.evaluate("location.hash")

    assert shown[0] == "t1-prefill_path-0"
    assert hash_text == f"#{urlencode({'table': H100_16})}"
    page.goto("about:blank")
    again = visit.open(hash_text)
    restored = again.locator("article.panel:visible").evaluate_all("all => all.map(one => one.id)")
    assert restored == shown
    assert again.locator("select[name=filter-table]").input_value() == H100_16
    assert visit.complaints == []


def test_the_url_keeps_the_view(visit: Visit) -> None:
    page = visit.open()
    visit.view("cost")

    assert page.evaluate("location.hash") == "#view=cost"
    page.goto("about:blank")
    page.goto(f"{visit.url}#view=cost")
    page.locator("article[data-view=cost]").first.wait_for()
    assert page.locator("nav.views button[aria-pressed=true]").inner_text() == "Default's cost"
    visit.view("crossovers")
    assert page.evaluate("location.hash") == ""


def test_another_line_changes_the_charts_and_the_url(visit: Visit) -> None:
    page = visit.open()
    panel = page.locator(PATH)
    before = panel.locator(".sentence").inner_text()

    panel.locator("select.line").select_option(label="4 sequences, prefix 1536")
    page.wait_for_function(
        "old => document.querySelector('#t0-prefill_path-0 .sentence').textContent !== old",
        arg=before,
    )

    assert "new tokens each" in panel.locator(".sentence").inner_text()
    assert "4 sequences" in panel.locator(".map figcaption").inner_text()
    assert "t0-prefill_path-0=" in page.evaluate("location.hash")


def test_a_line_without_a_crossover_draws_too(visit: Visit) -> None:
    page = visit.open()
    panel = page.locator(PATH)

    panel.locator("select.line").select_option(label="prefix 1920")
    page.wait_for_selector(f"{PATH} .sentence:text('mla throughout')")

    assert panel.locator(".curves .mark-line path").count() == 2
    assert panel.locator(".curves .mark-baseline.role-mark").count() == 0
    assert visit.complaints == []


def test_a_hatched_cell_names_its_limit(visit: Visit) -> None:
    caption = visit.open().locator(f"{PATH} .map figcaption").inner_text()

    assert "Hatched: no other is allowed (mha: dense attention equals sparse only" in caption


def test_a_click_on_the_map_picks_the_line(visit: Visit) -> None:
    page = visit.open()
    panel = page.locator(PATH)
    chosen = panel.locator("select.line").input_value()

    page.mouse.click(*centre(panel.locator(".map .mark-rect path").last))
    page.wait_for_function(
        "old => document.querySelector('#t0-prefill_path-0 select').value !== old", arg=chosen
    )

    assert panel.locator("select.line").input_value() != chosen


def test_a_tooltip_tells_times_spread_samples_and_regret_as_text(visit: Visit) -> None:
    page = visit.open()

    page.mouse.move(*centre(page.locator(f"{PATH} .map .mark-rect path").first))
    page.wait_for_selector("dl.tip:visible")

    words = page.locator("dl.tip").inner_text()
    assert "extend:" in words
    for word in (" us ±", "n ", "regret 0.0 %"):
        assert word in words
    assert visit.complaints == []


def test_the_keyboard_reaches_views_filters_lines_and_tables(visit: Visit) -> None:
    page = visit.open()

    reached = []
    for _ in range(18):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "(document.activeElement.dataset.view ? 'view' : document.activeElement.className)"
                " || document.activeElement.name"
            )
        )

    # A chart that is wider than the window scrolls, and then the keyboard reaches it too.
    steps = [name for name in reached if name != "chart vega-embed"]
    assert steps[:8] == [
        "skip", "filter-table", *["view"] * 4,
        "line", "scroll",
    ]  # fmt: skip


def test_a_view_opens_by_the_keyboard(visit: Visit) -> None:
    page = visit.open()

    page.locator("button[data-view=cost]").focus()
    page.keyboard.press("Enter")

    assert page.locator("article[data-view=cost]").first.is_visible()
    assert page.evaluate("location.hash") == "#view=cost"


def test_a_hash_of_nonsense_is_passed_over(visit: Visit) -> None:
    lines = "t0-prefill_path-0=-7&t0-indexer_layout-0=1e9"
    page = visit.open(f"#table=99&view=<b>&{lines}")

    assert "128 local heads" in page.locator("select[name=filter-table]").input_value()
    assert page.locator("button[aria-pressed=true]").inner_text() == "Answer"
    assert visit.complaints == []


def test_a_narrow_window_scrolls_in_its_charts_and_not_as_a_whole(
    browser: Browser, page_file: Path
) -> None:
    with Visit(browser, page_file, width=390) as visit:
        page = visit.page
        page.goto(visit.url)
        visit.drawn(PANELS[0])
        for view in VIEWS:
            visit.view(view)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_wide_table_is_stacked_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    columns = tuple(f"column {i}" for i in range(8))
    table = DisplayTable("Wide", columns, (("first", *map(str, range(6)), "-"),))
    path = tmp_path / "wide.html"
    path.write_text(offline(None).page("Wide", "", [html_table(table)], None), encoding="utf-8")

    for width, stacked in ((390, True), (1400, False)):
        with Visit(browser, path, width=width) as visit:
            page = visit.page
            page.goto(visit.url)
            cells = page.locator("td:visible")
            assert cells.count() == (7 if stacked else 8)
            assert page.locator("th").first.is_visible() is not stacked
            overflow = "document.querySelector('.scroll').scrollWidth"
            assert page.evaluate(overflow) <= width


def test_hostile_strings_stay_text(browser: Browser, tmp_path: Path) -> None:
    table = real_table(points=("indexer_layout",))
    bad = Measurement(
        "indexer_layout", "decode:n1:64", "native/deep_gemm", Status.FAILED, reason=HOSTILE
    )
    key = replace(table.key, gpu=HOSTILE, libraries=((HOSTILE, HOSTILE),))
    report = build([replace(table, key=key, measurements=(*table.measurements, bad))])
    path = tmp_path / "hostile.html"
    path.write_text(as_html(report, charts_javascript()), encoding="utf-8")

    with Visit(browser, path) as visit:
        page = visit.open()
        visit.view("failures")

        assert page.evaluate("window.hostile === undefined")
        assert page.locator("img").count() == 0
        assert HOSTILE in page.locator("h1").inner_text()
        assert HOSTILE in page.locator("article:visible td").last.inner_text()
        assert visit.complaints == []
        assert visit.requests == [visit.url]


@pytest.mark.parametrize("javascript", [None, "charts"])
def test_a_page_of_nothing_or_without_charts_stands(
    browser: Browser, tmp_path: Path, javascript: str | None
) -> None:
    path = tmp_path / "page.html"
    report = Report((), "a baseline") if javascript else build([real_table(points=("prefill",))])
    text = as_html(report, charts_javascript() if javascript else None)
    path.write_text(text, encoding="utf-8")

    with Visit(browser, path) as visit:
        visit.page.goto(visit.url)
        visit.page.wait_for_load_state()

        assert visit.page.locator("h1").is_visible()
        assert visit.page.locator(".charts:visible").count() == 0
        assert visit.complaints == []
