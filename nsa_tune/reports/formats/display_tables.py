"""The tables of a report as texts, laid out by terminal, Markdown and HTML alike."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Status
from nsa_tune.reports.analysis.ceilings import share_text
from nsa_tune.reports.analysis.costs import Cost, worst_first
from nsa_tune.reports.analysis.crossovers import Line
from nsa_tune.reports.analysis.layer_steps import LayerSteps, Step
from nsa_tune.reports.analysis.report import QuestionReport, Section
from nsa_tune.reports.analysis.words import batch_title, question_title
from nsa_tune.reports.formats.plain import source_name

_WORST = 5


@dataclass(frozen=True, slots=True)
class DisplayTable:
    """One table to show; all cells are texts."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    """Indices of the columns to align to the right."""
    note: str = ""
    """Text under the title."""


DEMONSTRATION = (
    "This table was measured on a CPU, and nothing of it holds for a GPU. `nsa-tune run` on a "
    "machine with a GPU measures that."
)
NO_ANSWER = "No answer: no batch of a prefill or decode kernel was measured with two choices."
BASIS = (
    "Attention of one layer, as measured, without the rest of a pass. SGLang's default for sparse "
    "attention is that of passes without a prefill graph; within one it always takes MLA. The "
    "batches are the table's, not your traffic's: for those, `nsa-tune advise --trace`."
)


def answer_texts(section: Section) -> list[str]:
    """What to set and what it gives, a paragraph for each step; flags are between backticks."""
    if section.is_demonstration:
        return [f"Demonstration. {DEMONSTRATION}"]
    if not section.answers:
        return [NO_ANSWER]
    return [*(f"{answer.sentence} {answer.basis}" for answer in section.answers), BASIS]


def fingerprint(section: Section) -> list[tuple[str, str]]:
    """(name, value) of what the table of `section` is valid for and where it comes from."""
    key, table = section.key, section.table
    counts = Counter(row.status for row in table.measurements)
    measured = f"{counts[Status.OK]} ok"
    for status in (Status.FAILED, Status.WRONG):
        if counts[status]:
            measured += f", {counts[status]} {status}"
    return [
        ("GPU" if section.table.device.arch != "cpu" else "device", key.gpu),
        ("architecture", table.device.arch),
        ("driver", key.driver or "none"),
        ("model", key.model),
        ("local heads", str(key.heads)),
        ("KV layout", key.kv_layout),
        *key.libraries,
        ("timing protocol", key.protocol),
        ("measured", minute(table.measured_at)),
        ("measurements", measured),
        ("source", source_name(table.source)),
    ]


def minute(moment: str) -> str:
    """An ISO 8601 time to the minute; anything else as it is."""
    try:
        return datetime.fromisoformat(moment).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return moment or "unknown"


def display_tables(section: Section, baseline: str) -> Iterator[DisplayTable]:
    """Every table of `section`, in reading order; empty ones are left out."""
    every = [
        *crossover_tables(section),
        choices_table(section),
        cost_table(section, baseline),
        worst_table(section.questions, baseline),
        *(layer_table(layer, baseline) for layer in section.layers),
        failure_table(section),
    ]
    return (table for table in every if table.rows)


def crossover_tables(section: Section) -> list[DisplayTable]:
    """One table for each question, mode and axis."""
    return [
        crossover_table(question.name, lines)
        for question in section.questions
        for lines in question.line_groups
    ]


def crossover_table(question: str, lines: Sequence[Line]) -> DisplayTable:
    """The fastest choices along each of `lines`, which share mode and axis."""
    along = lines[0].slice
    names = tuple(name for name, _ in along.fixed)
    return DisplayTable(
        title=f"{question_title(question, along.mode)} by {along.unit.removesuffix(' each')}",
        columns=(*names, "fastest"),
        rows=tuple((*where, line.summary) for where, line in _folded(lines)),
        numeric=frozenset(range(len(names))),
        note=_legend(lines),
    )


def _legend(lines: Sequence[Line]) -> str:
    """What the brackets mean, and each limit once."""
    edges = [edge for line in lines for edge in line.edges]
    # Texts that differ only in numbers count as one limit.
    limits = {re.sub(r"\d+", "", edge.limit): edge.limit for edge in edges if edge.limit}
    words = ["(a-b): between a and b no choice is sure to win."] if len(edges) > len(limits) else []
    return " ".join([*words, *(f"(limit): {limit}." for limit in limits.values())])


def _folded(lines: Sequence[Line]) -> Iterator[tuple[tuple[str, ...], Line]]:
    """(fixed values, line). Neighbours with one choice throughout share a row."""

    def alike(line: Line) -> tuple[object, ...]:
        outer = line.slice.fixed[:-1]
        throughout = not line.edges and len(line.ranges) == 1
        return (outer, line.summary) if throughout else (outer, line.slice.fixed)

    for _, group in groupby(lines, key=alike):
        members = list(group)
        first, last = members[0].slice.fixed, members[-1].slice.fixed
        where = [str(value) for _, value in first]
        if first != last:
            where[-1] = f"{where[-1]} to {last[-1][1]}"
        yield tuple(where), members[0]


def choices_table(section: Section) -> DisplayTable:
    """The questions for which fewer than two choices were measured."""
    rows = [
        (question_title(question.name), ", ".join(question.measured) or "none")
        for question in section.questions
        if len(question.measured) < 2
    ]
    return DisplayTable("Questions with one measured choice", ("question", "choice"), tuple(rows))


def cost_table(section: Section, baseline: str) -> DisplayTable:
    """What the engine's baseline and the table cost against the best measured choice."""
    rows = [
        (question_title(question.name), str(cost.batches), *_cost(cost), cost.worst_batch,
         *(_cost(question.tuned_cost) if question.tuned_cost else ("-", "-")))
        for question in section.questions
        if (cost := question.default_cost) is not None
    ]  # fmt: skip
    return DisplayTable(
        title=f"Cost of the default ({baseline})",
        columns=("question", "batches", "mean", "worst", "worst batch", "table mean",
                 "table worst"),
        rows=tuple(rows),
        numeric=frozenset({1, 2, 3, 5, 6}),
        note="Time over that of the best measured choice: geometric mean and worst. The columns "
        "\"table\" are for the table's choices, on the batches that it was made from.",
    )  # fmt: skip


def cost_sentence(question: QuestionReport, baseline: str) -> str:
    """What the engine's baseline costs, in one sentence."""
    cost = question.default_cost
    if cost is None:
        return f"{baseline} takes a choice that was not measured."
    batches = counted(cost.batches, "batch", "batches")
    if cost.worst <= 1:
        return f"{baseline} takes the fastest choice on every measured batch ({cost.batches})."
    return (
        f"{baseline} takes {cost.geomean:.2f}x as long as the best choice (geometric mean of "
        f"{batches}), {cost.worst:.2f}x on the worst batch ({cost.worst_batch})."
    )


def _cost(cost: Cost) -> tuple[str, str]:
    return f"{cost.geomean:.3f}x", f"{cost.worst:.2f}x"


def worst_table(
    questions: Sequence[QuestionReport], baseline: str, most: int = _WORST
) -> DisplayTable:
    """The batches on which the engine's baseline costs most, `most` for each question."""
    rows = []
    for question in questions:
        for cell, cost in worst_first(question.cells)[:most]:
            assert cell.best is not None
            taken, best = cell.times[cell.default], cell.times[cell.best]
            rows.append(
                (question_title(question.name), cell.word, cell.default, f"{taken.latency_us:.1f}",
                 cell.best, f"{best.latency_us:.1f}", f"{cost:.2f}x")
            )  # fmt: skip
    return DisplayTable(
        title=f"Where the default ({baseline}) costs most",
        columns=("question", "batch", "default", "us", "best", "us", "cost"),
        rows=tuple(rows),
        numeric=frozenset({3, 5, 6}),
    )


def layer_table(layer: LayerSteps, baseline: str) -> DisplayTable:
    """Where the attention time of one batch's pass goes, step by step."""
    return DisplayTable(
        title=f"Attention time of a pass: {batch_title(Batch.parse(layer.batch))}",
        columns=("step", "taken", "us a layer", "us once a pass", "ms a pass", "of the pass",
                 "next best us", f"{baseline} takes", "us", "least us", "bound by", "of the limit"),
        rows=tuple(_step_row(step, layer) for step in layer.steps),
        numeric=frozenset({2, 3, 4, 5, 6, 8, 9, 11}),
        note=_layer_note(layer, baseline),
    )  # fmt: skip


def _step_row(step: Step, layer: LayerSteps) -> tuple[str, ...]:
    us, least = step.latency_us, step.least_us
    share = f"{us / layer.total_us:.0%}" if us is not None and layer.total_us else "-"
    return (
        step.name, step.arm or "-", _us(us), _us(step.pass_us),
        "-" if us is None else f"{us * layer.layers / 1e3:.3g}", share,
        _us(step.next_best_us), step.default or "-", _us(step.default_us), _us(least),
        step.bound or "-", share_text(least / us if us and least is not None else None),
    )  # fmt: skip


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _layer_note(layer: LayerSteps, baseline: str) -> str:
    """What the steps add up to, what choices decide of it, and what is not known."""
    if not layer.steps:
        return "No decision point of this model has batches of this mode."
    if len(layer.untimed) == len(layer.steps):
        return " ".join(
            ["No step has a time.", *(f"{step.name}: {step.note}." for step in layer.steps)]
        )
    word = counted(layer.layers, "layer")
    sums = f"{word} of each step take {_ms(layer.total_us, layer)} a pass"
    sums += f"; by the next best way of each step {_ms(layer.next_best_us, layer)}"
    if layer.default_us is not None:
        sums += f"; by {baseline}'s own choices {_ms(layer.default_us, layer)}"
    notes = [f"{step.name}: {step.note}." for step in layer.steps if step.note]
    lacking = ", ".join(step.name for step in layer.untimed)
    without = [f"Not counted: {lacking}."] if lacking else []
    return " ".join([f"{sums}.", *without, *notes])


def _ms(layer_us: float, layer: LayerSteps) -> str:
    more = layer_us / layer.total_us - 1 if layer.total_us else 0.0
    text = f"{layer_us * layer.layers / 1e3:.4g} ms"
    return f"{text} ({more:+.1%})" if more else text


def failure_table(section: Section) -> DisplayTable:
    """Arms that failed or gave wrong results, and why."""
    rows = [
        (failure.arm, failure.status, str(len(failure.batches)), failure.batches[0], failure.reason)
        for failure in section.failures
    ]
    return DisplayTable(
        title="Arms that failed",
        columns=("arm", "how", "batches", "first batch", "reason"),
        rows=tuple(rows),
        numeric=frozenset({2}),
    )
