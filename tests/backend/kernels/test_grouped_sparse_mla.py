"""Sparse attention of neighbouring rows in one tile: the union of their keys, and the outputs."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.backend.kernels.grouped_sparse_mla import grouped_sparse_mla, union_of
from nsa_tune.backend.kernels.sparse_mla import sparse_mla_reference

RANK, ROPE, SLOTS, TOPK = 32, 16, 300, 48


def selections(rows: int, device: torch.device) -> torch.Tensor:
    """Different slots in each row; neighbours share some."""
    generator = torch.Generator().manual_seed(rows)
    kept = torch.randperm(SLOTS, generator=generator)[: TOPK // 2].expand(rows, -1)
    rest = [torch.randperm(SLOTS, generator=generator) for _ in range(rows)]
    others = [slots[~torch.isin(slots, kept)][: TOPK - TOPK // 2] for slots in rest]
    return torch.cat((kept, torch.stack(others)), dim=1).int().to(device).contiguous()


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_a_union_has_every_key_once_and_says_whose_it_is(
    kernel_device: torch.device, tokens: int
) -> None:
    indices = selections(11, kernel_device)
    indices[3, 5:] = -1
    indices[10] = -1

    slots, owners, counts = union_of(indices, tokens, SLOTS)

    for group, count in enumerate(counts.tolist()):
        keys = slots[group, :count].tolist()
        assert keys == sorted(set(keys))
        for place, row in enumerate(indices[group * tokens : (group + 1) * tokens].tolist()):
            bits = owners[group, :count].int().tolist()
            theirs = {key for key, bit in zip(keys, bits, strict=True) if bit >> place & 1}
            assert theirs == {key for key in row if key >= 0}


@pytest.mark.parametrize(
    ("rows", "heads", "tokens"), [(5, 16, 1), (7, 8, 4), (9, 4, 8), (2, 16, 4)]
)
def test_it_computes_softmax_attention_over_each_rows_selection(
    kernel_device: torch.device, rows: int, heads: int, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(rows, heads, RANK + ROPE, generator=generator).bfloat16().to(kernel_device)
    pool = torch.randn(SLOTS, RANK + ROPE, generator=generator).bfloat16().to(kernel_device)
    indices = selections(rows, kernel_device)
    indices[1, 3:] = -1
    indices[0] = -1

    out = grouped_sparse_mla(q, pool, indices, 0.1, RANK, tokens)

    wanted = sparse_mla_reference(q, pool, indices, 0.1, RANK).float()
    assert (out.float() - wanted).norm() < 0.01 * wanted.norm()
    assert not out[0].any()
