"""Selections: valid ones, and with the statistics that were asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.backend.points.selections import Selection, selected_keys

TOPK = 256


def selected(selection: Selection, *lens: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Selections of (prefix, new) sequences, and how many keys each row sees."""
    seen = torch.cat([prefix + 1 + torch.arange(new) for prefix, new in lens])
    new = torch.tensor([new for _, new in lens])
    first = torch.repeat_interleave(new.cumsum(0) - new, new)
    return selected_keys(selection, seen, first, TOPK, seed=7), seen


def overlap(keys: torch.Tensor) -> float:
    """Mean share that a row has in common with the row before."""
    pairs = zip(keys[:-1].tolist(), keys[1:].tolist(), strict=True)
    return sum(len(set(a) & set(b)) for a, b in pairs) / (len(keys) - 1) / keys.shape[1]


@settings(max_examples=30, deadline=None)
@given(
    overlapping=st.floats(0.1, 1.0),
    lens=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 40)), min_size=1, max_size=3),
)
def test_keys_are_causal_and_different_and_padding_comes_last(
    overlapping: float, lens: list[tuple[int, int]]
) -> None:
    keys, seen = selected(Selection(overlapping), *lens)

    for row, visible in zip(keys.tolist(), seen.tolist(), strict=True):
        count = min(visible, TOPK)
        assert len(set(row[:count])) == count
        assert min(row[:count]) >= 0
        assert max(row) < visible
        assert set(row[count:]) <= {-1}


@pytest.mark.parametrize("wanted", [0.1, 0.5, 0.8, 0.95, 1.0])
def test_neighbours_share_what_was_asked_for(wanted: float) -> None:
    keys, _ = selected(Selection(wanted), (20 * TOPK, 200))

    assert overlap(keys) == pytest.approx(wanted, abs=0.02)


def test_a_selection_without_overlap_is_random() -> None:
    keys, _ = selected(Selection(0.0, sinks=0.0, recent=0.0), (40 * TOPK, 100))

    assert overlap(keys) < 0.05


def test_sinks_and_recent_keys_are_always_selected() -> None:
    keys, seen = selected(Selection(0.6, sinks=1 / 16, recent=1 / 8), (5 * TOPK, 20))

    for row, visible in zip(keys.tolist(), seen.tolist(), strict=True):
        assert set(range(TOPK // 16)) <= set(row)
        assert set(range(visible - TOPK // 8, visible)) <= set(row)


def test_no_two_sequences_share_draws() -> None:
    keys, _ = selected(Selection(1.0, sinks=0.0, recent=0.0), (20 * TOPK, 1), (20 * TOPK, 1))

    assert overlap(keys) < 0.2
