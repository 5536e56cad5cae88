"""Roofline ceilings: the copy bandwidth and the matmul rate that a device reaches.

They are stored as measurements of the point "roofline", which no policy reads. The batch says the
size ("copy:BYTES", "matmul:MxNxK"), the arm says what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.bench.failures import reason_of
from nsa_tune.backend.types.records import Measurement, Status

if TYPE_CHECKING:
    import torch

    from nsa_tune.autotune.bench.timing import Timer
    from nsa_tune.backend.types.records import Device

POINT = "roofline"
"""The point's name, by which reports find the rows."""

_Make: TypeAlias = "Callable[[torch.device], Callable[[], torch.Tensor]]"
_HAS_FP8 = frozenset({"sm89", "sm90", "sm100", "sm103", "sm120"})


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One copy or matrix product to time."""

    batch: str
    arm: str
    make: _Make


def ceilings_for(arch: str, *, large: bool) -> list[Ceiling]:
    """The ceilings of a device of `arch`. `large` ones, for a GPU, take at most 2 GB of memory."""
    copies = [2**28, 2**30] if large else [2**26]
    products = [(8192, 8192, 8192), (16384, 8192, 4096)] if large else [(512, 512, 512)]
    ceilings = [Ceiling(f"copy:{size}", "copy", partial(_copy, size)) for size in copies]
    for shape in products:
        word = f"matmul:{'x'.join(map(str, shape))}"
        ceilings.append(Ceiling(word, "matmul_bf16", partial(_product, shape)))
        # Other devices have no fp8 matrix instructions.
        if arch in _HAS_FP8:
            ceilings.append(Ceiling(word, "matmul_fp8", partial(_fp8_product, shape)))
    return ceilings


def lacks_ceilings(device: Device, stored: Iterable[Measurement]) -> bool:
    """Whether `device` needs ceilings and the rows `stored` hold none that succeeded."""
    # A CPU's caches hold whole batches, so memory bandwidth is no ceiling for them.
    if device.arch == "cpu":
        return False
    return not any(row.point == POINT and row.status is Status.OK for row in stored)


def measure_ceilings(arch: str, device: torch.device, timer: Timer) -> list[Measurement]:
    """Measure each of `ceilings_for(arch)`; a failure becomes a failed row. It takes a second."""
    ceilings = ceilings_for(arch, large=device.type == "cuda")
    return [_measured(ceiling, device, timer) for ceiling in ceilings]


def _measured(ceiling: Ceiling, device: torch.device, timer: Timer) -> Measurement:
    from nsa_tune.autotune.bench.timing import interleave

    try:
        run = ceiling.make(device)
        # A library allocates its handle and workspace in the first call: not inside a capture.
        timer.first(run)
        (timing,) = interleave([timer.sampler(run)], timer)
    except (RuntimeError, MachineUnfit) as failure:
        why = reason_of(failure)
        return Measurement(POINT, ceiling.batch, ceiling.arm, Status.FAILED, reason=why)
    finally:
        timer.release()
    return timing.row(POINT, ceiling.batch, ceiling.arm)


def _copy(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Reads `size` bytes and writes as many."""
    import torch

    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(shape: tuple[int, int, int], device: torch.device) -> Callable[[], torch.Tensor]:
    import torch

    m, n, k = shape
    # Random values: a product of zeros draws less power, so the GPU would clock higher.
    left = torch.randn(m, k, device=device).to(torch.bfloat16)
    right = torch.randn(n, k, device=device).to(torch.bfloat16).t()
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    return lambda: torch.mm(left, right, out=out)


def _fp8_product(shape: tuple[int, int, int], device: torch.device) -> Callable[[], torch.Tensor]:
    import torch

    m, n, k = shape
    left = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )
