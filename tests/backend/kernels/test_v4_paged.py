"""The V4 layout: byte geometry, round trip, and the Triton kernels against their references."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.backend.kernels import v4_paged
from nsa_tune.backend.types.layouts import KVLayout

RANK, ROPE, PAGE = 448, 64, 64
CPU = torch.device("cpu")


def latents(tokens: int, rank: int = RANK, rope: int = ROPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return (3 * torch.randn(tokens, rank + rope, generator=generator)).to(torch.bfloat16)


def shuffled(tokens: int, slots: int) -> torch.Tensor:
    return torch.randperm(slots, generator=torch.Generator().manual_seed(1))[:tokens].int()


def filled(tokens: int, rank: int, rope: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of four pages and the slots of `tokens` tokens in it."""
    pool = v4_paged.empty_pool(4, page, rank, rope, CPU)
    slots = shuffled(tokens, 4 * page)
    v4_paged.quantize(latents(tokens, rank, rope), slots, pool, page, rank)
    return pool, slots


def test_a_page_holds_all_rows_then_all_scales_then_padding() -> None:
    pool = v4_paged.empty_pool(2, PAGE, RANK, ROPE, CPU)
    given = latents(1)
    v4_paged.quantize(given, torch.tensor([PAGE + 5]), pool, PAGE, RANK)

    assert pool.shape == (2, 37440) == (2, KVLayout.V4_PAGED.page_bytes(RANK, ROPE, PAGE))
    page = pool[1]
    assert torch.equal(page[5 * 576 + 448 : 6 * 576].view(torch.bfloat16), given[0, RANK:])
    exponents = page[PAGE * 576 + 5 * 8 : PAGE * 576 + 5 * 8 + 7].int() - 127
    largest = given[0, :RANK].float().view(7, 64).abs().amax(-1)
    assert (largest <= 448 * torch.exp2(exponents.float())).all()
    assert (largest > 224 * torch.exp2(exponents.float())).all(), "the smallest power that fits"
    written = set(page.nonzero().flatten().tolist())
    row, scales = range(5 * 576, 6 * 576), range(PAGE * 576 + 40, PAGE * 576 + 47)
    assert written <= set(row) | set(scales)
    assert not pool[0].any()


def test_the_kernels_view_begins_where_the_pages_begin_and_copies_nothing() -> None:
    pool = v4_paged.empty_pool(3, PAGE, RANK, ROPE, CPU)
    view = v4_paged.rows_of(pool, PAGE, RANK, ROPE)

    assert view.shape == (3, PAGE, 1, 584)
    assert view.stride() == (37440, 584, 584, 1)
    assert view.data_ptr() == pool.data_ptr()


@pytest.mark.parametrize("page", [256, 64, 2])
def test_quantizing_keeps_rope_exactly_and_values_to_the_precision_of_e4m3(page: int) -> None:
    given = latents(8)
    pool, slots = filled(8, RANK, ROPE, page)
    back = v4_paged.dequantize_reference(pool, slots, page, RANK, ROPE)

    assert torch.equal(back[:, RANK:], given[:, RANK:])
    # Half a step of 3 mantissa bits, or half of the smallest subnormal of the tile.
    tiles = given[:, :RANK].float().unflatten(-1, (-1, 64))
    allowed = torch.maximum(tiles.abs() / 16, tiles.abs().amax(-1, keepdim=True) * 2**-16)
    assert ((back[:, :RANK].float().unflatten(-1, (-1, 64)) - tiles).abs() <= allowed).all()


def test_a_tile_of_zeros_stays_zeros() -> None:
    pool = v4_paged.empty_pool(1, 2, RANK, ROPE, CPU)
    zeros = torch.zeros(2, RANK + ROPE).to(torch.bfloat16)
    v4_paged.quantize(zeros, torch.tensor([0, 1]), pool, 2, RANK)

    assert torch.equal(
        v4_paged.dequantize_reference(pool, torch.tensor([1, 0]), 2, RANK, ROPE), zeros
    )


@pytest.mark.parametrize(("rank", "rope"), [(448, 64), (64, 32), (192, 16)])
@pytest.mark.parametrize(("tokens", "page"), [(1, 2), (8, 64), (37, 16), (6, 2)])
def test_the_triton_gather_equals_the_reference_bit_for_bit(
    rank: int, rope: int, tokens: int, page: int, kernel_device: torch.device
) -> None:
    pool, slots = filled(tokens, rank, rope, page)
    pool, slots = pool.to(kernel_device), slots.to(kernel_device)

    gathered = v4_paged.dequantize(pool, slots, page, rank, rope)

    assert torch.equal(gathered, v4_paged.dequantize_reference(pool, slots, page, rank, rope))


@pytest.mark.parametrize("biased", [1, 92, 127, 254])
def test_the_triton_gather_reads_every_power_of_two(
    biased: int, kernel_device: torch.device
) -> None:
    pool = v4_paged.empty_pool(1, 2, RANK, ROPE, kernel_device)
    pool[0, :448] = torch.full((448,), 0x38, dtype=torch.uint8)  # 1.0 in e4m3
    pool[0, 2 * 576 : 2 * 576 + 7] = biased
    slot = torch.zeros(1, dtype=torch.int32, device=kernel_device)

    gathered = v4_paged.dequantize(pool, slot, 2, RANK, ROPE)

    assert (gathered[0, :RANK].double() == 2.0 ** (biased - 127)).all()


def test_the_triton_gather_writes_into_a_part_of_a_workspace(kernel_device: torch.device) -> None:
    pool, slots = filled(5, RANK, ROPE, PAGE)
    pool, slots = pool.to(kernel_device), slots.to(kernel_device)
    workspace = torch.full((9, RANK + ROPE), 7.0, dtype=torch.bfloat16, device=kernel_device)

    v4_paged.dequantize(pool, slots, PAGE, RANK, ROPE, out=workspace[2:7])
    v4_paged.dequantize(pool, slots[:0], PAGE, RANK, ROPE, out=workspace[8:8])

    assert torch.equal(workspace[2:7], v4_paged.dequantize_reference(pool, slots, PAGE, RANK, ROPE))
    assert (workspace[:2] == 7).all()
    assert (workspace[7:] == 7).all()
