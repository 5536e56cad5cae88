"""Dense absorbed attention in place of the backend's own, while a dense graph is captured.

FlashAttention-3 reads the bf16 pool's pages: rotated dimensions as keys, the latents as keys and
values (`qv`). Where no sequence has more keys than the indexer selects this computes what sparse
attention does, without filling heads up to 64 and without reading the selection.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from nsa_tune.engines.sglang.facts import PAGE
from nsa_tune.engines.sglang.pass_mode.whole_pass.attention import Query


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors that one graph's attention reads. The last sequences of a batch are padding."""

    starts: Any
    """Each sequence's first row, and behind them the last one's end; int32 [sequences + 1]."""
    kv_lens: Any
    """Keys of each sequence; int32 [sequences]."""
    pages: Any
    """The pool's pages of each sequence; int32 [sequences, index_topk / 64]."""


@dataclass(frozen=True, slots=True)
class AbsorbedAttention:
    """Dense attention of one backend by `inputs`."""

    backend: Any
    inputs: Inputs
    most: int
    """Tokens of a sequence at most."""

    def __call__(self, query: Query) -> Any:
        """[rows, heads, rank] bf16."""
        backend, layer, inputs = self.backend, query.layer, self.inputs
        pool, rank = backend.token_to_kv_pool, layer.v_head_dim
        pool.set_mla_kv_buffer(layer, query.forward_batch.out_cache_loc, query.k, query.k_rope)
        latents = pool.get_key_buffer(layer.layer_id).view(-1, PAGE, 1, layer.head_dim)
        attention = sys.modules[type(backend).__module__].flash_attn_with_kvcache
        return attention(
            q=query.q_rope.reshape(-1, layer.tp_q_head_num, layer.head_dim - rank),
            k_cache=latents[..., rank:],
            v_cache=latents[..., :rank],
            qv=query.q.reshape(-1, layer.tp_q_head_num, rank),
            page_table=inputs.pages,
            cache_seqlens=inputs.kv_lens,
            cu_seqlens_q=inputs.starts,
            max_seqlen_q=self.most,
            softmax_scale=layer.scaling,
            causal=True,
            softcap=layer.logit_cap,
            num_splits=backend.num_splits,
        )
