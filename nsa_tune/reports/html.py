"""A report as one HTML file that needs no network.

Everything out of a table is escaped or inserted as text; the Content-Security-Policy names the
page's own scripts and style by their hashes and allows nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from nsa_tune._errors import ExtraMissing
from nsa_tune.reports import charts
from nsa_tune.reports.chart_rows import curve_rows, facet_of, map_rows
from nsa_tune.reports.crossovers import Line
from nsa_tune.reports.grids import (
    Grid,
    bundles_of,
    choices_grid,
    cost_grid,
    cost_sentence,
    crossover_grid,
    failure_grid,
    fingerprint,
    title_of,
    worst_grid,
)
from nsa_tune.reports.report import AnswerReport, Report, Section
from nsa_tune.reports.slices import UNITS

__all__ = ["as_html", "charts_javascript"]

_CREDITS = (
    '<footer class="note">Charts by Vega, Vega-Lite and Vega-Embed, copyright University of '
    "Washington Interactive Data Lab and contributors, BSD-3-Clause licence.</footer>"
)
_EMBED = "window.nsaTuneEmbed = vegaEmbed;"


@cache
def charts_javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, out of the installed vl-convert.

    Raises:
        ExtraMissing: when vl-convert is not installed.
    """
    try:
        import vl_convert
    except ModuleNotFoundError:
        raise ExtraMissing.of("drawing charts", "report") from None
    # The bundle declares its names at the top level: a function keeps them off the page.
    bundle = f"(() => {{{vl_convert.javascript_bundle(_EMBED)}\n}})();"
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def as_html(report: Report, javascript: str | None = None) -> str:
    """The page of `report`; `javascript` (`charts_javascript`) draws its charts.

    Without it the page has every table, and a sentence that says how to get charts.
    """
    style, script = _asset("page.css"), _asset("page.js")
    scripts = [script] if javascript is None else [javascript, script]
    data = _packed({"themes": charts.THEMES, "panels": _panels(report)}) if javascript else ""
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; "
        f"style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(_title(report))}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            '<a class="skip" href="#main">Skip to the tables</a>',
            _header(report, javascript is not None),
            '<main id="main">',
            *(_section(i, section, report.rule) for i, section in enumerate(report.sections)),
            "</main>",
            _CREDITS if javascript else "",
            f'<script type="text/plain" id="nsa-tune-data">{data}</script>',
            *(f"<script>{text}</script>" for text in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


def _asset(name: str) -> str:
    return resources.files("nsa_tune.reports").joinpath("assets").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _packed(value: object) -> str:
    """`value` as JSON, deflated, in base64: a tenth of the text, and nothing that is markup."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(text, 9)).decode()


def _title(report: Report) -> str:
    gpus = dict.fromkeys(section.key.gpu for section in report.sections)
    return f"nsa-tune: {', '.join(gpus) or 'nothing measured'}"


# --- text


def _header(report: Report, has_charts: bool) -> str:
    note = "" if has_charts else (
        '<p class="note">This file was written without charts: '
        "<code>pip install 'nsa-tune[report]'</code> adds them.</p>"
    )  # fmt: skip
    if not report.sections:
        note += "<p>Nothing is measured yet: <code>nsa-tune run</code> measures this machine.</p>"
    return (
        f"<header><h1>{escape(_title(report))}</h1>"
        f"<p>Which attention implementation is fastest for which batch, by measurement, and what "
        f"{escape(report.rule)} would have taken.</p>{note}{_filters(report)}</header>"
    )


def _filters(report: Report) -> str:
    """A select for each field in which the tables differ; the script shows them."""
    fields: dict[str, list[str]] = {}
    for section in report.sections:
        for name, value in _facts(section).items():
            fields.setdefault(name, []).append(value)
    names = {"gpu": "GPU", "model": "Model", "heads": "Local heads", "kv": "KV layout"}
    selects = [
        _select(f"filter-{name}", names[name], list(dict.fromkeys(values)))
        for name, values in fields.items()
        if len(set(values)) > 1
    ]
    questions = dict.fromkeys(
        answer.answer.name for section in report.sections for answer in section.answers
    )
    if len(questions) > 1:
        selects.append(_select("filter-question", "Question", ["all", *questions]))
    return f'<form class="filters" hidden>{"".join(selects)}</form>' if selects else ""


def _facts(section: Section) -> dict[str, str]:
    key = section.key
    return {"gpu": key.gpu, "model": key.model, "heads": str(key.heads), "kv": key.kv_layout}


def _select(name: str, label: str, values: list[str]) -> str:
    options = "".join(f"<option>{escape(value)}</option>" for value in values)
    return f'<label>{escape(label)} <select name="{name}">{options}</select></label>'


def _section(number: int, section: Section, rule: str) -> str:
    facts = "".join(f' data-{name}="{escape(value)}"' for name, value in _facts(section).items())
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in fingerprint(section)
    )
    panels = "".join(
        _panel(name, answer, lines, rule) for name, answer, lines in _bundles(number, section)
    )
    rest = [choices_grid(section), cost_grid(section, rule), worst_grid(section, rule),
            failure_grid(section)]  # fmt: skip
    tables = "".join(
        f"<article>{_heading(grid)}{_table(grid)}</article>" for grid in rest if grid.rows
    )
    return (
        f'<section class="table"{facts} aria-labelledby="title-{number}">'
        f'<h2 id="title-{number}">{escape(title_of(section))}</h2>'
        f'<dl class="card">{items}</dl>{panels}{tables}</section>'
    )


def _bundles(number: int, section: Section) -> Iterator[tuple[str, AnswerReport, tuple[Line, ...]]]:
    """(name on the page, answer, lines) of each panel of `section`."""
    for answer in section.answers:
        for i, lines in enumerate(bundles_of(answer)):
            yield f"t{number}-{answer.answer.name}-{i}", answer, lines


def _panel(name: str, answer: AnswerReport, lines: tuple[Line, ...], rule: str) -> str:
    grid = crossover_grid(answer.answer.name, lines)
    groups: dict[str, list[str]] = {}
    for i, line in enumerate(lines):
        option = f'<option value="{i}">{escape(line.slice.label or "all")}</option>'
        groups.setdefault(facet_of(line), []).append(option)
    options = "".join(
        f'<optgroup label="{escape(facet)}">{"".join(members)}</optgroup>'
        for facet, members in groups.items()
    )
    question = escape(answer.answer.name)
    return (
        f'<article class="panel" id="{escape(name)}" data-question="{question}">'
        f"<h3>{escape(grid.title)}</h3><p>{escape(cost_sentence(answer, rule))}</p>"
        f'<div class="charts" hidden>'
        f'<p class="pick"><label>Line <select class="line">{options}</select></label> '
        f'<output class="sentence"></output></p>'
        f'<figure class="map"><figcaption></figcaption><div class="chart"></div></figure>'
        f'<figure class="curves"><figcaption></figcaption><div class="chart"></div></figure>'
        f"</div>{_note(grid)}{_table(grid)}</article>"
    )


def _heading(grid: Grid) -> str:
    return f"<h3>{escape(grid.title)}</h3>{_note(grid)}"


def _note(grid: Grid) -> str:
    return f'<p class="note">{escape(grid.note)}</p>' if grid.note else ""


def _table(grid: Grid) -> str:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        return "".join(
            f"<{tag}{' class=number' if i in grid.numeric else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in grid.rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(grid.title)}">'
        f"<table><thead><tr>{cells('th', grid.columns)}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


# --- charts


def _panels(report: Report) -> dict[str, Any]:
    """What the script draws, by panel."""
    return {
        name: _drawn(answer, lines)
        for number, section in enumerate(report.sections)
        for name, answer, lines in _bundles(number, section)
    }


def _drawn(answer: AnswerReport, lines: tuple[Line, ...]) -> dict[str, Any]:
    along = lines[0].slice
    x_title, y_title = along.unit.removesuffix(" each"), UNITS[along.fixed[-1][0]]
    starts = {line.slice.values[0] for line in lines}
    return {
        "map": charts.winner_map(x_title, y_title, answer.measured),
        "cells": _columns(map_rows(answer, lines)),
        "curves": charts.curves(x_title, answer.measured, from_zero=0 in starts),
        "first": _first_shown(lines),
        "lines": [
            {
                "facet": facet_of(line),
                "y": line.slice.fixed[-1][1],
                "label": line.slice.label,
                "sentence": line.summary,
                "rows": {name: _columns(rows) for name, rows in curve_rows(answer, line).items()},
            }
            for line in lines
        ],
    }


def _first_shown(lines: tuple[Line, ...]) -> int:
    """The line to begin with: the first on which times cross."""
    crossing = (i for i, line in enumerate(lines) if any(not edge.limit for edge in line.edges))
    return next(crossing, 0)


def _columns(rows: charts.Rows) -> dict[str, Any]:
    """`rows` by field: names come once, and like values side by side deflate well."""
    return {field: [row[field] for row in rows] for field in (rows[0] if rows else ())}
