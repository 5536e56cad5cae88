"""Dense absorbed attention in place of the backend's own, while a dense graph is captured.

FlashAttention-3 reads the bf16 pool's pages: rotated dimensions as keys, the latents as keys and
values (`qv`). Where no sequence has more keys than the indexer selects this computes what sparse
attention does, without filling heads up to 64 and without reading the selection.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PAGE = 64
"""Tokens of a page of DSA's pool."""

_CAPTURING = "_nsa_tune_absorbed"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors that one graph's attention reads. The last sequences of a batch are padding."""

    starts: Any
    """Each sequence's first row, and behind them the last one's end; int32 [sequences + 1]."""
    kv_lens: Any
    """Keys of each sequence; int32 [sequences]."""
    pages: Any
    """The pool's pages of each sequence; int32 [sequences, index_topk / 64]."""


_keys_only = False
"""Whether the indexer stores its keys and selects none."""


@contextmanager
def absorbed(backend: Any, inputs: Inputs, most: int) -> Iterator[None]:
    """Within it `backend` attends densely by `inputs`, to sequences of at most `most` tokens."""
    global _keys_only
    backend.__dict__[_CAPTURING] = (inputs, most)
    _keys_only = True
    try:
        yield
    finally:
        _keys_only = False
        del backend.__dict__[_CAPTURING]


def around_k_only(original: Callable[..., Any], indexer: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `Indexer._forward_cuda_k_only`, which may select all keys besides."""
    if _keys_only:
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
    capturing = backend.__dict__.get(_CAPTURING)
    if capturing is None:
        return original(backend, q, k, v, layer, forward_batch, *rest, **named)
    inputs, most = capturing
    pool, rank = backend.token_to_kv_pool, layer.v_head_dim
    pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, named["k_rope"])
    latents = pool.get_key_buffer(layer.layer_id).view(-1, PAGE, 1, layer.head_dim)
    attention = sys.modules[type(backend).__module__].flash_attn_with_kvcache
    return attention(
        q=named["q_rope"].reshape(-1, layer.tp_q_head_num, layer.head_dim - rank),
        k_cache=latents[..., rank:],
        v_cache=latents[..., :rank],
        qv=q.reshape(-1, layer.tp_q_head_num, rank),
        page_table=inputs.pages,
        cache_seqlens=inputs.kv_lens,
        cu_seqlens_q=inputs.starts,
        max_seqlen_q=most,
        softmax_scale=layer.scaling,
        causal=True,
        softcap=layer.logit_cap,
        num_splits=backend.num_splits,
    )
