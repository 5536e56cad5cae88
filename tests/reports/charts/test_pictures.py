"""Charts as files, without a browser."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nsa_tune._errors import ExtraMissing, NsaTuneError
from nsa_tune.reports.analysis.report import build
from nsa_tune.reports.charts.figures import Figure, figures_of
from nsa_tune.reports.charts.pictures import as_svg, write_pictures
from nsa_tune.reports.charts.theme import THEMES
from tests.reports.synthetic import real_table

pytest.importorskip("vl_convert")


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    report = build([real_table(ceilings=True)])
    return {figure.name: figure for figure in figures_of(report)}


@pytest.mark.parametrize("name", ["prefill-path-overview", "indexer-layout-overview"])
def test_an_svg_is_whole_and_has_the_colours_of_both_themes(
    figures: dict[str, Figure], name: str
) -> None:
    svg = as_svg(figures[name].spec)

    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert len(re.findall("<path", svg)) > 20
    assert "NaN" not in svg
    style = svg.partition("</style>")[0]
    assert "prefers-color-scheme:dark" in style
    for theme in THEMES.values():
        assert theme["axis"]["labelColor"] in svg


def test_an_overview_names_the_line_that_it_shows(figures: dict[str, Figure]) -> None:
    svg = as_svg(figures["prefill-path-overview"].spec)

    assert re.search(r"Prefill: MHA or MLA, prefix \d+: mla until \d+ new tokens", svg)
    assert "NVIDIA H100 80GB HBM3, deepseek-v3.2, 128 local heads, fp8_packed" in svg


def test_pictures_are_written_by_name(figures: dict[str, Figure], tmp_path: Path) -> None:
    some = [figures["indexer-layout-overview"], figures["prefill-path-overview"]]

    paths = list(write_pictures(some, tmp_path / "new"))

    assert [path.name for path in paths] == [
        "indexer-layout-overview.svg",
        "prefill-path-overview.svg",
    ]
    assert all(path.read_text(encoding="utf-8").startswith("<svg") for path in paths)


def test_a_place_that_cannot_be_written_is_a_sentence(
    figures: dict[str, Figure], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(NsaTuneError, match="give another directory with --out"):
        list(write_pictures([figures["indexer-layout-overview"]], tmp_path / "file" / "x"))


def test_names_from_a_database_make_harmless_file_names() -> None:
    table = real_table(points=("indexer_layout",))
    hostile = replace(table, key=replace(table.key, gpu="../../etc/<b>\x00'"))

    names = [figure.name for figure in figures_of(build([table, hostile]))]

    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in names)
    assert not any(name.startswith(".") for name in names)


def test_without_vl_convert_the_error_names_the_extra(
    figures: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)

    with pytest.raises(ExtraMissing, match=r"pip install '\.\[report\]'"):
        as_svg(figures["indexer-layout-overview"].spec)
