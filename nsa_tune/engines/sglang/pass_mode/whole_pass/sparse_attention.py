"""Attention and the indexer's selection as sparse graphs capture them, in place of SGLang's.

SGLang's own indexer runs, given lengths that lie on the GPU and a bound for what it allocates.
Its kernels for logits go by each row's first and last key, and so stop where a row's keys end.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from nsa_tune.engines.sglang.eligible import PADDED_HEADS
from nsa_tune.engines.sglang.facts import PAGE
from nsa_tune.engines.sglang.kernels.copies import read_back
from nsa_tune.engines.sglang.pass_mode.whole_pass.attention import Query
from nsa_tune.engines.sglang.pass_mode.whole_pass.sparse_inputs import Keys, Rows, SparseInputs

_NOMINAL_KEYS = 16384
"""Keys of a row by which the selecting kernel reads all rows: how fast it is hangs on that a
little, what it selects does not."""


class IndexerMetadata:
    """What SGLang's indexer asks of a pass's metadata, for a batch that lies on the GPU."""

    def __init__(self, inputs: SparseInputs, rows: Rows, *, packed: bool) -> None:
        """`packed`: the pool is fp8, and all keys are read back before some are selected."""
        import torch

        self._inputs, self._rows, self._packed = inputs, rows, packed
        self._bound = torch.tensor([inputs.most_keys])
        # By this SGLang's loop over chunks of rows takes a part of it for each chunk.
        offsets = rows.first_keys if packed else rows.sequences
        self.attn_metadata = SimpleNamespace(topk_indices_offset=offsets)

    def get_logical_page_table(self) -> Any:
        """Pages of each sequence."""
        return self._inputs.pages

    get_page_table_64 = get_logical_page_table

    def get_indexer_kvcache_range(self) -> tuple[Any, Any]:
        """Each row's first key, and behind its last."""
        return self._rows.first_keys, self._rows.last_keys

    def get_indexer_seq_len(self) -> Any:
        """Keys of each sequence."""
        return self._inputs.kv_lens

    def get_indexer_seq_len_cpu(self) -> Any:
        """One sequence that has as many keys as there is room for."""
        return self._bound

    def get_seqlens_expanded(self) -> Any:
        """Keys of each row."""
        return self._rows.kv_lens

    def get_token_to_batch_idx(self) -> Any:
        """Each row's sequence."""
        return self._rows.sequences

    def topk_transform(
        self,
        logits: Any,
        topk: int,
        ks: Any = None,
        ke_offset: Any = None,
        topk_indices_offset_override: Any = None,
        **_: Any,
    ) -> Any:
        """[rows, topk] int32: what the attention kernel reads, for all rows or a chunk of them.

        Slots of a bf16 pool; places among all keys that were read back from an fp8 one.
        """
        from nsa_tune.backend.kernels.sampled_topk import sampled_topk, shape_of
        from nsa_tune.backend.kernels.topk_transform import Kind, Transform

        lengths = self._rows.kv_lens if ke_offset is None else ke_offset
        chosen = topk_indices_offset_override
        where = self.attn_metadata.topk_indices_offset if chosen is None else chosen
        transform = (
            Transform(Kind.OFFSET, where) if self._packed
            else Transform(Kind.TABLE_BY_ROW, where, self._inputs.pages, PAGE)
        )  # fmt: skip
        shape = shape_of(logits.shape[0], _NOMINAL_KEYS)
        return sampled_topk(logits, lengths, topk, ks, shape, transform)


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """Sparse attention of one backend over the keys that were selected.

    FlashMLA's sparse kernel reads bf16. All keys of an fp8 pool are read back for it, as SGLang
    does. Its decode kernel reads fp8, but takes a third longer from 100 new tokens on.
    """

    backend: Any
    rows: Rows
    read: Keys | None = None
    """The keys to read back; None over a bf16 pool."""

    def __call__(self, query: Query) -> Any:
        """[rows, heads, rank] bf16."""
        layer, pool = query.layer, self.backend.token_to_kv_pool
        rank = layer.v_head_dim
        pool.set_mla_kv_buffer(layer, query.forward_batch.out_cache_loc, query.k, query.k_rope)
        latents = pool.get_key_buffer(layer.layer_id)
        if self.read is not None:
            latents = read_back(latents, self.read.slots, self.read.count)
            assert latents is not None, "the packed fp8 layout"
        out = self.backend._forward_flashmla_sparse(
            q_all=widened(query, PADDED_HEADS), kv_cache=latents, v_head_dim=rank,
            page_table_1=query.topk_indices, sm_scale=layer.scaling,
            topk_length=self.rows.selected,
        )  # fmt: skip
        return out[:, : layer.tp_q_head_num]


def widened(query: Query, multiple: int) -> Any:
    """Queries of latents and rotated dimensions side by side, [rows, heads, rank + rope] bf16.

    Heads are filled up to a multiple by whatever the memory held: a head's output depends on its
    own queries alone, and those of the others are cut off.
    """
    layer = query.layer
    heads, rank = layer.tp_q_head_num, layer.v_head_dim
    parts = (
        query.q.reshape(-1, heads, rank),
        query.q_rope.reshape(-1, heads, layer.head_dim - rank),
    )
    wide = -(-heads // multiple) * multiple
    out = parts[0].new_empty((parts[0].shape[0], wide, layer.head_dim))
    out[:, :heads, :rank] = parts[0]
    out[:, :heads, rank:] = parts[1]
    return out
