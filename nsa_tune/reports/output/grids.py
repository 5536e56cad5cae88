"""The tables of a report, as titles, columns and cells: one shape for every output format."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby

from nsa_tune.backend.types.records import Status
from nsa_tune.reports.content.chunks import ChunkCurve
from nsa_tune.reports.content.crossovers import Line
from nsa_tune.reports.content.default_cost import Cost, worst_first
from nsa_tune.reports.content.report import AnswerReport, PointReport, Section
from nsa_tune.reports.content.roofline import Achieved, share_text

__all__ = [
    "Grid",
    "bundles_of",
    "choices_grid",
    "chunk_grid",
    "cost_grid",
    "cost_sentence",
    "crossover_grid",
    "crossover_grids",
    "failure_grid",
    "fingerprint",
    "grids_of",
    "roof_grid",
    "title_of",
    "worst_grid",
]

_WORST = 5


@dataclass(frozen=True, slots=True)
class Grid:
    """One table of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    """Columns to align to the right."""
    note: str = ""
    """A sentence that stands under the title."""


def title_of(section: Section) -> str:
    """What the table of `section` is of, in one line."""
    key = section.key
    return f"{key.gpu}, {key.model}, {key.heads} local heads, {key.kv_layout}"


def fingerprint(section: Section) -> list[tuple[str, str]]:
    """(name, value) of everything that the table of `section` is valid for."""
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
        ("measured", _minute(table.measured_at)),
        ("measurements", measured),
        ("source", _file(table.source)),
    ]


def _file(source: str) -> str:
    """A source without its directories: a report is sent to others."""
    return source.rpartition("/")[2] or source


def _minute(moment: str) -> str:
    """An ISO 8601 time to the minute; anything else as it is."""
    try:
        return datetime.fromisoformat(moment).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return moment or "unknown"


def grids_of(section: Section, rule: str) -> Iterator[Grid]:
    """Every table of `section`, in reading order; empty ones are left out."""
    every = [
        *crossover_grids(section),
        choices_grid(section),
        cost_grid(section, rule),
        worst_grid(section.answers, rule),
        *(chunk_grid(point, rule) for point in section.points),
        *(roof_grid(section, point) for point in section.points if point.achieved),
        failure_grid(section),
    ]
    return (grid for grid in every if grid.rows)


def bundles_of(answer: AnswerReport) -> list[tuple[Line, ...]]:
    """The lines of `answer` that run along one axis in one mode, together."""
    groups = groupby(answer.lines, key=lambda line: (line.slice.mode, line.slice.axis))
    return [tuple(lines) for _, lines in groups]


def crossover_grids(section: Section) -> list[Grid]:
    """One table an answer, mode and axis."""
    return [
        crossover_grid(answer.answer.name, lines)
        for answer in section.answers
        for lines in bundles_of(answer)
    ]


def crossover_grid(answer: str, lines: Sequence[Line]) -> Grid:
    """The winner ranges along each of `lines`, which share mode and axis."""
    along = lines[0].slice
    names = tuple(name for name, _ in along.fixed)
    return Grid(
        title=f"{answer} by {along.unit.removesuffix(' each')} ({along.mode})",
        columns=(*names, "fastest"),
        rows=tuple((*where, line.summary) for where, line in _folded(lines)),
        numeric=frozenset(range(len(names))),
        note=_legend(lines),
    )


def _legend(lines: Sequence[Line]) -> str:
    """What the brackets mean, with each kind of hard limit once."""
    edges = [edge for line in lines for edge in line.edges]
    # Clauses that differ in their numbers only are one limit.
    limits = {re.sub(r"\d+", "", edge.limit): edge.limit for edge in edges if edge.limit}
    words = ["(a-b): neither wins surely between a and b."] if len(edges) > len(limits) else []
    return " ".join([*words, *(f"(limit): {limit}." for limit in limits.values())])


def _folded(lines: Sequence[Line]) -> Iterator[tuple[tuple[str, ...], Line]]:
    """(fixed values, line); neighbours without any edge and with one answer become one row."""

    def alike(line: Line) -> tuple[object, ...]:
        outer = line.slice.fixed[:-1]
        one = not line.edges and len(line.ranges) == 1
        return (outer, line.summary) if one else (outer, line.slice.fixed)

    for _, group in groupby(lines, key=alike):
        members = list(group)
        first, last = members[0].slice.fixed, members[-1].slice.fixed
        where = [str(value) for _, value in first]
        if first != last:
            where[-1] = f"{where[-1]} to {last[-1][1]}"
        yield tuple(where), members[0]


def choices_grid(section: Section) -> Grid:
    """The answers that leave nothing to cross, because one choice or none was measured."""
    rows = [
        (answer.answer.name, ", ".join(answer.measured) or "none")
        for answer in section.answers
        if len(answer.measured) < 2
    ]
    return Grid("Questions with one measured choice", ("question", "choice"), tuple(rows))


def cost_grid(section: Section, rule: str) -> Grid:
    """What the engine's rule and the table cost against the best measured choice."""
    rows = [
        (answer.answer.name, str(cost.batches), *_cost(cost), cost.worst_batch,
         *(_cost(answer.tuned_cost) if answer.tuned_cost else ("-", "-")))
        for answer in section.answers
        if (cost := answer.default_cost) is not None
    ]  # fmt: skip
    return Grid(
        title=f"Cost of the default ({rule})",
        columns=("question", "batches", "mean", "worst", "worst batch", "table mean",
                 "table worst"),
        rows=tuple(rows),
        numeric=frozenset({1, 2, 3, 5, 6}),
        note="Time over that of the best measured choice: geometric mean and worst. The table's "
        "is on the batches that it was made from.",
    )  # fmt: skip


def cost_sentence(answer: AnswerReport, rule: str) -> str:
    """What the engine's rule costs on `answer`, in one sentence."""
    cost = answer.default_cost
    if cost is None:
        return f"{rule} takes a choice that was not measured."
    if cost.worst <= 1:
        return f"{rule} takes the fastest choice on all {cost.batches} measured batches."
    return (
        f"{rule} costs {cost.geomean:.2f}x the best choice's time in the geometric mean of "
        f"{cost.batches} batches, {cost.worst:.2f}x on the worst ({cost.worst_batch})."
    )


def _cost(cost: Cost) -> tuple[str, str]:
    return f"{cost.geomean:.3f}x", f"{cost.worst:.2f}x"


def worst_grid(answers: Sequence[AnswerReport], rule: str, most: int = _WORST) -> Grid:
    """The batches on which the engine's rule costs most: of each answer the `most` worst."""
    rows = []
    for answer in answers:
        for cell, cost in worst_first(answer.cells)[:most]:
            assert cell.best is not None
            taken, best = cell.times[cell.default], cell.times[cell.best]
            rows.append(
                (answer.answer.name, cell.word, cell.default, f"{taken.latency_us:.1f}",
                 cell.best, f"{best.latency_us:.1f}", f"{cost:.2f}x")
            )  # fmt: skip
    return Grid(
        title=f"Where the default ({rule}) costs most",
        columns=("question", "batch", "default", "us", "best", "us", "cost"),
        rows=tuple(rows),
        numeric=frozenset({3, 5, 6}),
    )


def chunk_grid(point: PointReport, rule: str) -> Grid:
    """For each prompt length the chunk size that attention likes best, and what that is worth."""
    rows = []
    for curve in point.chunks:
        best, worst = curve.best, max(curve.points, key=lambda one: one.total_us)
        by_rule = "-" if best.default_us is None else _rate(curve.rate(best.default_us))
        rows.append(
            (str(curve.prompt), str(best.chunk), _rate(curve.rate(best.total_us)), by_rule,
             str(worst.chunk), _rate(curve.rate(worst.total_us)), ", ".join(best.arms))
        )  # fmt: skip
    return Grid(
        title=f"Chunk size ({point.point.name})",
        columns=("prompt", "best chunk", "tokens/s", rule, "worst chunk", "tokens/s", "arms"),
        rows=tuple(rows),
        numeric=frozenset(range(6)),
        note=_chunk_note(point.chunks),
    )


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s / 1e6:.3g} M"


def _chunk_note(curves: Sequence[ChunkCurve]) -> str:
    """What the rates are of, and from which chunk size on a limit takes an arm away."""
    from_chunk: dict[str, tuple[int, str]] = {}
    for curve in curves:
        for one in curve.points:
            for arm, clause in one.limits.items():
                if arm not in from_chunk or one.chunk < from_chunk[arm][0]:
                    from_chunk[arm] = one.chunk, clause
    alike: dict[tuple[int, str], list[str]] = defaultdict(list)
    for arm, limit in from_chunk.items():
        alike[limit].append(arm)
    limits = (
        f"No {' or '.join(arms)} in chunks of {chunk} and more: {clause}."
        for (chunk, clause), arms in alike.items()
    )
    return " ".join(["One layer, one sequence.", *limits])


def roof_grid(section: Section, point: PointReport) -> Grid:
    """The rates that each arm came to, and how near that is to what the device reached."""
    groups: dict[str, list[Achieved]] = defaultdict(list)
    for one in point.achieved:
        groups[one.arm].append(one)
    return Grid(
        title=f"Achieved rates ({point.point.name})",
        columns=("arm", "batches", "most TFLOP/s", "most TB/s", "median of roof", "best of roof",
                 "bound by", "best batch"),
        rows=tuple(_roof_row(arm, own) for arm, own in groups.items()),
        numeric=frozenset(range(1, 6)),
        note=_ceilings(section),
    )  # fmt: skip


def _roof_row(arm: str, own: Sequence[Achieved]) -> tuple[str, ...]:
    ordered = sorted(own, key=lambda one: (one.share or 0.0, one.flops_per_s))
    middle, best = ordered[len(ordered) // 2], ordered[-1]
    shares = [share_text(one.share) for one in (middle, best)]
    flops, moved = (max(rates) / 1e12 for rates in zip(
        *((one.flops_per_s, one.bytes_per_s) for one in own), strict=True))  # fmt: skip
    return (arm, str(len(own)), f"{flops:.3g}", f"{moved:.3g}", *shares, best.bound or "-",
            best.batch)  # fmt: skip


def _ceilings(section: Section) -> str:
    ceilings = section.ceilings
    if ceilings is None:
        return "Neither copy bandwidth nor matrix rate was measured, so there is no roof."
    rates = ", ".join(f"{name} {peak / 1e12:.0f}" for name, peak in ceilings.flops_per_s.items())
    return f"Measured: copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, TFLOP/s of {rates}."


def failure_grid(section: Section) -> Grid:
    """Arms that failed or were wrong, and why."""
    rows = [
        (one.arm, one.status, str(len(one.batches)), one.batches[0], one.reason)
        for one in section.failures
    ]
    return Grid(
        title="Arms that failed",
        columns=("arm", "how", "batches", "first batch", "reason"),
        rows=tuple(rows),
        numeric=frozenset({2}),
    )
