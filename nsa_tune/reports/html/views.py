"""The cards of each view: what a section of the page is made of, and what its script draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from nsa_tune.reports.content.crossovers import Line
from nsa_tune.reports.content.report import AnswerReport, PointReport, Report, Section
from nsa_tune.reports.html import packing
from nsa_tune.reports.html.markup import article, figure, grid_table, heading, note
from nsa_tune.reports.output.chart_rows import facet_of
from nsa_tune.reports.output.grids import (
    Grid,
    bundles_of,
    choices_grid,
    chunk_grid,
    cost_grid,
    cost_sentence,
    crossover_grid,
    failure_grid,
    roof_grid,
    worst_grid,
)

__all__ = ["VIEWS", "Drawn", "cards_of"]

VIEWS = {
    "crossovers": "Crossovers",
    "cost": "Default's cost",
    "chunks": "Chunk size",
    "roofline": "Roofline",
    "failures": "Failures",
}
"""Name in the URL to the words on the button."""

_WORST = 10


@dataclass(slots=True)
class Drawn:
    """What the script draws, by the name of its card; filled while the cards are written."""

    panels: dict[str, Any] = field(default_factory=dict)
    """A winner map and curves, with lines to choose from."""
    plots: dict[str, Any] = field(default_factory=dict)
    """One chart."""


def cards_of(report: Report, number: int, drawn: Drawn | None) -> str:
    """The cards of section `number`; without `drawn` there is nobody to draw charts."""
    section = report.sections[number]
    start = f"t{number}"
    cards = [
        *_crossovers(section, start, report.rule, drawn),
        *_costs(section, start, report.rule, drawn),
        *_chunks(section, start, report.rule, drawn),
        *_roofs(section, start, drawn),
        _failures(section),
    ]
    return "".join(cards)


# --- crossovers


def _crossovers(section: Section, start: str, rule: str, drawn: Drawn | None) -> Iterator[str]:
    for point, answer in _answers(section):
        for i, lines in enumerate(bundles_of(answer)):
            name = f"{start}-{answer.answer.name}-{i}"
            if drawn is not None:
                drawn.panels[name] = packing.line_panel(answer, lines)
            body = _panel(answer, lines, rule)
            question = answer.answer.name
            yield article("crossovers", body, name=name, point=point, question=question)
        if drawn is not None and (plot := packing.scatter_plot(answer)) is not None:
            yield _scatter(f"{start}-{answer.answer.name}-batches", point, answer, plot, drawn)
    grid = choices_grid(section)
    if grid.rows:
        yield article("crossovers", heading(grid) + grid_table(grid))


def _scatter(
    name: str, point: str, answer: AnswerReport, plot: dict[str, Any], drawn: Drawn
) -> str:
    drawn.plots[name] = plot
    question = answer.answer.name
    caption = (
        "The fastest choice of each batch that no map has a place for: its sequences are unequal, "
        "or no other batch shares its lengths. Those of one place stand side by side. Pale: tie "
        "or unsure. Hollow: no other is allowed."
    )
    body = (
        f"<h3>{escape(question)}, other batches</h3>"
        f'<div class="charts" hidden>{figure("plot", caption)}</div>'
    )
    return article("crossovers", body, name=name, point=point, question=question)


def _answers(section: Section) -> Iterator[tuple[str, AnswerReport]]:
    """(point's name, question) of all."""
    for point in section.points:
        for answer in point.answers:
            yield point.point.name, answer


def _panel(answer: AnswerReport, lines: tuple[Line, ...], rule: str) -> str:
    grid = crossover_grid(answer.answer.name, lines)
    return (
        f"<h3>{escape(grid.title)}</h3><p>{escape(cost_sentence(answer, rule))}</p>"
        f'<div class="charts two" hidden>'
        f'<p class="pick"><label>Line <select class="line">{_options(lines)}</select></label> '
        f'<output class="sentence"></output></p>{figure("map")}{figure("curves")}</div>'
        f"{note(grid.note)}{grid_table(grid)}"
    )


def _options(lines: tuple[Line, ...]) -> str:
    groups: dict[str, list[str]] = {}
    for i, line in enumerate(lines):
        option = f'<option value="{i}">{escape(line.slice.label or "all")}</option>'
        groups.setdefault(facet_of(line), []).append(option)
    return "".join(
        f'<optgroup label="{escape(facet)}">{"".join(members)}</optgroup>'
        for facet, members in groups.items()
    )


# --- what the default costs


def _costs(section: Section, start: str, rule: str, drawn: Drawn | None) -> Iterator[str]:
    grid = cost_grid(section, rule)
    if not grid.rows:
        yield article("cost", f"<p>No batch was measured with two choices, or {escape(rule)} takes "
                      "what was not measured: there is nothing to compare.</p>")  # fmt: skip
        return
    yield article("cost", heading(grid) + grid_table(grid))
    for point, answer in _answers(section):
        worst = _without_question(worst_grid([answer], rule, _WORST))
        plot = packing.cost_plot(answer) if drawn is not None else None
        name = f"{start}-cost-{answer.answer.name}"
        if not worst.rows and plot is None:
            continue
        charts = ""
        if drawn is not None and plot is not None:
            drawn.plots[name] = plot
            caption = (
                f"{rule}'s time over that of the best choice, one point a measured batch. Colour "
                "and shape: the best choice. At 1 the default is the best."
            )
            charts = f'<div class="charts" hidden>{figure("plot", caption)}</div>'
        table = f"<div>{note('The worst batches first:')}{grid_table(worst)}</div>"
        body = (
            f"<h3>{escape(answer.answer.name)}</h3><p>{escape(cost_sentence(answer, rule))}</p>"
            f'<div class="beside">{charts}{table if worst.rows else ""}</div>'
        )
        kind = name if plot is not None else ""
        yield article("cost", body, name=kind, point=point, question=answer.answer.name)


def _without_question(grid: Grid) -> Grid:
    """A table of one question, which its card names already."""
    return replace(
        grid,
        columns=grid.columns[1:],
        rows=tuple(row[1:] for row in grid.rows),
        numeric=frozenset(column - 1 for column in grid.numeric),
    )


# --- chunk sizes


def _chunks(section: Section, start: str, rule: str, drawn: Drawn | None) -> Iterator[str]:
    found = [point for point in section.points if point.chunks]
    for point in found:
        yield _chunk_card(point, f"{start}-chunks-{point.point.name}", rule, drawn)
    if not found:
        yield article(
            "chunks",
            "<p>No prompt longer than one chunk lies within what was measured, so there is nothing "
            "to cut into chunks: where one choice is left, a run measures nothing.</p>",
        )


def _chunk_card(point: PointReport, name: str, rule: str, drawn: Drawn | None) -> str:
    grid = chunk_grid(point, rule)
    charts = ""
    if drawn is not None:
        drawn.plots[name] = packing.chunk_plot(point, rule)
        caption = (
            "Prompt tokens a second through one layer's arms, one sequence. The big mark is "
            "the best chunk size of its prompt; hollow marks lie outside of what was measured."
        )
        charts = f'<div class="charts" hidden>{figure("plot", caption)}</div>'
    body = heading(grid) + charts + grid_table(grid)
    name = name if drawn is not None else ""
    return article("chunks", body, name=name, point=point.point.name)


# --- roofline and failures


def _roofs(section: Section, start: str, drawn: Drawn | None) -> Iterator[str]:
    found = [point for point in section.points if point.achieved]
    for point in found:
        name = f"{start}-roofline-{point.point.name}"
        grid = roof_grid(section, point)
        charts = ""
        if drawn is not None:
            drawn.plots[name] = packing.roof_plot(section, point)
            charts = f'<div class="charts" hidden>{figure("plot", _roof_caption(section))}</div>'
        body = heading(grid) + charts + grid_table(grid)
        name = name if drawn is not None else ""
        yield article("roofline", body, name=name, point=point.point.name)
    if not found:
        yield article("roofline", "<p>No arm was measured whose work is known.</p>")


def _roof_caption(section: Section) -> str:
    words = (
        "One point a measured batch and arm: what the arm must compute and move at least, over "
        "its time."
    )
    if section.ceilings is None:
        return words
    return f"{words} Grey: the copy bandwidth and matrix rate that this device reached."


def _failures(section: Section) -> str:
    grid = failure_grid(section)
    if not grid.rows:
        return article("failures", "<p>No arm failed, and none gave a wrong result.</p>")
    return article("failures", heading(grid) + grid_table(grid))
