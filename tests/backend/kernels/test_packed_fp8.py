"""The packed fp8 layout: byte geometry, round trip, and the Triton gather against its reference."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.backend.kernels import packed_fp8
from nsa_tune.backend.types.layouts import KVLayout

RANK, ROPE = 512, 64


def latents(tokens: int, rank: int = RANK, rope: int = ROPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, rank + rope, generator=generator).to(torch.bfloat16)


def test_a_token_of_v32_takes_656_bytes_values_then_scales_then_rope() -> None:
    given = latents(3)
    packed = packed_fp8.quantize_reference(given, RANK)

    assert packed.shape == (3, 656) == (3, KVLayout.FP8_PACKED.token_bytes(RANK, ROPE))
    assert torch.equal(packed[:, 528:].contiguous().view(torch.bfloat16), given[:, RANK:])
    scales = packed[:, 512:528].contiguous().view(torch.float32)
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales), "powers of two"


def test_quantizing_keeps_rope_exactly_and_values_to_the_precision_of_e4m3() -> None:
    given = latents(64)
    packed = packed_fp8.quantize_reference(given, RANK)
    back = packed_fp8.dequantize_reference(packed, torch.arange(64), RANK, ROPE)

    assert torch.equal(back[:, RANK:], given[:, RANK:])
    # Half a step of 3 mantissa bits, or half of the smallest subnormal of the tile.
    tiles = given[:, :RANK].float().unflatten(-1, (-1, 128))
    allowed = torch.maximum(tiles.abs() / 16, tiles.abs().amax(-1, keepdim=True) * 2**-16)
    assert ((back[:, :RANK].float().unflatten(-1, (-1, 128)) - tiles).abs() <= allowed).all()


def test_what_was_dequantized_quantizes_to_the_same_values() -> None:
    once = packed_fp8.dequantize_reference(
        packed_fp8.quantize_reference(latents(16), RANK), torch.arange(16), RANK, ROPE
    )
    twice = packed_fp8.dequantize_reference(
        packed_fp8.quantize_reference(once, RANK), torch.arange(16), RANK, ROPE
    )

    assert torch.equal(once, twice)


def test_a_tile_of_zeros_stays_zeros() -> None:
    packed = packed_fp8.quantize_reference(torch.zeros(1, RANK + ROPE).to(torch.bfloat16), RANK)
    back = packed_fp8.dequantize_reference(packed, torch.tensor([0]), RANK, ROPE)

    assert torch.equal(back, torch.zeros_like(back))


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (128, 32)])
@pytest.mark.parametrize("tokens", [1, 8, 37])
def test_the_triton_gather_equals_the_reference_bit_for_bit(
    rank: int, rope: int, tokens: int, kernel_device: torch.device
) -> None:
    pool = packed_fp8.quantize_reference(latents(64, rank, rope), rank).to(kernel_device)
    slots = torch.randint(64, (tokens,), generator=torch.Generator().manual_seed(1)).int()
    slots = slots.to(kernel_device)

    gathered = packed_fp8.dequantize(pool, slots, rank, rope)

    assert torch.equal(gathered, packed_fp8.dequantize_reference(pool, slots, rank, rope))


@pytest.mark.parametrize("programs", [1, 3, 1024])
@pytest.mark.parametrize("count", [0, 1, 19, 37])
def test_a_gather_may_end_where_a_tensor_says(
    count: int, programs: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many programs share the tokens."""
    monkeypatch.setattr(packed_fp8, "_GATHERING", programs)
    pool = packed_fp8.quantize_reference(latents(64), RANK).to(kernel_device)
    slots = torch.randint(64, (37,), generator=torch.Generator().manual_seed(1)).int()
    slots[count:] = 2**30  # nothing is read there
    slots = slots.to(kernel_device)

    whole = packed_fp8.dequantize(
        pool, slots, RANK, ROPE, torch.tensor([count], dtype=torch.int32, device=kernel_device)
    )

    expected = packed_fp8.dequantize_reference(pool, slots[:count], RANK, ROPE)
    assert whole.shape == (37, RANK + ROPE)
    assert torch.equal(whole[:count], expected)


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (128, 32)])
@pytest.mark.parametrize("tokens", [1, 8, 37])
def test_narrowing_equals_the_reference_and_ends_in_zeros(
    rank: int, rope: int, tokens: int, spare: int, kernel_device: torch.device
) -> None:
    given = latents(64, rank, rope)
    given[::3] *= 300
    given[1::3] *= 2**-9
    pool = packed_fp8.quantize_reference(given, rank).to(kernel_device)
    slots = torch.randint(64, (tokens,), generator=torch.Generator().manual_seed(1)).int()
    slots = slots.to(kernel_device)

    narrow = packed_fp8.narrow(pool, slots, rank, rope, spare)

    right = packed_fp8.narrow_reference(pool, slots, rank, rope, spare)
    assert narrow.dtype == torch.float8_e4m3fn
    assert torch.equal(narrow.float(), right.float())
    assert not narrow[tokens:].view(torch.uint8).any()
    wide = packed_fp8.dequantize_reference(pool, slots, rank, rope).float()
    clamped = wide.clamp(-448, 448)
    assert ((right[:tokens].float() - clamped).abs() <= clamped.abs() / 16 + 2**-10).all()
