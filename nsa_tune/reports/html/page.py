"""A report as one HTML page.

Everything out of a table is escaped or inserted as text; the Content-Security-Policy names the
page's own scripts and style by their hashes and allows nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from html import escape
from pathlib import Path

from nsa_tune.backend.types.records import Key
from nsa_tune.reports import charts
from nsa_tune.reports.content.report import Report
from nsa_tune.reports.html.markup import asset, attributes, packed_text, select
from nsa_tune.reports.html.views import VIEWS, Drawn, cards_of
from nsa_tune.reports.output.grids import fingerprint, title_of

__all__ = ["Frame", "as_html", "offline", "written"]

_CREDITS = (
    '<footer class="note">Charts by Vega, Vega-Lite and Vega-Embed, copyright University of '
    "Washington Interactive Data Lab and contributors, BSD-3-Clause licence.</footer>"
)
_ALL = "all"
Facts = Mapping[str, str]
"""What a section is filtered by."""


@dataclass(frozen=True, slots=True)
class Frame:
    """How a page gets its style and scripts."""

    head: str
    """Elements of the head."""
    end: str
    """Elements after the page's data."""
    has_charts: bool
    extra: str = ""
    """An element that stands above the tables."""


def as_html(report: Report, javascript: str | None = None) -> str:
    """The page of `report` as one file; `javascript` (`charts_javascript`) draws its charts.

    Without it the page has every table, and a sentence that says how to get charts.
    """
    return written(report, offline(javascript))


def offline(javascript: str | None) -> Frame:
    """The frame of a file: style and scripts are in it, and nothing else may be loaded.

    The charts' script is deflated, which makes a third of it; the policy names what it inflates to.
    """
    style, script = asset("page.css"), asset("page.js")
    scripts = [script] if javascript is None else [script, javascript]
    charts_script = "" if javascript is None else packed_text("nsa-tune-charts", javascript)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; "
        f"style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    return Frame(
        head=f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        f"<style>{style}</style>",
        end=f"{charts_script}<script>{script}</script>",
        has_charts=javascript is not None,
    )


def written(report: Report, frame: Frame) -> str:
    """The page of `report` in `frame`."""
    drawn = Drawn() if frame.has_charts else None
    facts = _facts(report)
    sections = [_section(report, i, facts[i], drawn) for i in range(len(report.sections))]
    data = ""
    if drawn is not None:
        every = {"themes": charts.THEMES, "panels": drawn.panels, "plots": drawn.plots}
        data = json.dumps(every, separators=(",", ":"))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(_title(report))}</title>",
            frame.head,
            "</head>",
            "<body>",
            '<a class="skip" href="#main">Skip to the tables</a>',
            _header(report, facts, frame),
            '<main id="main">',
            *sections,
            "</main>",
            _CREDITS if frame.has_charts else "",
            packed_text("nsa-tune-data", data),
            frame.end,
            "</body>",
            "</html>",
            "",
        ]
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _title(report: Report) -> str:
    gpus = dict.fromkeys(section.key.gpu for section in report.sections)
    return f"nsa-tune: {', '.join(gpus) or 'nothing measured'}"


def _header(report: Report, facts: Sequence[Facts], frame: Frame) -> str:
    note = "" if frame.has_charts else (
        '<p class="note">This page was written without charts: '
        "<code>pip install 'nsa-tune[report]'</code> adds them.</p>"
    )  # fmt: skip
    if not report.sections:
        note += "<p>Nothing is measured yet: <code>nsa-tune run</code> measures this machine.</p>"
    return (
        f"<header><h1>{escape(_title(report))}</h1>"
        f"<p>Which attention implementation is fastest for which batch, by measurement, and what "
        f"{escape(report.rule)} would have taken.</p>{note}{frame.extra}{_views(report)}"
        f'<form class="filters" hidden>{_filters(report, facts)}</form></header>'
    )


def _views(report: Report) -> str:
    """The buttons that show one view at a time; without the script all are shown."""
    if not report.sections:
        return ""
    buttons = "".join(
        f'<button type="button" data-view="{name}" aria-pressed="false">{escape(words)}</button>'
        for name, words in VIEWS.items()
    )
    return f'<nav class="views" aria-label="Views" hidden>{buttons}</nav>'


# --- filters

_NAMES = {
    "gpu": "GPU",
    "model": "Model",
    "heads": "Local heads",
    "kv": "KV layout",
    "database": "Database",
    "versions": "Versions",
}
_WITH_ALL = ("database", "versions")
"""Tables that differ in these only are worth seeing together."""


def _filters(report: Report, facts: Sequence[Facts]) -> str:
    """A list for each field in which the tables differ; the script shows them."""
    fields = {name: dict.fromkeys(one[name] for one in facts) for name in _NAMES}
    selects = [
        select(f"filter-{name}", _NAMES[name], [*([_ALL] if name in _WITH_ALL else []), *values])
        for name, values in fields.items()
        if len(values) > 1
    ]
    points = [point for section in report.sections for point in section.points]
    asked = {
        "point": dict.fromkeys(point.point.name for point in points),
        "question": dict.fromkeys(one.answer.name for point in points for one in point.answers),
    }
    selects += [
        select(f"filter-{name}", name.capitalize(), [_ALL, *values])
        for name, values in asked.items()
        if len(values) > 1
    ]
    return "".join(selects)


def _facts(report: Report) -> list[Facts]:
    """What the filters go by, for each section."""
    keys = [section.key for section in report.sections]
    differing = dict.fromkeys(
        name
        for key in keys
        for name, _, _ in keys[0].differences(key)
        if name not in ("gpu", "model", "heads", "kv_layout")
    )
    sources = {Path(section.table.source) for section in report.sections}
    return [
        {
            "gpu": key.gpu,
            "model": key.model,
            "heads": str(key.heads),
            "kv": key.kv_layout,
            "database": _database(Path(section.table.source), sources),
            "versions": _versions(key, differing),
        }
        for key, section in zip(keys, report.sections, strict=True)
    ]


def _database(path: Path, sources: Set[Path]) -> str:
    """The file's name; with its directory where another file has the same name."""
    # A text table holds one key: the other filters tell it from the next.
    if path.suffix == ".tsv" or str(path).startswith("shipped:"):
        return "text tables"
    alike = sum(other.name == path.name for other in sources)
    return str(path) if alike > 1 else path.name


def _versions(key: Key, names: Iterable[str]) -> str:
    """Driver, protocol and libraries in which the tables differ, in words."""
    known = {"driver": key.driver, "protocol": key.protocol, **dict(key.libraries)}
    return ", ".join(f"{name} {known.get(name) or 'none'}" for name in names)


# --- sections


def _section(report: Report, number: int, facts: Facts, drawn: Drawn | None) -> str:
    section = report.sections[number]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in fingerprint(section)
    )
    return (
        f'<section class="table"{attributes(facts.items())} aria-labelledby="title-{number}">'
        f'<h2 id="title-{number}">{escape(title_of(section))}</h2>'
        f'<dl class="card">{items}</dl>{cards_of(report, number, drawn)}</section>'
    )
