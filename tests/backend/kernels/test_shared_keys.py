"""Keys of neighbouring queries: each is in one list, and merged attention is attention over all."""

from __future__ import annotations

import math

import pytest
import torch

from nsa_tune.backend.kernels.shared_keys import (
    Shared,
    merge_shared,
    merge_shared_reference,
    shared_keys,
)

TOPK, SLOTS = 128, 400


def selections(rows: int, device: torch.device) -> torch.Tensor:
    """[rows, TOPK] int32, different slots in each row; neighbours share many."""
    generator = torch.Generator().manual_seed(rows)
    kept = torch.rand(SLOTS, generator=generator)
    scores = kept + 0.3 * torch.rand(rows, SLOTS, generator=generator)
    out = scores.topk(TOPK, dim=1).indices.int()
    out[0, 5:] = -1
    if rows > 2:
        out[2] = -1
    return out.to(device)


def keys_of(part: Shared, place: int) -> set[int]:
    keys: list[int] = part.keys[place, : int(part.counts[place])].tolist()
    assert keys == [-1] or (min(keys) >= 0 and len(set(keys)) == len(keys))
    return set(keys) - {-1}


@pytest.mark.parametrize("tokens", [2, 4])
@pytest.mark.parametrize("rows", [1, 3, 8, 14])
def test_each_key_is_in_the_list_of_the_largest_group_that_shares_it(
    kernel_device: torch.device, tokens: int, rows: int
) -> None:
    indices = selections(rows, kernel_device)
    lists = shared_keys(indices, tokens)

    assert [part.tokens for part in lists] == [1, 2, 4][: 2 if tokens == 2 else 3]
    selected = [{key for key in row if key >= 0} for row in indices.tolist()]
    selected += [set()] * (len(lists[0].keys) - rows)
    for row, keys in enumerate(selected):
        of_row = [keys_of(part, row // part.tokens) for part in lists]
        assert set().union(*of_row) == keys
        assert sum(map(len, of_row)) == len(keys), "no key twice"
        for part, found in zip(lists, of_row, strict=True):
            larger = [size for size in (2, 4) if part.tokens < size <= tokens]
            for size in larger:
                group = selected[row // size * size : row // size * size + size]
                assert not found & set.intersection(*group)


@pytest.mark.parametrize(("tokens", "heads"), [(4, 4), (2, 8)])
def test_merged_attention_is_attention_over_all_keys(
    kernel_device: torch.device, tokens: int, heads: int
) -> None:
    rows, rank = 7, 16
    indices = selections(rows, kernel_device)
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(rows + 64, heads, rank, generator=generator).to(kernel_device)
    values = torch.randn(SLOTS, rank, generator=generator).to(kernel_device)

    def attend(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = query @ values[keys].T
        return scores.softmax(-1) @ values[keys], scores.logsumexp(-1) / math.log(2)

    lists = shared_keys(indices, tokens)
    outputs, lses = [], []
    for part in lists:
        output = torch.full((len(part.keys), 32, rank), torch.nan, device=kernel_device)
        lse = torch.full((len(part.keys), 32), torch.nan, device=kernel_device)
        for place, count in enumerate(part.counts.tolist()):
            keys = part.keys[place, :count].long()
            if int(keys[0]) >= 0:
                heads_of_tile = q.view(-1, rank)[place * part.tokens * heads :][:32]
                output[place], lse[place] = attend(heads_of_tile, keys)
        outputs.append(output.bfloat16())
        lses.append(lse)

    for merge in (merge_shared, merge_shared_reference):
        out = merge(lists, outputs, lses, rows, heads)
        assert out.shape == (rows, heads, rank)
        assert not out[2].any()
        for row in (0, 1, 3, 4, 5, 6):
            wanted, _ = attend(q[row], indices[row][indices[row] >= 0].long())
            assert torch.allclose(out[row].float(), wanted, atol=0.02)
