"""What whole-pass graphs capture in place of SGLang's attention, and of its selection of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Query:
    """A call of `DeepseekSparseAttnBackend.forward_extend` by absorbed MLA."""

    q: Any
    """[rows, heads, rank] bf16: queries of latents."""
    q_rope: Any
    """[rows, heads, rope] bf16."""
    k: Any
    """[rows, 1, rank] bf16: the new tokens' latents."""
    k_rope: Any
    """[rows, 1, rope] bf16."""
    topk_indices: Any
    """[rows, index_topk] int32; None where the indexer selects none."""
    layer: Any
    forward_batch: Any


@dataclass(frozen=True, slots=True)
class Swap:
    """What one backend runs while a graph is captured."""

    backend: Any
    attend: Callable[[Query], Any]
    """In place of `forward_extend`."""
    metadata: Any = None
    """What the indexer selects keys by; None: it stores its keys and selects none."""


_swap: Swap | None = None


@contextmanager
def swapped(swap: Swap) -> Iterator[None]:
    """Within it `swap.backend` attends as `swap` says."""
    global _swap
    backend = swap.backend
    if swap.metadata is not None:
        backend.get_indexer_metadata = lambda layer_id, forward_batch: swap.metadata
    _swap = swap
    try:
        yield
    finally:
        _swap = None
        backend.__dict__.pop("get_indexer_metadata", None)


def around_k_only(original: Callable[..., Any], indexer: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `Indexer._forward_cuda_k_only`, which may select all keys besides."""
    if _swap is not None and _swap.metadata is None:
        named["return_indices"] = False
    return original(indexer, *rest, **named)


def around_extend(
    original: Callable[..., Any],
    backend: Any,
    q: Any,
    k: Any,
    v: Any,
    layer: Any,
    forward_batch: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """The hook around `DeepseekSparseAttnBackend.forward_extend`."""
    if _swap is None or _swap.backend is not backend:
        return original(backend, q, k, v, layer, forward_batch, *rest, **named)
    q_rope, k_rope = named["q_rope"], named["k_rope"]
    indices = named.get("topk_indices")
    return _swap.attend(Query(q, q_rope, k, k_rope, indices, layer, forward_batch))
