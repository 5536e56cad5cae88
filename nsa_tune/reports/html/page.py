"""A report as one HTML page. Texts out of a table are escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from nsa_tune.reports.analysis.report import Report
from nsa_tune.reports.formats.display_tables import fingerprint
from nsa_tune.reports.formats.plain import source_name
from nsa_tune.reports.html.cards import VIEWS, Panels, cards_of
from nsa_tune.reports.html.frame import Frame, offline


def as_html(report: Report, javascript: str | None = None) -> str:
    """The page of `report` as one file; `javascript` (`charts_javascript`) draws its charts.

    Without it the page has every table, and tells how to get charts.
    """
    return written(report, offline(javascript))


def written(report: Report, frame: Frame) -> str:
    """The page of `report` in `frame`."""
    panels: Panels | None = {} if frame.has_charts else None
    titles = _titles(report)
    sections = [_section(report, i, title, panels) for i, title in enumerate(titles)]
    return frame.page(_title(report), _header(report, titles, frame), sections, panels)


def _title(report: Report) -> str:
    gpus = dict.fromkeys(section.key.gpu for section in report.sections)
    return f"nsa-tune: {', '.join(gpus) or 'nothing measured'}"


def _header(report: Report, titles: Sequence[str], frame: Frame) -> str:
    note = "" if frame.has_charts else (
        '<p class="note">This page was written without charts: '
        "<code>pip install '.[report]'</code> in nsa-tune's checkout adds them.</p>"
    )  # fmt: skip
    if not report.sections:
        note += (
            '<p class="lead">Nothing is measured here yet. <code>nsa-tune run</code> measures this '
            "machine; other machines are among the tables that ship.</p>"
        )
    return (
        f"<header><h1>{escape(_title(report))}</h1>{note}{frame.extra}"
        f'<form class="filters" hidden>{_filters(titles)}</form>{_views(report)}</header>'
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


def _filters(titles: Sequence[str]) -> str:
    """A drop-down list of the tables, where there are several."""
    options = "".join(f"<option>{escape(title)}</option>" for title in titles)
    select = f'<label>Table <select name="filter-table">{options}</select></label>'
    return select if len(titles) > 1 else ""


def _titles(report: Report) -> list[str]:
    """A title for each section; where several have the same, with what they differ in."""
    sections = report.sections
    differing = dict.fromkeys(
        name
        for section in sections
        for name, _, _ in sections[0].key.differences(section.key)
        if name not in ("gpu", "model", "heads", "kv_layout")
    )
    counts = Counter(section.title for section in sections)
    titles: list[str] = []
    for section in sections:
        versions = {"driver": section.key.driver, "protocol": section.key.protocol,
                    **dict(section.key.libraries)}  # fmt: skip
        more = (f"{name} {versions.get(name) or 'none'}" for name in differing)
        source = source_name(section.table.source)
        several = counts[section.title] > 1
        title = ", ".join([section.title, source, *more]) if several else section.title
        titles.append(f"{title} ({titles.count(title) + 1})" if title in titles else title)
    return titles


def _section(report: Report, number: int, title: str, panels: Panels | None) -> str:
    section = report.sections[number]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in fingerprint(section)
    )
    return (
        f'<section class="table" data-table="{escape(title)}" aria-labelledby="title-{number}">'
        f'<h2 id="title-{number}">{escape(title)}</h2>'
        f"{cards_of(report, number, panels)}"
        f'<details class="card"><summary>What the table is valid for: driver, versions, protocol'
        f"</summary><dl>{items}</dl></details></section>"
    )
