"""Input tensors of prefill and decode: one layer's queries, weights, paged pool and selection."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache

import torch

from nsa_tune.backend.kernels import packed_fp8
from nsa_tune.backend.points.checked_rows import checked_rows, worst_error
from nsa_tune.backend.points.paging import (
    placed,
    query_rows,
    scatter,
    slots_for,
    spread_selection,
)
from nsa_tune.backend.points.selections import Selection, selected_keys
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import ModelProfile


@lru_cache(maxsize=2)
def _layer(
    profile: ModelProfile, heads: int, layout: KVLayout, slots: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """What all batches of one setting share; bf16 unless said otherwise.

    Returns:
        The pool: [slots, bytes a token] uint8 (packed fp8) or [slots, latent]; the values that it
        stands for, [slots, latent]; kv_b_proj's weight, [heads * (nope + v), rank]; its key half,
        for absorbing into q, [heads, nope, rank]; and its value half, [heads, rank, v].
    """
    generator = torch.Generator(device=device).manual_seed(1)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
        return (values * std).to(torch.bfloat16)

    latents = normal(slots, profile.latent)
    pool = latents
    if layout is KVLayout.FP8_PACKED:
        pool = packed_fp8.quantize_reference(latents, profile.rank)
        everything = torch.arange(slots, device=device)
        # The new tokens' latents are what the pool holds of them, so that every arm sees the
        # same values and an arm's error is its own.
        latents = packed_fp8.dequantize_reference(pool, everything, profile.rank, profile.rope)
    w_kv = normal(heads * (profile.nope + profile.v), profile.rank, std=profile.rank**-0.5)
    halves = w_kv.view(heads, profile.nope + profile.v, profile.rank)
    w_uk = halves[:, : profile.nope].contiguous()
    w_uv = halves[:, profile.nope :].transpose(1, 2).contiguous()
    return pool, latents, w_kv, w_uk, w_uv


class PrefillCase:
    """One extend batch, ready for every arm of the prefill point."""

    tolerance = 0.02
    """bf16 operands and probabilities leave 0.003 to 0.008; a wrong key leaves far more."""

    def __init__(self, batch: Batch, setting: Setting, device: torch.device) -> None:
        self.batch, self.setting, self.device = batch, setting, device
        self.profile, self.heads, self.layout = setting.profile, setting.heads, setting.layout
        page, lens = self.profile.page_size, [prefix + new for prefix, new in batch.given_lens]
        slots = slots_for(lens, page, device)
        paging = scatter(lens, page, slots, device)
        self.pool, self._latents, self.w_kv, self.w_uk, self.w_uv = _layer(
            self.profile, self.heads, self.layout, slots, device
        )
        self.slots, self.block_table = paging.slots, paging.block_table
        self.has_prefix = batch.prefix_tokens > 0
        new = torch.tensor([new for _, new in batch.given_lens], device=device)
        self.starts_q = torch.cat((new.new_zeros(1), new.cumsum(0)))
        """[sequences + 1] int64: first query of each sequence."""
        self.starts_kv = paging.starts
        """[sequences + 1] int64: first kv token of each sequence."""
        sequence, seen = query_rows(batch.given_lens, device)
        self.positions = seen.long() - 1
        """[q tokens] int64: index of each query in its sequence."""
        self.first_key = self.starts_kv[sequence]
        """[q tokens] int64: first flattened kv token of each query's sequence."""
        self.topk_length = (self.positions + 1).clamp_max(self.profile.index_topk).int()
        """[q tokens] int32: keys that each query attends to."""
        new_slots = self.slots[self.first_key + self.positions].long()
        self.new_latent = self._latents[new_slots, : self.profile.rank]
        """[q tokens, rank]: the new tokens' latents, at hand before they are in the pool."""
        self.new_rope = self._latents[new_slots, self.profile.rank :]
        generator = torch.Generator(device=device).manual_seed(2)
        shape = (batch.q_tokens, self.heads, self.profile.nope + self.profile.rope)
        self.q = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        """[q tokens, heads, nope + rope] bf16."""

    def read_back(self, slots: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Latents [tokens, rank + rope] bf16 of the tokens in `slots`, gathered from the pool."""
        if self.layout is KVLayout.BF16:
            return lambda: self.pool.index_select(0, slots)
        rank, rope = self.profile.rank, self.profile.rope
        if self.device.type == "cpu":
            return lambda: packed_fp8.dequantize_reference(self.pool, slots, rank, rope)
        return lambda: packed_fp8.dequantize(self.pool, slots, rank, rope)

    @cached_property
    def ragged_indices(self) -> torch.Tensor:
        """[q tokens, topk] int32 into the flattened kv tokens, -1 behind `topk_length`.

        Up to index_topk keys the selection is all of them; beyond, keys spread over the whole
        context in a scrambled order, as a top-k returns them; or with the setting's overlap.
        """
        topk, overlap = self.profile.index_topk, self.setting.overlap
        if overlap is not None:
            first = self.starts_q[:-1].repeat_interleave(self.starts_q.diff())
            keys = selected_keys(
                Selection.sharing(overlap), self.positions + 1, first, topk, seed=3
            )
            return torch.where(keys >= 0, keys + self.first_key[:, None], -1).int()
        out = torch.empty(self.batch.q_tokens, topk, dtype=torch.int32, device=self.device)
        return spread_selection(self.positions + 1, self.first_key, out, topk, seed=3)

    @cached_property
    def paged_indices(self) -> torch.Tensor:
        """`ragged_indices` as slots of the pool: [q tokens, topk] int32."""
        return placed(self.ragged_indices, self.slots)

    @cached_property
    def _checked(self) -> torch.Tensor:
        """Rows whose output is compared."""
        return checked_rows(self.starts_q, seed=4)

    @cached_property
    def _reference(self) -> torch.Tensor:
        """[checked rows, heads, v] fp32: softmax attention over each row's selection."""
        profile, rows = self.profile, self._checked
        indices = self.ragged_indices[rows].long()
        keys = self._latents[self.slots[indices.clamp_min(0)].long()].float()
        q = self.q[rows].float()
        absorbed = torch.einsum("rhn,hnc->rhc", q[..., : profile.nope], self.w_uk.float())
        scores = torch.einsum("rhc,rkc->rhk", absorbed, keys[..., : profile.rank])
        scores += torch.einsum("rhd,rkd->rhk", q[..., profile.nope :], keys[..., profile.rank :])
        scores = (scores * profile.softmax_scale).masked_fill((indices < 0)[:, None], -torch.inf)
        mixed = torch.einsum("rhk,rkc->rhc", scores.softmax(-1), keys[..., : profile.rank])
        return torch.einsum("rhc,hcv->rhv", mixed, self.w_uv.float())

    def error_of(self, output: torch.Tensor) -> float:
        """Largest relative error of a checked row; inf when any output is not finite."""
        return worst_error(output, self._checked, self._reference)


class DenseCase(PrefillCase):
    """The same in a model without an indexer: a query attends to all tokens up to its own."""

    @cached_property
    def slot_table(self) -> torch.Tensor:
        """[sequences, kv tokens of the longest] int32 slots: a table of pages of one token."""
        page = self.profile.page_size
        offsets = torch.arange(page, dtype=torch.int32, device=self.device)
        slots = self.block_table[:, :, None] * page + offsets
        return slots.flatten(1)[:, : self.batch.max_kv].contiguous()

    @cached_property
    def _reference(self) -> torch.Tensor:
        """[checked rows, heads, v] fp32: softmax attention over all that each row sees."""
        return torch.stack([self._attended(row) for row in self._checked.tolist()])

    def _attended(self, row: int) -> torch.Tensor:
        profile, first = self.profile, int(self.first_key[row])
        slots = self.slots[first : first + int(self.positions[row]) + 1]
        keys, q = self._latents[slots.long()].float(), self.q[row].float()
        absorbed = torch.einsum("hn,hnc->hc", q[:, : profile.nope], self.w_uk.float())
        q = torch.cat((absorbed, q[:, profile.nope :]), dim=-1)
        weights = (q @ keys.T * profile.softmax_scale).softmax(-1)
        return torch.einsum("hc,hcv->hv", weights @ keys[:, : profile.rank], self.w_uv.float())


def prefill_case(batch: Batch, setting: Setting, device: torch.device) -> PrefillCase:
    """The inputs of `batch`.

    Raises:
        BatchError: when only the batch's sums are known.
    """
    case = PrefillCase if setting.profile.has_indexer else DenseCase
    return case(batch, setting, device)
