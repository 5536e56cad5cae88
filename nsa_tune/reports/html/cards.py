"""The cards of a page, by view: text and tables, and the data of the charts on them."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from nsa_tune.reports.analysis.answer import less_than_one
from nsa_tune.reports.analysis.crossovers import Line
from nsa_tune.reports.analysis.report import QuestionReport, Report, Section
from nsa_tune.reports.charts.rows import facet_of, map_cells, map_rows, map_size
from nsa_tune.reports.formats.display_tables import (
    BASIS,
    DEMONSTRATION,
    NO_ANSWER,
    choices_table,
    cost_sentence,
    cost_table,
    crossover_table,
    failure_table,
    layer_table,
    worst_table,
)
from nsa_tune.reports.html.chart_data import line_panel
from nsa_tune.reports.html.markup import article, code, figure, heading, html_table, note, said

VIEWS = {
    "crossovers": "Answer",
    "cost": "Default's cost",
    "layers": "Time by step",
    "failures": "Failures",
}
"""Name in the URL to the text on the button."""

_WORST = 10


Panels = dict[str, Any]
"""By card name, the data of its charts: a winner map, and the curves of a line to choose."""


def cards_of(report: Report, number: int, panels: Panels | None) -> str:
    """The cards of section `number`, whose charts are put into `panels`; without them if None."""
    section = report.sections[number]
    start = f"t{number}"
    cards = [
        _answer(section),
        *_crossovers(section, start, report.baseline, panels),
        *_costs(section, report.baseline),
        *_layers(section, report.baseline),
        _failures(section),
    ]
    return "".join(cards)


def _answer(section: Section) -> str:
    """What to set and what it gives, a number and a sentence for each step."""
    if section.is_demonstration:
        body = said("Demonstration", "", DEMONSTRATION)
    elif not section.answers:
        body = said("", "", NO_ANSWER)
    else:
        body = "".join(
            said(less_than_one(answer.gain), f"less attention time in {answer.step}",
                  answer.sentence, answer.basis)
            for answer in section.answers
        ) + f'<p class="note">{code(BASIS)}</p>'  # fmt: skip
    return article("crossovers", body, kind="answer")


def _crossovers(
    section: Section, start: str, baseline: str, panels: Panels | None
) -> Iterator[str]:
    for question in section.questions:
        for i, lines in enumerate(question.line_groups):
            name = f"{start}-{question.name}-{i}"
            if panels is not None:
                panels[name] = line_panel(question, lines)
            body = _panel(question, lines, baseline)
            yield article("crossovers", body, name=name)
    table = choices_table(section)
    if table.rows:
        yield article("crossovers", heading(table) + html_table(table))


def _panel(question: QuestionReport, lines: tuple[Line, ...], baseline: str) -> str:
    table = crossover_table(question.name, lines)
    return (
        f"<h3>{escape(table.title)}</h3><p>{escape(cost_sentence(question, baseline))}</p>"
        f'<div class="charts {_layout(question, lines)}" hidden>'
        f'<p class="pick"><label>Line <select class="line">{_options(lines)}</select></label> '
        f'<output class="sentence"></output></p>{figure("map")}{figure("curves")}</div>'
        f"{note(table.note)}{html_table(table)}"
    )


_WIDE = 17
"""Columns of a map that needs the page's whole width."""


def _layout(question: QuestionReport, lines: tuple[Line, ...]) -> str:
    """Whether map and curves stand side by side."""
    cells = map_rows(map_cells({cell.batch: cell for cell in question.cells}, lines))
    return "" if map_size(cells)[0] > _WIDE else "two"


def _options(lines: tuple[Line, ...]) -> str:
    groups: dict[str, list[str]] = {}
    for i, line in enumerate(lines):
        option = f'<option value="{i}">{escape(line.slice.label or "all")}</option>'
        groups.setdefault(facet_of(line), []).append(option)
    return "".join(
        f'<optgroup label="{escape(facet)}">{"".join(members)}</optgroup>'
        for facet, members in groups.items()
    )


def _costs(section: Section, baseline: str) -> Iterator[str]:
    table = cost_table(section, baseline)
    if not table.rows:
        yield article("cost", "<p>Nothing to compare: no batch was measured with two choices, or "
                      f"what {escape(baseline)} takes was not measured.</p>")  # fmt: skip
        return
    for shown in (table, worst_table(section.questions, baseline, _WORST)):
        if shown.rows:
            yield article("cost", heading(shown) + html_table(shown))


def _layers(section: Section, baseline: str) -> Iterator[str]:
    for layer in section.layers:
        table = layer_table(layer, baseline)
        yield article("layers", heading(table) + html_table(table))
    if not section.layers:
        yield article("layers", "<p>No batch as large as the typical ones was measured.</p>")


def _failures(section: Section) -> str:
    table = failure_table(section)
    if not table.rows:
        return article("failures", "<p>No arm failed, and none gave a wrong result.</p>")
    return article("failures", heading(table) + html_table(table))
