"""Input tensors of a prefill's logits: fp8 queries, weights, and the paged pool of index keys."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import torch

from nsa_tune.backend.points.checked_rows import row_error
from nsa_tune.backend.points.indexer_layout.case import key_pool
from nsa_tune.backend.points.indexer_prefill.features import chunk_bytes, rows_per_chunk
from nsa_tune.backend.points.paging import query_rows, scatter, slots_for
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

_CHECKED_ROWS = 24


class LogitsCase:
    """One extend batch, ready for every arm of the indexer_prefill point."""

    tolerance = 2e-3
    """fp8 products summed in fp32: only the order of the sum differs."""

    def __init__(self, batch: Batch, setting: Setting, device: torch.device) -> None:
        profile, lens = setting.profile, batch.given_lens
        contexts = [prefix + new for prefix, new in lens]
        keys = key_pool(profile, slots_for(contexts, profile.page_size, device), device)
        self.batch, self.setting, self.device = batch, setting, device
        self.pool, self._keys = keys.packed, keys
        """[pages, page size, 1, dim + 4] uint8: a page's e4m3 keys, then its fp32 scales."""
        paging = scatter(contexts, profile.page_size, keys.keys.shape[0], device)
        self.slots = paging.slots
        """[kv tokens] int32: slot of each key, sequence after sequence."""
        ends = list(accumulate(contexts))
        self.sequences = [
            (end - context, end, new)
            for end, context, (_, new) in zip(ends, contexts, lens, strict=True)
        ]
        """(first key, end of keys, new tokens) of each sequence."""
        sequence, self.lengths = query_rows(lens, device)
        """[rows] int32: keys that each query sees."""
        self.first = paging.starts[sequence].int()
        """[rows] int32: the first of them among the keys of all sequences."""
        self.end = self.first + self.lengths
        self._sequence, self._paging = sequence, paging
        generator = torch.Generator(device=device).manual_seed(2)
        shape = (batch.q_tokens, profile.index_heads, profile.index_dim)
        q = torch.randn(shape, generator=generator, device=device)
        self.q = q.to(torch.float8_e4m3fn)
        """[rows, heads, dim] e4m3."""
        self.weights = torch.rand(shape[:2], generator=generator, device=device)
        """[rows, heads] fp32."""
        self.rows_a_chunk = rows_per_chunk(batch, chunk_bytes(setting))
        """Rows whose ragged logits stay within the budget."""

    @cached_property
    def block_table(self) -> torch.Tensor:
        """[rows, pages of the longest] int32: the pages of each query's sequence."""
        return self._paging.block_table[self._sequence].contiguous()

    @cached_property
    def _reference(self) -> dict[int, torch.Tensor]:
        """The logits of the rows that are compared, over the keys they see, fp32, by row."""
        total, found = self.batch.q_tokens, {}
        for i in range(_CHECKED_ROWS):
            row = round(i * (total - 1) / (_CHECKED_ROWS - 1))
            first, end = int(self.first[row]), int(self.end[row])
            slots = self.slots[first:end].long()
            scores = self._keys.keys[slots].float() @ self.q[row].float().T
            found[row] = (scores.relu() * self.weights[row]).sum(-1) * self._keys.scales[slots]
        return found

    def error_of(self, output: torch.Tensor) -> float:
        """Largest relative error of a checked row of logits, over the keys that it sees.

        `output` has a column for each key of the longest sequence, or for each key of all; and a
        row for each query, or those of the last chunk.
        """
        return self.error_from(output, self.batch.q_tokens - len(output))

    def error_from(self, output: torch.Tensor, start: int) -> float:
        """The same for logits of the rows from `start` on; 0 where none of them is checked."""
        # Of a single sequence both widths are the same.
        ragged = output.shape[1] != self.batch.max_kv
        errors = [torch.zeros((), device=self.device)]
        for row, logits in self._reference.items():
            if start <= row < start + len(output):
                first = int(self.first[row]) if ragged else 0
                seen = output[row - start, first : first + len(logits)]
                errors.append(row_error(seen, logits))
        # The norm of anything that is not finite is not finite.
        return float(torch.stack(errors).nan_to_num(nan=float("inf")).max())
