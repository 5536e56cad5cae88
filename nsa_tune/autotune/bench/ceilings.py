"""What the device itself reaches: copy bandwidth and matrix rate, the roof over every arm.

They are stored as measurements of a point of their own, which no policy reads: the batch is the
size of the copy or of the product, the arm says what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from nsa_tune._errors import MachineUnfit
from nsa_tune.backend.types.records import Measurement, Status

if TYPE_CHECKING:
    import torch

    from nsa_tune.autotune.bench.timing import Timer
    from nsa_tune.backend.types.records import Device

__all__ = ["POINT", "Ceiling", "ceilings_for", "failed", "lacks_ceilings", "measure_ceilings"]

POINT = "roofline"
"""As `nsa_tune.reports.content.roofline` reads it; the batches' words are described there."""

_Make: TypeAlias = "Callable[[torch.device], Callable[[], torch.Tensor]]"
_HAS_FP8 = frozenset({"sm89", "sm90", "sm100", "sm103", "sm120"})
_REASON_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One copy or product to time."""

    batch: str
    arm: str
    make: _Make


def ceilings_for(arch: str, *, large: bool) -> list[Ceiling]:
    """What is timed on a device of `arch`: on a GPU `large` copies and products, 2 GB at most."""
    copies = [2**28, 2**30] if large else [2**26]
    products = [(8192, 8192, 8192), (16384, 8192, 4096)] if large else [(512, 512, 512)]
    found = [Ceiling(f"copy:{size}", "copy", _copy(size)) for size in copies]
    for shape in products:
        word = f"matmul:{'x'.join(map(str, shape))}"
        found.append(Ceiling(word, "matmul_bf16", _product(*shape)))
        # Nothing but a GPU of these multiplies in fp8.
        if arch in _HAS_FP8:
            found.append(Ceiling(word, "matmul_fp8", _fp8_product(*shape)))
    return found


def lacks_ceilings(device: Device, known: Iterable[Measurement]) -> bool:
    """Whether `device` should have ceilings and `known` holds none; after failures, none is."""
    # A processor's caches hold whole batches: its memory's bandwidth is no roof over them.
    if device.arch == "cpu":
        return False
    return not any(row.point == POINT and row.status is Status.OK for row in known)


def measure_ceilings(
    arch: str,
    device: torch.device,
    timer: Timer,
    note: Callable[[int], None] = lambda index: None,
) -> list[Measurement]:
    """One measurement for each copy and product; failed ones where the device has no such thing.

    Takes about a second. `note` is told the number of each before it is touched.
    """
    rows = []
    for index, one in enumerate(ceilings_for(arch, large=device.type == "cuda")):
        note(index)
        rows.append(_measured(one, device, timer))
    return rows


def failed(ceiling: Ceiling, reason: str) -> Measurement:
    """`ceiling`, which could not be measured for `reason`."""
    one_line = " ".join(reason.split())[:_REASON_LENGTH]
    return Measurement(POINT, ceiling.batch, ceiling.arm, Status.FAILED, reason=one_line)


def _measured(one: Ceiling, device: torch.device, timer: Timer) -> Measurement:
    from nsa_tune.autotune.bench.timing import interleave

    try:
        run = one.make(device)
        # A library makes its handle and workspace at the first call, which no graph can hold.
        timer.first(run)
        (timing,) = interleave([timer.sampler(run)], timer)
    except (RuntimeError, MachineUnfit) as failure:
        return failed(one, f"{type(failure).__name__}: {failure}")
    finally:
        timer.release()
    return Measurement(
        POINT, one.batch, one.arm, Status.OK, timing.median_us, timing.low_us, timing.high_us,
        timing.samples, discarded=timing.discarded,
    )  # fmt: skip


def _copy(size: int) -> _Make:
    """`size` bytes read, and as many written."""

    def make(device: torch.device) -> Callable[[], torch.Tensor]:
        import torch

        source = torch.ones(size // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return make


def _product(m: int, n: int, k: int) -> _Make:
    def make(device: torch.device) -> Callable[[], torch.Tensor]:
        import torch

        # Random bits: a product of zeros draws less power, and clocks higher.
        left = torch.randn(m, k, device=device).to(torch.bfloat16)
        right = torch.randn(n, k, device=device).to(torch.bfloat16).t()
        out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        return lambda: torch.mm(left, right, out=out)

    return make


def _fp8_product(m: int, n: int, k: int) -> _Make:
    def make(device: torch.device) -> Callable[[], torch.Tensor]:
        import torch

        left = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        right = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return make
