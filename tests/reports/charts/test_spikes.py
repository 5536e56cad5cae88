"""One noisy measurement does not set the axis of all others, and is named."""

from __future__ import annotations

import pytest

from nsa_tune.reports.charts.spikes import calm_curves
from nsa_tune.reports.charts.theme import Rows


def _measured(*times: float, choice: str = "a") -> Rows:
    return [{"choice": choice, "x": 4**i, "us": us} for i, us in enumerate(times)]


@pytest.mark.parametrize(
    "times", [(10, 9000, 30, 40), (9000, 20, 30, 40), (10, 20, 30, 90_000)],
    ids=["middle", "left", "right"],
)  # fmt: skip
def test_a_time_far_above_those_beside_it_is_not_drawn(times: tuple[float, ...]) -> None:
    shown = calm_curves({"measured": _measured(*times), "edges": []})

    spike = max(times)
    assert [row["us"] for row in shown.rows["measured"]] == [us for us in times if us != spike]
    assert shown.most == max(us for us in times if us != spike)
    assert shown.note == f"Not drawn, as noise: a {spike} us at {4 ** times.index(spike)}."


@pytest.mark.parametrize(
    "times", [(10, 40, 160, 640, 2560), (10, 10, 10, 10, 45), (10,), ()], ids=str
)
def test_times_that_grow_with_the_length_are_all_drawn(times: tuple[float, ...]) -> None:
    data = {"measured": _measured(*times)}

    assert calm_curves(data) == (data, None, "")


def test_estimates_that_follow_a_spike_are_not_drawn_either() -> None:
    estimates = [{"x": x, "choice": "a", "us": us} for x, us in ((1, 11), (2, 500), (4, 8000))]
    shown = calm_curves({"measured": _measured(10, 9000, 30), "estimates": estimates})

    assert [row["x"] for row in shown.rows["estimates"]] == [1]
