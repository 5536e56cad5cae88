"""Gathering index keys: the Triton kernel, interpreted or on a GPU, against torch."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.backend.kernels.gather_keys import gather_keys, gather_keys_reference


@pytest.mark.parametrize(("page", "dim", "tokens"), [(64, 128, 100), (16, 32, 33), (64, 64, 1)])
def test_keys_and_scales_come_out_in_order(
    kernel_device: torch.device, page: int, dim: int, tokens: int
) -> None:
    generator = torch.Generator(device=kernel_device).manual_seed(tokens)
    pool = torch.randint(
        0, 120, (5, page, 1, dim + 4), generator=generator, device=kernel_device, dtype=torch.uint8
    )
    slots = torch.randint(
        5 * page, (tokens,), generator=generator, device=kernel_device, dtype=torch.int32
    )
    keys, scales = gather_keys(pool, slots)
    wanted, wanted_scales = gather_keys_reference(pool, slots)

    assert keys.shape == (tokens, dim) and keys.dtype == torch.float8_e4m3fn
    assert torch.equal(keys.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


def test_a_page_has_its_keys_first_and_its_scales_after_them() -> None:
    pool = torch.zeros(3, 16, 1, 36, dtype=torch.uint8)
    flat = pool.view(3, -1)
    flat[2, 5 * 32 : 6 * 32] = torch.arange(32, dtype=torch.uint8)
    flat[2, 16 * 32 :].view(torch.float32)[5] = 0.75
    keys, scales = gather_keys_reference(pool, torch.tensor([2 * 16 + 5, 0], dtype=torch.int32))

    assert keys.view(torch.uint8)[0].tolist() == list(range(32))
    assert scales.tolist() == [0.75, 0.0]
