"""Attention over two parts of the keys: the Triton kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.backend.kernels.merge_outputs import merge_outputs, merge_outputs_reference


@pytest.mark.parametrize(("heads", "v"), [(16, 128), (8, 256), (4, 32), (2, 48)])
def test_the_kernel_equals_the_reference(heads: int, v: int, kernel_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)

    def part() -> tuple[torch.Tensor, torch.Tensor]:
        output = torch.randn(5, heads, v, generator=generator).to(torch.bfloat16)
        sums = torch.randn(5, heads, generator=generator) * 4
        return output.to(kernel_device), sums.to(kernel_device)

    (first, first_lse), (second, second_lse) = part(), part()
    second_lse[2] = -torch.inf
    merged = merge_outputs(first, first_lse, second, second_lse)

    assert torch.equal(merged[2], first[2]), "a row without keys in one part has the other's output"
    wanted = merge_outputs_reference(first, first_lse, second, second_lse)
    torch.testing.assert_close(merged, wanted, rtol=0.01, atol=0.01)


def test_the_parts_of_a_softmax_merge_into_it() -> None:
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(3, 2, 40, generator=generator) * 3
    values = torch.randn(40, 2, 16, generator=generator)

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = scores[..., keys]
        output = torch.einsum("rhk,khv->rhv", part.softmax(-1), values[keys])
        return output, part.logsumexp(-1) / torch.log(torch.tensor(2.0))

    merged = merge_outputs_reference(*attend(slice(0, 13)), *attend(slice(13, 40)))

    torch.testing.assert_close(merged, attend(slice(0, 40))[0])
