"""Charts as files, without a browser."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from nsa_tune._errors import ExtraMissing
from nsa_tune.reports.analysis.report import build
from nsa_tune.reports.charts.figures import figures_of
from nsa_tune.reports.charts.pictures import as_svg
from nsa_tune.reports.charts.theme import THEMES, Spec
from tests.reports.synthetic import real_table

pytest.importorskip("vl_convert")


@pytest.fixture(scope="module")
def figures() -> dict[str, Spec]:
    report = build([real_table(ceilings=True)])
    return figures_of(report)


@pytest.mark.parametrize("name", ["prefill-path-overview", "indexer-layout-overview"])
def test_an_svg_is_whole_and_has_the_colours_of_both_themes(
    figures: dict[str, Spec], name: str
) -> None:
    svg = as_svg(figures[name])

    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert len(re.findall("<path", svg)) > 20
    assert "NaN" not in svg
    style = svg.partition("</style>")[0]
    assert "prefers-color-scheme:dark" in style
    for theme in THEMES.values():
        assert theme["axis"]["labelColor"] in svg


def test_an_overview_names_the_line_that_it_shows(figures: dict[str, Spec]) -> None:
    svg = as_svg(figures["prefill-path-overview"])

    assert re.search(r"Prefill: MHA or MLA, prefix \d+: mla until \d+ new tokens", svg)
    assert "NVIDIA H100 80GB HBM3, deepseek-v3.2, 128 local heads, fp8_packed" in svg


def test_names_from_a_database_make_harmless_file_names() -> None:
    table = real_table(points=("indexer_layout",))
    hostile = replace(table, key=replace(table.key, gpu="../../etc/<b>\x00'"))

    names = figures_of(build([table, hostile]))

    assert len(names) == 2
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in names)
    assert not any(name.startswith(".") for name in names)


def test_without_vl_convert_the_error_names_the_extra(
    figures: dict[str, Spec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)

    with pytest.raises(ExtraMissing, match=r"pip install '\.\[report\]'"):
        as_svg(figures["indexer-layout-overview"])
