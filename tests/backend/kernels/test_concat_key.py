"""Keys of expanded MHA: the Triton kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.backend.kernels.concat_key import concat_key, concat_key_reference


@pytest.mark.parametrize(
    ("heads", "nope", "v", "rope"), [(128, 128, 128, 64), (64, 192, 256, 64), (4, 32, 32, 32)]
)
def test_the_kernel_equals_the_reference(
    heads: int, nope: int, v: int, rope: int, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    expanded = torch.randn(3, heads, nope + v, generator=generator).to(torch.bfloat16)
    latents = torch.randn(3, 96 + rope, generator=generator).to(torch.bfloat16)
    expanded, shared = expanded.to(kernel_device), latents.to(kernel_device)[:, 96:]

    keys = concat_key(expanded, shared, nope)

    assert torch.equal(keys, concat_key_reference(expanded, shared, nope))
    assert torch.equal(keys[:, 0, nope:], shared)
    assert torch.equal(keys[..., :nope], expanded[..., :nope])
