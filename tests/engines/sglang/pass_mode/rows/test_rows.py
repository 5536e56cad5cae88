"""Parts of rows, and what is taken of a graph's outputs."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.engines.sglang.pass_mode.rows.rows import Rows, count_rows
from tests.engines.sglang.pass_mode.fakes import batch


@pytest.mark.parametrize("ends", [[2], [0, 3], [3, 1, 0]])
def test_the_last_rows_are_taken(ends: list[int]) -> None:
    logits = torch.arange(8.0).view(4, 2)
    found = Rows(None, 1, None, ends).of_ends(logits)
    copied = found.clone()
    logits.zero_()  # as the next replay of the same graph does

    assert torch.equal(found, copied)
    assert found[:, 0].tolist() == [2.0 * row for row in ends]
    assert Rows(None, 1, None, []).of_ends(logits) is None, "a part without ends"


@pytest.mark.parametrize(
    ("tokens", "expected"), [(None, [0, 1, 2, 3]), ([0, 1, 2, 3], [0, 1, 2, 3]), ([0, 3], [0, 3])]
)
def test_states_of_new_tokens_are_copied(tokens: list[int] | None, expected: list[int]) -> None:
    states = torch.arange(8.0).view(4, 2)
    chosen = None if tokens is None else torch.tensor(tokens)
    found = Rows(None, 2, chosen, []).of_tokens(states)
    states.zero_()

    assert found[:, 0].tolist() == [2.0 * row for row in expected]


@pytest.mark.parametrize("name", ["num_token_non_padded", "global_num_token_non_padded"])
def test_experts_on_several_ranks_are_told_of_all_rows(name: str) -> None:
    """Rows beyond that number would reach no expert."""
    extend = batch([0], [3])
    setattr(extend, name, torch.tensor(3, dtype=torch.int32))
    told = getattr(extend, name)
    count_rows(extend, 4)

    assert getattr(extend, name).item() == 4
    assert getattr(extend, name).dtype == torch.int32
    assert told.item() == 3
