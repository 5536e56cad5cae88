"""Sparse attention and selection as graphs capture them, by kernels in plain PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_tune.backend.kernels import packed_fp8
from nsa_tune.backend.kernels import sampled_topk as kernel
from nsa_tune.backend.kernels.sampled_topk import sampled_topk_reference
from nsa_tune.backend.kernels.topk_transform import Transform, transform_reference
from nsa_tune.engines.sglang.facts import PAGE
from nsa_tune.engines.sglang.pass_mode.whole_pass.attention import Query
from nsa_tune.engines.sglang.pass_mode.whole_pass.sparse_attention import (
    IndexerMetadata,
    SparseAttention,
    widened,
)
from nsa_tune.engines.sglang.pass_mode.whole_pass.sparse_inputs import Rows, SparseInputs

HEADS, RANK, ROPE, TOPK = 3, 512, 64, 8
PREFIX_LENS, EXTEND_LENS = [70, 0], [2, 3]
LAYER = SimpleNamespace(
    layer_id=7, head_dim=RANK + ROPE, v_head_dim=RANK, tp_q_head_num=HEADS, scaling=0.07
)


@pytest.fixture
def inputs() -> SparseInputs:
    """Two sequences, whose pages are 3, 1 and 2."""
    made = SparseInputs(8 * PAGE, torch.device("cpu"))
    made.write(PREFIX_LENS, EXTEND_LENS)
    made.pages[0, :2] = torch.tensor([3, 1])
    made.pages[1, 0] = 2
    return made


def _rows(inputs: SparseInputs) -> Rows:
    return inputs.rows(6, TOPK)  # one of them is padding


def _by_reference(
    scores: Any, lengths: Any, count: int, starts: Any, shape: Any, transform: Transform
) -> torch.Tensor:
    places = sampled_topk_reference(scores, lengths, count, starts)
    return transform_reference(places, transform)


@pytest.fixture(autouse=True)
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "sampled_topk", _by_reference)


@pytest.mark.parametrize("packed", [False, True])
def test_the_indexer_selects_slots_of_the_pool_or_places_among_all_keys(
    inputs: SparseInputs, packed: bool
) -> None:
    rows = _rows(inputs)
    metadata = IndexerMetadata(inputs, rows, packed=packed)
    first, last = metadata.get_indexer_kvcache_range()
    logits = torch.rand(6, 80)

    selected = metadata.topk_transform(logits, TOPK, ks=first)

    slots = inputs.keys().slots
    for row, (start, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        best = logits[row, start:end].topk(min(TOPK, end - start)).indices + start
        expected = best if packed else slots[best]
        found = selected[row][selected[row] >= 0]
        assert sorted(found.tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize("packed", [False, True])
def test_a_chunk_of_rows_selects_what_all_rows_together_do(
    inputs: SparseInputs, packed: bool
) -> None:
    """SGLang's own loop over chunks passes parts of what the metadata has for all rows."""
    metadata = IndexerMetadata(inputs, _rows(inputs), packed=packed)
    first, _ = metadata.get_indexer_kvcache_range()
    offsets = metadata.attn_metadata.topk_indices_offset
    lengths, logits = metadata.get_seqlens_expanded(), torch.rand(6, 80)
    chunks = [
        metadata.topk_transform(
            logits[part], TOPK, ks=first[part], cu_seqlens_q=None, ke_offset=lengths[part],
            batch_idx_list=None, topk_indices_offset_override=offsets[part],
        )
        for part in (slice(0, 4), slice(4, 6))
    ]  # fmt: skip

    whole = metadata.topk_transform(logits, TOPK, ks=first)
    assert torch.equal(torch.cat(chunks).sort(1).values, whole.sort(1).values)


def test_the_indexer_allocates_by_the_room_and_reads_by_the_batch(inputs: SparseInputs) -> None:
    metadata = IndexerMetadata(inputs, _rows(inputs), packed=False)

    assert metadata.get_indexer_seq_len_cpu().tolist() == [inputs.most_keys]
    assert metadata.get_indexer_seq_len()[:3].tolist() == [72, 3, 0]
    assert metadata.get_page_table_64() is metadata.get_logical_page_table() is inputs.pages


class _Pool:
    """A KV pool, bf16 or packed as SGLang packs it."""

    def __init__(self, *, packed: bool) -> None:
        self.packed = packed
        latents = torch.randn(4 * PAGE, 1, RANK + ROPE).bfloat16()
        self.held = self._stored(latents)

    def _stored(self, latents: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return latents
        raw = packed_fp8.quantize_reference(latents.flatten(1), RANK)
        return raw.view(torch.float8_e4m3fn).unsqueeze(1)

    def set_mla_kv_buffer(self, layer: Any, slots: Any, latent: Any, rope: Any) -> None:
        stored = self._stored(torch.cat([latent, rope], dim=-1))
        self.held.view(torch.uint8)[slots] = stored.view(torch.uint8)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        assert layer_id == LAYER.layer_id
        return self.held

    def latents(self, slots: torch.Tensor) -> torch.Tensor:
        """[slots, rank + rope] fp32."""
        if not self.packed:
            return self.held[slots.long(), 0].float()
        raw = self.held.view(torch.uint8).flatten(1)
        return packed_fp8.dequantize_reference(raw, slots, RANK, ROPE).float()


class _Backend:
    """FlashMLA's sparse kernel in plain PyTorch."""

    def __init__(self, *, packed: bool) -> None:
        self.token_to_kv_pool = _Pool(packed=packed)

    def _forward_flashmla_sparse(self, **given: Any) -> torch.Tensor:
        q, latents, indices = given["q_all"], given["kv_cache"], given["page_table_1"]
        assert q.shape[1] % 64 == 0
        assert latents.dtype is torch.bfloat16
        out = []
        for row, count in enumerate(given["topk_length"].tolist()):
            keys = latents[indices[row, :count].long(), 0].float()
            weights = (q[row].float() @ keys.T * given["sm_scale"]).softmax(-1)
            out.append(weights @ keys[:, : given["v_head_dim"]])
        return torch.stack(out)


def _query(indices: torch.Tensor) -> Query:
    return Query(
        q=torch.randn(6, HEADS * RANK).bfloat16(), q_rope=torch.randn(6, HEADS, ROPE).bfloat16(),
        k=torch.randn(6, 1, RANK).bfloat16(), k_rope=torch.randn(6, 1, ROPE).bfloat16(),
        topk_indices=indices,
        layer=LAYER,
        forward_batch=SimpleNamespace(out_cache_loc=torch.tensor([70, 71, 128, 129, 130, 0])),
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_it_attends_to_the_selected_keys_of_either_pool(inputs: SparseInputs, packed: bool) -> None:
    rows, backend, keys = _rows(inputs), _Backend(packed=packed), inputs.keys()
    metadata, logits = IndexerMetadata(inputs, rows, packed=packed), torch.rand(6, 80)
    selected = metadata.topk_transform(logits, TOPK, ks=rows.first_keys)
    indices = selected.sort(descending=True).values
    query = _query(indices)

    out = SparseAttention(backend, rows, keys if packed else None)(query)

    pool = backend.token_to_kv_pool
    new = torch.cat([query.k, query.k_rope], dim=-1)[2:5, 0].float()
    # The precision of e4m3.
    torch.testing.assert_close(pool.latents(torch.arange(128, 131)), new, atol=0.01, rtol=1 / 16)
    assert out.shape == (6, HEADS, RANK)
    whole = torch.cat([query.q.view(6, HEADS, RANK), query.q_rope], dim=-1).float()
    for row, count in enumerate(rows.selected.tolist()):
        places = indices[row, :count].long()
        latents = pool.latents(keys.slots[places] if packed else places)
        weights = (whole[row] @ latents.T * LAYER.scaling).softmax(-1)
        torch.testing.assert_close(out[row], weights @ latents[:, :RANK])


def test_queries_are_filled_up_to_the_heads_that_the_kernel_takes() -> None:
    query = _query(torch.zeros(6, TOPK, dtype=torch.int32))
    wide = widened(query, 64)

    assert wide.shape == (6, 64, RANK + ROPE)
    own = torch.cat([query.q.view(6, HEADS, RANK), query.q_rope], dim=-1)
    assert torch.equal(wide[:, :HEADS], own)
