"""Scattered pages: every token has a slot of its own, found through the block table too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.points.paging import scatter, spread_keys

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), st.sampled_from([16, 64]))
def test_tokens_have_slots_of_their_own_that_the_block_table_leads_to(
    lens: list[int], page: int
) -> None:
    paging = scatter(lens, page, 4096, CPU)

    assert paging.slots.unique().numel() == sum(lens)
    assert paging.starts.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)]
    for row, length in enumerate(lens):
        own = paging.slots[paging.starts[row] : paging.starts[row + 1]]
        position = torch.arange(length)
        expected = paging.block_table[row, position // page] * page + position % page
        assert torch.equal(own, expected.int())


def test_pages_are_scattered_over_the_pool() -> None:
    pages = scatter([1024], 16, 16 * 4096, CPU).block_table[0]

    assert (pages.diff() != 1).sum() > 48, "hardly any two pages in a row are neighbours"


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(AssertionError, match="smaller than the batch"):
        scatter([100], 64, 64, CPU)


@given(count=st.integers(1, 64), more=st.lists(st.integers(1, 500), min_size=1, max_size=8))
def test_no_key_is_selected_twice(count: int, more: list[int]) -> None:
    """As no top-k does; a kernel may take a selection as a set."""
    seen = torch.tensor([[count + extra] for extra in more])
    jitter = torch.rand(len(more), count)
    jitter[0, 0] = 1.0

    keys = spread_keys(seen, torch.randperm(count), jitter)

    assert all(row.unique().numel() == count for row in keys)
    assert bool((keys >= 0).all() and (keys < seen).all())
