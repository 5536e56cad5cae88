"""Rounding to e4m3 in a Triton kernel: nearest, ties to even, subnormals too, as torch rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_tune.backend.kernels.e4m3 import on_e4m3_grid


@triton.jit  # type: ignore[untyped-decorator]
def _round(source, target, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, COUNT)
    tl.store(target + place, on_e4m3_grid(tl.load(source + place)))


def test_every_e4m3_number_and_every_tie_between_two_rounds_as_torch_rounds(
    kernel_device: torch.device,
) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([ties * (1 + 2**-20), ties * (1 - 2**-20)])
    given = torch.cat([numbers, ties, near])
    count = triton.next_power_of_2(len(given))
    padded = torch.zeros(count)
    padded[: len(given)] = given
    rounded = torch.empty(count, device=kernel_device)

    _round[(1,)](padded.to(kernel_device), rounded, COUNT=count)

    assert torch.equal(rounded.cpu(), padded.to(torch.float8_e4m3fn).float())
