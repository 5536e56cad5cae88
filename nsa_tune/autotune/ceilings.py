"""What the device itself reaches: copy bandwidth and matrix rate, the roof over every arm.

They are stored as measurements of a point of their own, which no policy reads: the batch is the
size of the copy or of the product, the arm says what was done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from nsa_tune.autotune.timing import Timer, interleave
from nsa_tune.backend.records import Measurement, Status

if TYPE_CHECKING:
    from nsa_tune.backend.point import Setting

__all__ = ["POINT", "measure_ceilings"]

POINT = "roofline"
"""As `nsa_tune.reports.roofline` reads it; the batches' words are described there."""

_Make = Callable[[torch.device], Callable[[], torch.Tensor]]


def measure_ceilings(setting: Setting, device: torch.device, timer: Timer) -> list[Measurement]:
    """One measurement for each copy and product; failed ones where the device has no such thing.

    Takes about 4 GB of the device's memory for a second.
    """
    large = device.type == "cuda"
    copies = [2**28, 2**30] if large else [2**26]
    products = [(8192, 8192, 8192), (16384, 8192, 4096)] if large else [(512, 512, 512)]
    makes: list[tuple[str, str, _Make]] = [(f"copy:{size}", "copy", _copy(size)) for size in copies]
    for shape in products:
        word = f"matmul:{'x'.join(map(str, shape))}"
        makes.append((word, "matmul_bf16", _product(*shape)))
        # Nothing but a GPU of these multiplies in fp8.
        if setting.device.arch in _HAS_FP8:
            makes.append((word, "matmul_fp8", _fp8_product(*shape)))
    return [_measured(word, arm, make, device, timer) for word, arm, make in makes]


_HAS_FP8 = frozenset({"sm89", "sm90", "sm100", "sm103", "sm120"})


def _measured(word: str, arm: str, make: _Make, device: torch.device, timer: Timer) -> Measurement:
    try:
        (timing,) = interleave([timer.sampler(make(device))], timer)
    except RuntimeError as failure:
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
        return Measurement(POINT, word, arm, Status.FAILED, reason=reason)
    finally:
        timer.release()
    return Measurement(
        POINT, word, arm, Status.OK, timing.median_us, timing.low_us, timing.high_us,
        timing.samples,
    )  # fmt: skip


def _copy(size: int) -> _Make:
    """`size` bytes read, and as many written."""

    def make(device: torch.device) -> Callable[[], torch.Tensor]:
        source = torch.ones(size // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return make


def _product(m: int, n: int, k: int) -> _Make:
    def make(device: torch.device) -> Callable[[], torch.Tensor]:
        # Random bits: a product of zeros draws less power, and clocks higher.
        left = torch.randn(m, k, device=device).to(torch.bfloat16)
        right = torch.randn(n, k, device=device).to(torch.bfloat16).t()
        out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        return lambda: torch.mm(left, right, out=out)

    return make


def _fp8_product(m: int, n: int, k: int) -> _Make:
    def make(device: torch.device) -> Callable[[], torch.Tensor]:
        left = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        right = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return make
