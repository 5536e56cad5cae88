"""How long the GPU works in one pass, and what Python does, function by function."""

from __future__ import annotations

import cProfile
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["Kernel", "profiled", "summary_of"]

_TOP = 20

Kernel = tuple[int, int]
"""When a kernel began and ended, in nanoseconds."""


def profiled(call: Callable[[], Any], facts: dict[str, Any], how: int) -> Any:
    """Run `call`; `how` is as in `control.Wanted`. What is found goes into `facts`."""
    if how == 1:
        return _with_kernels(call, facts)
    if how == 2:
        profiler = cProfile.Profile()
        result = profiler.runcall(call)
        facts["python"] = _functions(profiler)
        return result
    return call()


def _with_kernels(call: Callable[[], Any], facts: dict[str, Any]) -> Any:
    import torch

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    # A profiler that does not work here must not end the engine.
    try:
        profiler.start()
    except Exception:
        logging.getLogger(__name__).exception("PyTorch's profiler does not start")
        return call()
    result = call()
    try:
        torch.cuda.synchronize()
        profiler.stop()
        on_gpu = torch._C._autograd.DeviceType.CUDA
        # Not its events(): that makes an object of thirty fields of each.
        events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        facts["kernels"] = summary_of([
            (one.start_ns(), one.start_ns() + one.duration_ns())
            for one in events
            # Ranges that somebody marked are no work.
            if one.device_type() == on_gpu and "annotation" not in _activity(one)
        ])  # fmt: skip
    except Exception:
        logging.getLogger(__name__).exception("PyTorch's profiler has failed")
    return result


def _activity(event: Any) -> str:
    """What kind of event it is; PyTorch 2.11 does not say."""
    return str(event.activity_type()) if hasattr(event, "activity_type") else ""


def _functions(profiler: cProfile.Profile) -> dict[str, Any]:
    """Milliseconds in Python, and the functions that take most by themselves."""
    profiler.create_stats()
    stats: dict[tuple[str, int, str], Any] = vars(profiler)["stats"]
    found = sorted(stats.items(), key=lambda one: -one[1][2])
    return {
        "total_ms": round(1e3 * sum(one[2] for one in stats.values()), 3),
        "functions": [
            {
                "name": f"{'/'.join(file.split('/')[-3:])}:{line} {name}", "calls": calls,
                "own_ms": round(1e3 * own_s, 3), "with_callees_ms": round(1e3 * all_s, 3),
            }
            for (file, line, name), (_, calls, own_s, all_s, _) in found[:_TOP]
        ],
    }  # fmt: skip


def summary_of(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Milliseconds; `busy_ms` counts what ran side by side once."""
    first = min((begin for begin, _ in kernels), default=0)
    last = max((end for _, end in kernels), default=0)
    return {
        "total_ms": round(sum(end - begin for begin, end in kernels) / 1e6, 3),
        "busy_ms": round(_busy_ns(kernels) / 1e6, 3), "span_ms": round((last - first) / 1e6, 3),
        "launched": len(kernels),
    }  # fmt: skip


def _busy_ns(kernels: Iterable[Kernel]) -> int:
    busy, reached = 0, 0
    for begin, end in sorted(kernels):
        busy += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return busy
