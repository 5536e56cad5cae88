"""Split decode attention in Triton against torch: splits, head blocks, empty places and rows."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.backend.kernels import split_sparse_mla
from nsa_tune.backend.kernels.sparse_mla import sparse_mla_reference
from nsa_tune.backend.kernels.split_sparse_mla import Shape

RANK, ROPE, SLOTS, SCALE = 128, 32, 500, 0.1


def operands(
    rows: int, heads: int, topk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + heads)
    q = torch.randn(rows, heads, RANK + ROPE, generator=generator).to(torch.bfloat16)
    pool = torch.randn(SLOTS, RANK + ROPE, generator=generator).to(torch.bfloat16)
    indices = torch.randint(SLOTS, (rows, topk), generator=generator, dtype=torch.int32)
    return q.to(device), pool.to(device), indices.to(device)


def error(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((given.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(
    ("rows", "heads", "topk", "splits"), [(1, 4, 256, 4), (3, 20, 192, 1), (2, 16, 200, 2)]
)
def test_it_computes_softmax_attention_over_each_rows_selection(
    kernel_device: torch.device, rows: int, heads: int, topk: int, splits: int
) -> None:
    q, pool, indices = operands(rows, heads, topk, kernel_device)

    shape = Shape(heads=16, keys=32, splits=splits, warps=4, stages=2)
    out = split_sparse_mla.split_sparse_mla(q, pool, indices, SCALE, RANK, shape)

    wanted = sparse_mla_reference(q, pool, indices, SCALE, RANK)
    assert out.shape == (rows, heads, RANK)
    assert error(out, wanted) < 0.01


@pytest.mark.parametrize("splits", [1, 4])
def test_empty_places_count_for_nothing_and_an_empty_row_is_zero(
    kernel_device: torch.device, splits: int
) -> None:
    q, pool, indices = operands(4, 4, 256, kernel_device)
    indices[0, 3:] = -1
    indices[1, :100] = -1
    indices[2] = -1

    shape = Shape(heads=16, keys=64, splits=splits, warps=4, stages=2)
    out = split_sparse_mla.split_sparse_mla(q, pool, indices, SCALE, RANK, shape)

    wanted = sparse_mla_reference(q, pool, indices, SCALE, RANK)
    assert error(out, wanted) < 0.01
    assert not out[2].any()


def test_the_default_shape_fills_the_device() -> None:
    assert split_sparse_mla.shape_of(1, 16, 2048, 132).splits == 64
    assert split_sparse_mla.shape_of(8, 16, 2048, 132).splits == 32
    assert split_sparse_mla.shape_of(256, 128, 2048, 132).splits == 1
    assert split_sparse_mla.shape_of(1, 16, 64, 132).splits == 2
