"""Crossovers along a line, on a made-up point whose arms meet where the test says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.reports.analysis.crossovers import Line
from nsa_tune.reports.analysis.report import build
from tests.reports.synthetic import FLAT, Cost, toy_point, toy_table


def _line(*, limit: int | None = None, spread: float = 0.002, **costs: Cost) -> Line:
    point = toy_point(limit)
    report = build([toy_table(point, spread=spread, **costs)], points={"toy": point})
    (line,) = report.sections[0].questions[0].lines
    return line


def test_two_arms_cross_where_their_costs_meet() -> None:
    line = _line()

    (edge,) = line.edges
    assert (edge.left, edge.right, edge.limit) == ("steep", "flat", "")
    assert edge.value == pytest.approx(100, abs=2)
    assert edge.low < 100 < edge.high


def test_the_interval_is_as_wide_as_the_noise() -> None:
    sharp, blurred = _line(spread=0.002).edges[0], _line(spread=0.1).edges[0]

    assert blurred.low < sharp.low
    assert blurred.high > sharp.high


def test_a_limit_ends_a_choice_exactly() -> None:
    line = _line(limit=1000, steep=lambda batch: 10 + 0.01 * batch.q_tokens)

    (edge,) = line.edges
    assert (edge.value, edge.low, edge.high) == (1001, 1000, 1001)
    assert edge.limit == "steep ends at 1000 tokens"
    assert line.summary == "steep until 1000 new tokens (limit), then flat"


def test_a_limit_beyond_the_crossover_does_not_hide_it() -> None:
    (edge,) = _line(limit=1000).edges

    assert edge.limit == ""
    assert edge.value == pytest.approx(100, abs=2)


def test_a_choice_that_always_wins_has_no_edge() -> None:
    line = _line(steep=lambda batch: 2 * FLAT(batch))

    assert line.edges == ()
    assert line.summary == "flat throughout"


def test_equal_times_are_a_tie_and_not_a_crossover() -> None:
    line = _line(steep=FLAT)

    assert line.edges == ()
    assert line.summary == "tie throughout"


def test_a_difference_inside_of_the_noise_is_unsure() -> None:
    line = _line(steep=lambda batch: 1.02 * FLAT(batch), spread=0.1)

    assert [(one.choice, one.verdict) for one in line.ranges] == [(None, "unsure")]


def test_a_tie_at_the_end_is_a_range_of_its_own() -> None:
    line = _line(steep=lambda batch: FLAT(batch) + (50 if batch.q_tokens < 64 else 0))

    assert [one.label for one in line.ranges] == ["flat", "tie"]
    assert line.edges == ()


def test_two_crossovers_are_two_edges() -> None:
    line = _line(
        steep=lambda batch: 10 + batch.q_tokens,
        flat=lambda batch: 40 + 0.1 * batch.q_tokens + batch.q_tokens**2 / 1000,
    )

    assert [(edge.left, edge.right) for edge in line.edges] == [
        ("steep", "flat"),
        ("flat", "steep"),
    ]
    assert line.edges[0].value < line.edges[1].low


def test_the_sentence_names_question_slice_value_and_interval() -> None:
    line = _line()

    edge = line.edges[0]
    assert line.sentence == (
        f"Prefill: toy path, prefix 0: steep until {edge.value - 1} new tokens "
        f"({edge.low}-{edge.high}), then flat"
    )


def test_samples_hold_only_allowed_choices() -> None:
    line = _line(limit=1000)

    assert all(("steep" in estimates) == (value <= 1000) for value, estimates in line.samples)


@settings(max_examples=30)
@given(
    st.floats(1, 1000), st.floats(0.01, 5), st.floats(1, 1000), st.floats(0.01, 5),
    st.none() | st.integers(2, 4000), st.floats(0.0005, 0.2),
)  # fmt: skip
def test_ranges_cover_the_line_and_edges_lie_between_them(
    start: float, slope: float, start2: float, slope2: float, limit: int | None, spread: float
) -> None:
    line = _line(
        limit=limit,
        spread=spread,
        steep=lambda batch: start + slope * batch.q_tokens,
        flat=lambda batch: start2 + slope2 * batch.q_tokens,
    )

    assert (line.ranges[0].start, line.ranges[-1].stop) == (1, 4096)
    for left, right in pairwise(line.ranges):
        assert left.stop + 1 == right.start
        assert left.choice != right.choice
    starts = [one.start for one in line.ranges]
    for edge in line.edges:
        assert edge.value in starts
        assert edge.low < edge.value <= edge.high
        assert edge.left != edge.right
