"""What whole-pass graphs share: kinds, keys, and how they are captured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from itertools import pairwise, zip_longest
from typing import Any

from nsa_tune.engines.sglang import attempt, say_once
from nsa_tune.engines.sglang.pass_mode.seconds import SECONDS
from nsa_tune.engines.sglang.pass_mode.whole_pass.failed_capture import end_capture
from nsa_tune.engines.sglang.pass_mode.whole_pass.warm_up import warmed_up_briefly

_BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"

LEAST_TOKENS = 64
"""Smaller graphs are not captured: so few new tokens run by decode graphs, and as fast."""
_FEW = 512
"""Tokens up to which padding costs little: passes read all experts anyway."""
_MANY = 1024
"""Tokens from which on a pass takes as much longer as there is padding."""
_COMPILING_S = 0.5
"""A few layers that take longer have compiled something."""
_STAGES = ("warming up", "recording", "instantiating")


class Kind(StrEnum):
    """How attention is computed; the value is part of the graphs' keys."""

    MHA = "nsa_tune_dense"
    MLA = "nsa_tune_dense_mla"
    PREFIX = "nsa_tune_prefix"
    SPARSE = "nsa_tune_sparse"


def spaced(sizes: Sequence[int]) -> list[int]:
    """SGLang's ascending sizes, fewer for few tokens and more for many.

    Up to `_FEW` a size is left out between two that are 32 tokens apart, or 64 from 256 on. Between
    two of many tokens that are more than an eighth apart the middle comes in.
    """
    kept: list[int] = []
    for size, larger in zip_longest(sizes, sizes[1:], fillvalue=_FEW + 1):
        near = bool(kept) and larger - kept[-1] <= 32 * (1 + kept[-1] // 256)
        if larger > _FEW or size <= LEAST_TOKENS or not near:
            kept.append(size)
    wide = [(low, high) for low, high in pairwise(sizes) if low >= _MANY and high - low > low // 8]
    pages = {(low + high) // 2 // LEAST_TOKENS for low, high in wide}
    return sorted({*kept, *(LEAST_TOKENS * count for count in pages)})


def shape_key(size: int, kind: Kind | str) -> Any:
    """Under which SGLang keeps a graph of `size` tokens."""
    made = import_module("sglang.srt.model_executor.runner.shape_key").ShapeKey
    return made(size=size, variant_label=str(kind))


def lens_of(forward_batch: Any) -> tuple[list[int], list[int]]:
    """Prefixes and new tokens of a padded batch, which ends in sequences without tokens."""
    extend_lens = [new for new in forward_batch.extend_seq_lens_cpu if new]
    return forward_batch.extend_prefix_lens_cpu[: len(extend_lens)], extend_lens


@contextmanager
def no_breaks() -> Iterator[None]:
    """What would break a graph under capture is captured instead."""
    current = import_module(_BREAKS)._current_capture_var
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)


def capture(runner: Any, key: Any, forward: Callable[[], Any]) -> None:
    """Capture `forward` without breaks, as the graph `key` of a PrefillCudaGraphRunner.

    An error leaves PyTorch as it was before.
    """

    def unbroken() -> Any:
        with no_breaks():
            return forward()

    times = [time.monotonic()]
    try:
        runner.backend.capture_one(key, warmed_up_briefly(runner.layer_model, unbroken, times))
    except Exception:
        attempt("ending a capture that failed", end_capture, runner.backend)
        raise
    times.append(time.monotonic())
    for stage, (begin, end) in zip(_STAGES, pairwise(times), strict=False):
        SECONDS[stage] = SECONDS.get(stage, 0.0) + end - begin
    if times[1] - times[0] > _COMPILING_S:
        say_once(logging.INFO, f"warming up {key} took {times[1] - times[0]:.1f} s")
