"""Chart specs: pure, compiled by the real Vega-Lite, and never by colour alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nsa_tune.reports.analysis.crossovers import Edge
from nsa_tune.reports.analysis.report import QuestionReport, Section, build
from nsa_tune.reports.charts.curves import curves
from nsa_tune.reports.charts.rows import (
    curve_rows,
    edge_rows,
    facet_of,
    map_cells,
    map_rows,
    map_size,
)
from nsa_tune.reports.charts.theme import THEMES, Rows, Spec, with_rows
from nsa_tune.reports.charts.winner_map import winner_map
from tests.reports.synthetic import real_table

vl_convert = pytest.importorskip("vl_convert")


@pytest.fixture(scope="module")
def section() -> Section:
    return build([real_table(ceilings=True)]).sections[0]


@pytest.fixture(scope="module")
def questions(section: Section) -> dict[str, QuestionReport]:
    return {question.name: question for question in section.questions if question.lines}


@pytest.fixture(params=["prefill_path", "sparse_prefill", "indexer_layout"])
def question(
    request: pytest.FixtureRequest, questions: dict[str, QuestionReport]
) -> QuestionReport:
    return questions[request.param]


def _map_rows(question: QuestionReport) -> Rows:
    return map_rows(map_cells({cell.batch: cell for cell in question.cells}, question.lines))


def _layers(spec: Spec) -> Iterator[Spec]:
    yield spec
    for layer in spec.get("layer", []):
        yield from _layers(layer)


def _encoded(spec: Spec) -> set[str]:
    """The data fields that a spec reads."""
    channels = [c for layer in _layers(spec) for c in layer.get("encoding", {}).values()]
    flat = [one for c in channels for one in (c if isinstance(c, list) else [c])]
    made = {t["as"] for layer in _layers(spec) for t in layer.get("transform", []) if "as" in t}
    return {one["field"] for one in flat if isinstance(one, dict) and "field" in one} - made


def test_charts_are_pure(question: QuestionReport) -> None:
    choices = question.measured

    assert winner_map("x", "y", choices, 9, 5) == winner_map("x", "y", choices, 9, 5)
    assert curves("x", choices) == curves("x", choices)
    assert json.loads(json.dumps(curves("x", choices))) == curves("x", choices)


def test_the_winner_map_compiles_and_reads_what_its_rows_have(question: QuestionReport) -> None:
    rows = _map_rows(question)
    spec = winner_map("new tokens", "prefix tokens", question.measured, *map_size(rows))

    assert _encoded(spec) <= rows[0].keys()
    assert _drawn(with_rows(spec, {"cells": rows}))


def test_a_map_of_few_batches_has_larger_cells_than_one_of_many() -> None:
    few, many = (winner_map("x", "y", ("a", "b"), *size) for size in ((2, 1), (40, 30)))

    for side in ("width", "height"):
        assert few[side]["step"] > many[side]["step"] >= 24


def test_a_map_is_as_large_as_its_largest_facet() -> None:
    cells = [
        {"facet": facet, "x": x, "y": y}
        for facet, xs, ys in (("one", 3, 2), ("two", 1, 5))
        for x in range(xs)
        for y in range(ys)
    ]

    assert map_size(cells) == (3, 5)
    assert map_size([]) == (1, 1)


def test_the_curves_compile_and_read_what_their_rows_have(question: QuestionReport) -> None:
    line = next(line for line in question.lines if line.edges)
    rows = curve_rows(question, line)
    spec = curves("new tokens", question.measured)

    known = {field for name in rows for field in rows[name][0]}
    assert _encoded(spec) <= known
    assert _drawn(with_rows(spec, rows))


def test_crossovers_close_together_share_one_label(question: QuestionReport) -> None:
    line = question.lines[0]
    edges = [Edge("a", "b", value, value - 1, value + 1) for value in (65, 67, 513)]

    rows = edge_rows(replace(line, edges=tuple(edges)))

    assert [row["label"] for row in rows] == ["64", "", "512"]


def test_a_line_from_zero_compiles(question: QuestionReport) -> None:
    line = question.lines[0]
    rows = curve_rows(question, line)
    rows["estimates"].append({**rows["estimates"][0], "x": 0})

    assert _drawn(with_rows(curves("prefix tokens", question.measured, from_zero=True), rows))


def test_layers_without_rows_are_left_out(question: QuestionReport) -> None:
    line = question.lines[-1]
    rows = {**curve_rows(question, line), "edges": []}

    spec = with_rows(curves("new tokens", question.measured), rows)

    assert not [one for one in spec["layer"] if one["data"]["name"] == "edges"]
    assert _drawn(spec)


def _drawn(spec: Spec) -> str:
    spec = {**spec, "params": [*spec.get("params", []), {"name": "dark", "value": False}]}
    if spec.get("width") == "container":
        spec["width"] = 400
    svg: str = vl_convert.vegalite_to_svg(spec, config=THEMES["light"])
    assert "NaN" not in svg
    return svg


def test_every_measured_cell_of_a_line_is_on_the_map(question: QuestionReport) -> None:
    rows = _map_rows(question)

    on_lines = {str(line.slice.batch(v)) for line in question.lines for v in line.slice.values}
    assert {row["batch"] for row in rows} == on_lines
    assert {row["facet"] for row in rows} == {facet_of(line) for line in question.lines}


def test_a_cell_is_sure_pale_or_hatched_by_its_verdict(
    questions: dict[str, QuestionReport],
) -> None:
    question = questions["prefill_path"]
    verdicts = {str(cell.batch): cell.verdict for cell in question.cells}

    kinds = {(verdicts[str(row["batch"])], row["kind"]) for row in _map_rows(question)}

    known = {("win", "sure"), ("only", "only"), ("tie", "pale"), ("unsure", "pale")}
    assert {("win", "sure"), ("only", "only")} <= kinds <= known


def test_a_forbidden_choice_is_named_with_its_limit(questions: dict[str, QuestionReport]) -> None:
    question = questions["prefill_path"]

    rows = [row for row in _map_rows(question) if row["kind"] == "only"]

    assert rows
    assert all("mha: dense attention" in str(row["limit"]) for row in rows)


def test_choices_differ_in_dash_and_shape_as_well_as_in_colour() -> None:
    choices = [f"choice {i}" for i in range(6)]

    spec = curves("x", choices)

    encodings = [layer.get("encoding", {}) for layer in _layers(spec)]
    for channel in ("strokeDash", "shape"):
        (encoded,) = [one[channel] for one in encodings if "scale" in one.get(channel, {})]
        assert len({json.dumps(mark) for mark in encoded["scale"]["range"]}) == len(choices)


@pytest.mark.parametrize("theme", THEMES)
def test_a_themes_colours_stand_out_from_its_page(theme: str) -> None:
    page = {"light": "#ffffff", "dark": "#161a21"}[theme]
    config: dict[str, Any] = THEMES[theme]

    assert _contrast(config["axis"]["labelColor"], page) >= 7
    # Two colours of the light palette (orange and sky) are light: dash and shape tell them too.
    assert all(_contrast(colour, page) >= 2 for colour in config["range"]["category"])


def _contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
