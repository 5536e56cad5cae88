"""Input tensors of the indexer: fp8 queries, weights and the paged pool of index keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from nsa_tune.backend.points.checked_rows import row_error
from nsa_tune.backend.points.paging import scatter, slots_for
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import ModelProfile

_CHECKED_ROWS = 16


@dataclass(frozen=True, slots=True)
class KeyPool:
    """The index keys of one layer."""

    packed: torch.Tensor
    """[pages, page size, 1, dim + 4] uint8: a page's e4m3 keys, then its fp32 scales."""
    keys: torch.Tensor
    """[slots, dim] e4m3."""
    scales: torch.Tensor
    """[slots] fp32."""


# A sweep jumps between the pool sizes; all of them together take twice the largest.
@lru_cache(maxsize=6)
def key_pool(profile: ModelProfile, slots: int, device: torch.device) -> KeyPool:
    """The pool of `slots` tokens that the batches of one size share."""
    generator = torch.Generator(device=device).manual_seed(1)
    page, dim = profile.page_size, profile.index_dim
    values = torch.randn(slots, dim, generator=generator, device=device)
    keys = values.to(torch.float8_e4m3fn)
    scales = 0.5 + torch.rand(slots, generator=generator, device=device)
    # DeepGEMM's page holds all keys first and all scales after them, whatever its shape says.
    pages = torch.cat(
        (
            keys.view(torch.uint8).view(-1, page * dim),
            scales.view(-1, page).view(torch.uint8).view(-1, page * 4),
        ),
        dim=1,
    )
    return KeyPool(pages.view(-1, page, 1, dim + 4), keys, scales)


class IndexerCase:
    """One decode-like batch, ready for every arm of the indexer_layout point."""

    tolerance = 2e-3
    """fp8 products summed in fp32: only the order of the sum differs."""

    def __init__(self, batch: Batch, setting: Setting, device: torch.device) -> None:
        profile = setting.profile
        contexts = [prefix + new for prefix, new in batch.given_lens]
        pool = key_pool(profile, slots_for(contexts, profile.page_size, device), device)
        self.batch, self.profile, self.device = batch, profile, device
        self.pool, self._keys = pool.packed, pool
        self._contexts = contexts
        self.max_context = batch.max_kv
        paging = scatter(contexts, profile.page_size, pool.keys.shape[0], device)
        self.slots, self.starts, self.block_table = (
            paging.slots, paging.starts, paging.block_table,
        )  # fmt: skip
        rows, heads = batch.batch_size, profile.index_heads
        generator = torch.Generator(device=device).manual_seed(2)
        shape = (rows, batch.next_n, heads, profile.index_dim)
        q = torch.randn(shape, generator=generator, device=device)
        self.q = q.to(torch.float8_e4m3fn)
        """[sequences, next_n, heads, dim] e4m3."""
        self.weights = torch.rand(rows * batch.next_n, heads, generator=generator, device=device)
        """[sequences * next_n, heads] fp32."""
        last = torch.tensor(contexts, device=device, dtype=torch.int32)
        back = torch.arange(batch.next_n - 1, -1, -1, device=device, dtype=torch.int32)
        self.context_lens = (last[:, None] - back).contiguous()
        """[sequences, next_n] int32: keys that each query sees."""

    @cached_property
    def _reference(self) -> list[tuple[int, torch.Tensor]]:
        """(row, its logits [keys that it sees] fp32) of the rows that are compared."""
        total = self.batch.batch_size * self.batch.next_n
        found = []
        for row in sorted(
            {round(i * (total - 1) / (_CHECKED_ROWS - 1)) for i in range(_CHECKED_ROWS)}
        ):
            sequence, step = divmod(row, self.batch.next_n)
            seen = self._contexts[sequence] - (self.batch.next_n - 1 - step)
            start = sum(self._contexts[:sequence])
            slots = self.slots[start : start + seen].long()
            scores = self._keys.keys[slots].float() @ self.q[sequence, step].float().T
            logits = (scores.relu() * self.weights[row]).sum(-1) * self._keys.scales[slots]
            found.append((row, logits))
        return found

    def error_of(self, output: torch.Tensor) -> float:
        """Largest relative error of a checked row of logits, over the keys it sees."""
        errors = [row_error(output[row, : len(logits)], logits) for row, logits in self._reference]
        # One transfer for all rows. The norm of anything that is not finite is not finite.
        return float(torch.stack(errors).nan_to_num(nan=float("inf")).max())
