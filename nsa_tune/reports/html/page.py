"""A report as one HTML page. Texts out of a table are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from html import escape
from pathlib import Path

from nsa_tune.backend.types.records import Key
from nsa_tune.reports.analysis.report import Report
from nsa_tune.reports.analysis.words import question_title
from nsa_tune.reports.formats.display_tables import fingerprint
from nsa_tune.reports.html.cards import VIEWS, Drawn, cards_of
from nsa_tune.reports.html.frame import Frame, offline
from nsa_tune.reports.html.markup import attributes, select

_ALL = "all"
Facts = Mapping[str, str]
"""The values by which the page's filters choose sections."""


def as_html(report: Report, javascript: str | None = None) -> str:
    """The page of `report` as one file; `javascript` (`charts_javascript`) draws its charts.

    Without it the page has every table, and tells how to get charts.
    """
    return written(report, offline(javascript))


def written(report: Report, frame: Frame) -> str:
    """The page of `report` in `frame`."""
    drawn = Drawn() if frame.has_charts else None
    facts = _facts(report)
    sections = [_section(report, i, facts[i], drawn) for i in range(len(report.sections))]
    return frame.page(_title(report), _header(report, facts, frame), sections, drawn)


def _title(report: Report) -> str:
    gpus = dict.fromkeys(section.key.gpu for section in report.sections)
    return f"nsa-tune: {', '.join(gpus) or 'nothing measured'}"


def _header(report: Report, facts: Sequence[Facts], frame: Frame) -> str:
    note = "" if frame.has_charts else (
        '<p class="note">This page was written without charts: '
        "<code>pip install '.[report]'</code> in nsa-tune's checkout adds them.</p>"
    )  # fmt: skip
    if not report.sections:
        note += (
            '<p class="lead">Nothing is measured here yet: <code>nsa-tune run</code> measures this '
            "machine.</p>"
        )
    return (
        f"<header><h1>{escape(_title(report))}</h1>{note}{frame.extra}"
        f'<form class="filters" hidden>{_filters(report, facts)}</form>{_views(report)}</header>'
    )


def _views(report: Report) -> str:
    """Buttons that show one view at a time. Without the script all views are shown."""
    if not report.sections:
        return ""
    buttons = "".join(
        f'<button type="button" data-view="{name}" aria-pressed="false">{escape(words)}</button>'
        for name, words in VIEWS.items()
    )
    return f'<nav class="views" aria-label="Views" hidden>{buttons}</nav>'


# --- filters

_NAMES = {
    "table": "Table",
    "database": "Database",
    "versions": "Versions",
}
_WITH_ALL = ("database", "versions")
"""Filters that can also show all tables: those that differ only in these make a comparison."""


def _filters(report: Report, facts: Sequence[Facts]) -> str:
    """A drop-down list for each field in which the tables differ; the script shows them."""
    titles = {values["table"] for values in facts}
    # What differs between tables of one title makes a comparison; else the title suffices.
    names = _NAMES if len(titles) < len(facts) else ("table",)
    fields = {name: dict.fromkeys(values[name] for values in facts) for name in names}
    selects = [
        select(
            f"filter-{name}",
            _NAMES[name],
            {value: value for value in (*([_ALL] if name in _WITH_ALL else []), *values)},
        )
        for name, values in fields.items()
        if len(values) > 1
    ]
    questions = {
        question.name: question_title(question.name)
        for section in report.sections
        for question in section.questions
    }
    if len(questions) > 1:
        selects.append(select("filter-question", "Question", {_ALL: _ALL, **questions}))
    return "".join(selects)


def _facts(report: Report) -> list[Facts]:
    """The filter values of each section."""
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
            "table": section.title,
            "database": _database(Path(section.table.source), sources),
            "versions": _versions(key, differing),
        }
        for key, section in zip(keys, report.sections, strict=True)
    ]


def _database(path: Path, sources: Set[Path]) -> str:
    """The file's name, with that of its directory if another file has the same name."""
    # A text table holds one key, so the other filters suffice.
    if path.suffix == ".tsv" or str(path).startswith("shipped:"):
        return "text tables"
    alike = sum(other.name == path.name for other in sources)
    return f"{path.parent.name}/{path.name}" if alike > 1 else path.name


def _versions(key: Key, names: Iterable[str]) -> str:
    """Driver, protocol and libraries, as far as the tables differ in them."""
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
        f'<h2 id="title-{number}">{escape(section.title)}</h2>'
        f"{cards_of(report, number, drawn)}"
        f'<details class="card"><summary>What the table is valid for: driver, versions, protocol'
        f"</summary><dl>{items}</dl></details></section>"
    )
