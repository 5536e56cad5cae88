"""What captured whole-pass graphs share: kinds, keys, and no breaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from typing import Any

_BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"


class Kind(StrEnum):
    """How attention is computed; the value is part of the graphs' keys."""

    MHA = "nsa_tune_dense"
    MLA = "nsa_tune_dense_mla"
    SPARSE = "nsa_tune_sparse"


def shape_key(size: int, kind: Kind) -> Any:
    """Under which SGLang keeps a graph of `size` tokens."""
    made = import_module("sglang.srt.model_executor.runner.shape_key").ShapeKey
    return made(size=size, variant_label=str(kind))


@contextmanager
def no_breaks() -> Iterator[None]:
    """What would break a graph under capture is captured instead."""
    current = import_module(_BREAKS)._current_capture_var
    token = current.set(None)
    try:
        yield
    finally:
        current.reset(token)
