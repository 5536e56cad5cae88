"""Sparse attention in Triton: both layouts, splits, padding and empty rows, against torch."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.backend.kernels import packed_fp8, sparse_mla

RANK, ROPE, SLOTS = 128, 32, 500


def operands(
    rows: int, heads: int, topk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + heads)
    q = torch.randn(rows, heads, RANK + ROPE, generator=generator).to(torch.bfloat16)
    latents = torch.randn(SLOTS, RANK + ROPE, generator=generator).to(torch.bfloat16)
    indices = torch.randint(SLOTS, (rows, topk), generator=generator, dtype=torch.int32)
    return q.to(device), latents.to(device), indices.to(device)


def error(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((given.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(("rows", "heads", "topk"), [(1, 4, 128), (3, 20, 512), (40, 16, 96)])
@pytest.mark.parametrize("packed", [False, True])
def test_it_computes_softmax_attention_over_each_rows_selection(
    kernel_device: torch.device, rows: int, heads: int, topk: int, packed: bool
) -> None:
    q, latents, indices = operands(rows, heads, topk, kernel_device)
    pool = latents
    if packed:
        pool = packed_fp8.quantize_reference(latents, RANK)
        everything = torch.arange(SLOTS, device=kernel_device)
        latents = packed_fp8.dequantize_reference(pool, everything, RANK, ROPE)

    out = sparse_mla.sparse_mla(q, pool, indices, 0.1, RANK)
    wanted = sparse_mla.sparse_mla_reference(q, latents, indices, 0.1, RANK)

    assert out.shape == (rows, heads, RANK)
    assert error(out, wanted) < 0.01


def test_empty_places_count_for_nothing_and_an_empty_row_is_zero(
    kernel_device: torch.device,
) -> None:
    q, latents, indices = operands(4, 4, 512, kernel_device)
    indices[0, 3:] = -1
    indices[1, :100] = -1
    indices[2] = -1

    out = sparse_mla.sparse_mla(q, latents, indices, 0.1, RANK)

    assert error(out, sparse_mla.sparse_mla_reference(q, latents, indices, 0.1, RANK)) < 0.01
    few = sparse_mla.sparse_mla_reference(q[:1], latents, indices[:1, :3], 0.1, RANK)
    assert error(out[:1], few) < 0.01
    assert not out[2].any()


def test_all_e4m3_values_are_widened_exactly(kernel_device: torch.device) -> None:
    # One key a row, so that attention returns the key itself.
    every = torch.arange(256, dtype=torch.uint8)
    every = torch.where(every.view(torch.float8_e4m3fn).float().isfinite(), every, 0)
    values = torch.zeros(2, RANK + 4 + 2 * ROPE, dtype=torch.uint8)
    values[:, :RANK] = every.view(2, RANK)
    values[:, RANK : RANK + 4] = torch.tensor([1.0]).view(torch.uint8)
    q, _, _ = operands(2, 4, 32, kernel_device)
    indices = torch.full((2, 32), -1, dtype=torch.int32, device=kernel_device)
    indices[:, 0] = torch.arange(2, device=kernel_device)

    out = sparse_mla.sparse_mla(q, values.to(kernel_device), indices, 0.1, RANK)

    wanted = every.view(2, RANK).view(torch.float8_e4m3fn).to(torch.bfloat16).to(kernel_device)
    assert torch.equal(out[:, 0], wanted)


def test_splits_fill_the_device_and_keep_whole_steps() -> None:
    assert sparse_mla._splits(1, 2048, 132) == 16
    assert sparse_mla._splits(66, 2048, 132) == 4
    assert sparse_mla._splits(1000, 2048, 132) == 1
    assert sparse_mla._splits(1, 100, 132) == 1
