"""What each step of attention takes on the GPU in one pass: PyTorch's profiler, by host ranges.

The probe does this where a configuration sets `NSA_ENGINE_STEPS` (`docs/engine.md`). Functions of
SGLang are wrapped into named ranges; a kernel belongs to the innermost range in which the host
launched it. So the passes must run without CUDA graphs. A pass takes longer than usual then, but
its kernels do not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

__all__ = ["VARIABLE", "Span", "kernels_of", "profiled", "wrap"]

VARIABLE = "NSA_ENGINE_STEPS"
_PREFIX = "nsa-step:"
_NOT_ATTENTION = "store"
"""Writing the new keys is no choice's, though SGLang does it within the attention call."""

_NAME_LENGTH = 120
"""Names of templates run to thousands of characters."""

_MODELS = "sglang.srt.models.deepseek_common.attention_forward_methods"
_RANGES = (
    ("torch", "", "bmm", "prefill"),
    ("sglang.srt.layers.radix_attention", "RadixAttention", "forward", "prefill"),
    (f"{_MODELS}.forward_mha", "DeepseekMHAForwardMixin", "_concat_and_cast_mha_k", "prefill"),
    (f"{_MODELS}.forward_mha", "DeepseekMHAForwardMixin", "_get_mla_kv_buffer", "prefill"),
    (
        f"{_MODELS}.forward_mha", "DeepseekMHAForwardMixin",
        "_get_mla_kv_buffer_from_fp8_for_dsa", "prefill",
    ),
    ("sglang.srt.layers.attention.dsa.dsa_indexer", "Indexer", "_get_topk_ragged",
     "indexer_prefill"),
    ("sglang.srt.layers.attention.dsa.dsa_indexer", "Indexer", "_get_topk_paged",
     "indexer_prefill"),
    ("sglang.srt.layers.attention.dsa_backend", "DSAIndexerMetadata", "topk_transform",
     "indexer_topk"),
)  # fmt: skip
"""Module, class or nothing, function, and the decision point whose work it does."""
_POOL = ("set_mla_kv_buffer", "set_kv_buffer")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on the host, or a kernel; times in nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    correlation: int = 0
    """The same number for a kernel and for the call that launched it."""


def kernels_of(
    kernels: Iterable[Span], launches: Iterable[Span], ranges: Sequence[Span]
) -> dict[str, dict[str, float]]:
    """Milliseconds of kernels by name, by the innermost range of their launch; others are left
    out, and so is writing the new keys."""
    launched_ns = {one.correlation: one.start_ns for one in launches}
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in kernels:
        at_ns = launched_ns.get(one.correlation)
        within = [r for r in ranges if at_ns is not None and r.start_ns <= at_ns < r.end_ns]
        if within:
            innermost = max(within, key=lambda r: r.start_ns)
            found[innermost.name][one.name[:_NAME_LENGTH]] += one.end_ns - one.start_ns
    found.pop(_NOT_ATTENTION, None)
    return {
        step: {name: round(ns / 1e6, 5) for name, ns in times_ns.most_common()}
        for step, times_ns in sorted(found.items())
    }


def profiled(run: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """What `run` returns, and for a pass's line: `steps_ms`, `attention_ms`, and `kernels_ms` by
    step."""
    import torch
    from torch.profiler import ProfilerActivity, profile, supported_activities

    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=[one for one in kinds if one in supported_activities()]) as profiler:
        result = run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = list(profiler.profiler.kineto_results.events())
    kernels_ms = kernels_of(*_sorted_out(events))
    steps_ms = {step: round(sum(times.values()), 5) for step, times in kernels_ms.items()}
    attention_ms = round(sum(steps_ms.values()), 5)
    return result, {"steps_ms": steps_ms, "attention_ms": attention_ms, "kernels_ms": kernels_ms}


def _sorted_out(events: Iterable[Any]) -> tuple[list[Span], list[Span], list[Span]]:
    """Kernels, the calls that launched them, and our ranges."""
    kernels: list[Span] = []
    launches: list[Span] = []
    ranges: list[Span] = []
    for one in events:
        name, start_ns = one.name(), one.start_ns()
        span = Span(name, start_ns, start_ns + one.duration_ns(), one.correlation_id())
        on_host = "CPU" in str(one.device_type())
        if name.startswith(_PREFIX):
            if on_host:
                ranges.append(Span(name[len(_PREFIX) :], span.start_ns, span.end_ns))
        elif not on_host:
            kernels.append(span)
        elif name.startswith(("cuda", "cu")):
            launches.append(span)
    return kernels, launches, ranges


def wrap(runner: Any) -> None:
    """Put SGLang's functions into ranges, in the process of `runner`, its ModelRunner."""
    for module, owner, name, step in _RANGES:
        # Not every release has all of them.
        with suppress(ImportError, AttributeError):
            found: Any = import_module(module)
            _replace(getattr(found, owner) if owner else found, name, step)
    for name in _POOL:
        with suppress(AttributeError):
            _replace(type(runner.token_to_kv_pool), name, _NOT_ATTENTION)
    for projection in _projections(runner.model):
        _replace(projection, "forward", "prefill")


def _projections(model: Any) -> Iterator[Any]:
    """MHA's projection of latents to keys and values, in each layer."""
    for name, module in model.named_modules():
        if name.endswith(".kv_b_proj"):
            yield module


def _replace(owner: Any, name: str, step: str) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def ranged(*arguments: Any, **named: Any) -> Any:
        from torch.profiler import record_function

        with record_function(_PREFIX + step):
            return original(*arguments, **named)

    setattr(owner, name, ranged)
