"""The HTML file as text: escaped, closed, and under a policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from nsa_tune._errors import ExtraMissing
from nsa_tune.reports.analysis.report import Report, build
from nsa_tune.reports.html.page import as_html
from nsa_tune.reports.html.vega_bundle import charts_javascript
from tests.reports.synthetic import hostile_table, real_table

HOSTILE = (
    "</script><script>window.hostile = 1</script><img src=x onerror=alert(1)>\"' \U0001f980 &amp;"
)
_VOID = {"meta", "link", "img", "br", "input"}


class _Page(HTMLParser):
    """Elements with their attributes, and the text of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.texts:
            self.texts[self.open[-1]][-1] += data


def _parsed(html: str) -> _Page:
    page = _Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


def _policy(page: _Page) -> dict[str, list[str]]:
    (policy,) = [
        attrs["content"] or ""
        for tag, attrs in page.elements
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    return {words[0]: words[1:] for part in policy.split("; ") for words in [part.split(" ")]}


@pytest.fixture(scope="module")
def report() -> Report:
    return build([real_table(), real_table(heads=16), real_table(heads=64)])


@pytest.fixture(scope="module")
def hostile() -> Report:
    return build([hostile_table(HOSTILE)])


@pytest.mark.parametrize("javascript", [None, "const made_up = 1;"])
def test_the_policy_allows_the_pages_own_script_and_style_only(
    report: Report, javascript: str | None
) -> None:
    page = _parsed(as_html(report, javascript))

    policy = _policy(page)
    scripts = list(zip(
        page.texts["script"], [one for one in page.elements if one[0] == "script"], strict=True
    ))  # fmt: skip
    run = [text for text, (_, attrs) in scripts if attrs.get("type") is None]
    # The charts' script is inflated by the page's own, and may run as it was written.
    run += [
        zlib.decompress(base64.b64decode(text)).decode()
        for text, (_, attrs) in scripts
        if attrs.get("id") == "nsa-tune-charts"
    ]
    assert policy["default-src"] == ["'none'"]
    assert policy["script-src"] == [_hash(text) for text in run]
    assert policy["style-src"] == [_hash(text) for text in page.texts["style"]]
    assert policy.keys() == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert len(run) == (1 if javascript is None else 2)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_nothing_is_loaded_from_anywhere(report: Report) -> None:
    page = _parsed(as_html(report, "const made_up = 1;"))

    assert not [tag for tag, attrs in page.elements if attrs.keys() & {"src", "srcset", "action"}]
    assert {attrs["href"] for _, attrs in page.elements if "href" in attrs} == {"#main"}
    assert not [tag for tag, attrs in page.elements if "style" in attrs]


def test_hostile_strings_never_become_markup(hostile: Report, report: Report) -> None:
    kinds = {tag for tag, _ in _parsed(as_html(report, "1")).elements}

    html = as_html(hostile, "1")

    page = _parsed(html)
    assert {tag for tag, _ in page.elements} <= kinds
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert "<script>window.hostile" not in html
    assert "&lt;script&gt;window.hostile" in html


def test_every_table_has_its_headings_and_rows(report: Report) -> None:
    html = as_html(report)

    for section in report.sections:
        for question in section.questions:
            for line in question.lines:
                if line.edges:
                    assert f"<td>{line.summary}</td>" in html
    assert html.count("<section") == 3
    assert "Cost of the default (SGLang 0.5.23)" in html
    assert "CUDA error: an illegal memory access was encountered" in html


def test_filters_are_offered_only_for_what_differs(report: Report) -> None:
    html = as_html(report)

    names = re.findall(r'<select name="([^"]*)"', html)
    assert names == ["filter-table"]


def test_without_charts_the_page_says_how_to_get_them(report: Report) -> None:
    html = as_html(report)

    assert "pip install &#x27;.[report]&#x27;" in html or "pip install '.[report]'" in html
    assert 'id="nsa-tune-data"></script>' in html
    assert len(html) < 300_000


def test_a_page_of_nothing_stands() -> None:
    html = as_html(Report((), "a baseline"))

    assert _parsed(html)
    assert "nsa-tune run" in html


def test_without_vl_convert_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)

    with pytest.raises(ExtraMissing, match=r"pip install '\.\[report\]'"):
        charts_javascript()


def test_the_bundle_cannot_end_its_own_element() -> None:
    pytest.importorskip("vl_convert")

    bundle = charts_javascript()

    assert "</script" not in bundle
    assert "<!--" not in bundle


def test_the_shipped_sizes_stay_under_two_megabytes(report: Report) -> None:
    pytest.importorskip("vl_convert")

    assert len(as_html(report, charts_javascript()).encode()) < 2_000_000


def test_a_database_of_ten_thousand_hostile_rows_makes_a_page_under_two_megabytes() -> None:
    pytest.importorskip("vl_convert")
    tables = [real_table(heads=heads) for heads in (128, 64, 32, 16, 8, 4)]
    tables += [real_table(heads=heads, driver="9") for heads in (128,)]
    named = [
        replace(table, key=replace(table.key, gpu=HOSTILE), source=HOSTILE) for table in tables
    ]
    many = sum(len(table.measurements) for table in named)

    html = as_html(build(named), charts_javascript())

    assert many >= 10_000
    assert len(html.encode()) < 2_000_000
    assert not any(name.startswith("on") for _, attrs in _parsed(html).elements for name in attrs)


def test_a_page_of_two_databases_of_one_name_does_not_say_where_they_lie() -> None:
    table = real_table(points=("indexer_layout",))
    page = as_html(
        build([replace(table, source=f"/home/someone/{place}/a.db") for place in ("one", "two")])
    )

    assert "fp8_packed, a.db</h2>" in page
    assert "fp8_packed, a.db (2)</h2>" in page
    assert "someone" not in page
