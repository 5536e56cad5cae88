"""A model whose passes run as SGLang's: keys of all new tokens first, then attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.engines.sglang.pass_mode.fakes import Mode, batch


class Model:
    """Two layers of causal attention over one pool of keys, paged by a table of slots.

    As in SGLang each layer writes the keys of all new tokens before any of them attends, and slot
    0 is nobody's.
    """

    width = 8

    def __init__(self, requests: int, longest: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        slots = 1 + torch.randperm(requests * longest, generator=generator)
        self.table = slots.view(requests, longest)
        self.embedding = torch.randn(4096, self.width, generator=generator, dtype=torch.double)
        self.weights = torch.randn(
            2, 3, self.width, self.width, generator=generator, dtype=torch.double
        )
        self.pool = torch.full((2, 2, 1 + len(slots), self.width), torch.nan, dtype=torch.double)

    def extend(self, lens: Sequence[tuple[int, int]]) -> Any:
        """A batch of sequences of (prefix, new tokens), whose prefixes have been computed."""
        kept = [i for i, (prefix, _) in enumerate(lens) if prefix]
        if kept:
            earlier = batch([0] * len(kept), [lens[i][0] for i in kept])
            earlier.req_pool_indices = torch.tensor([i + 1 for i in kept])
            earlier.out_cache_loc = torch.cat([self.table[i + 1, : lens[i][0]] for i in kept])
            self(earlier)
        found = batch([prefix for prefix, _ in lens], [new for _, new in lens])
        found.out_cache_loc = torch.cat(
            [self.table[i + 1, prefix : prefix + new] for i, (prefix, new) in enumerate(lens)]
        )
        return found

    def _layer(self, hidden: torch.Tensor, batch: Any, layer: int) -> torch.Tensor:
        query, key, value = hidden @ self.weights[layer]
        self.pool[layer, 0, batch.out_cache_loc] = key
        self.pool[layer, 1, batch.out_cache_loc] = value
        return hidden + torch.stack(
            [
                self._attend(query[row], batch_row, layer)
                for row, batch_row in enumerate(self.keys(batch))
            ]
        )

    def _attend(self, query: torch.Tensor, slots: torch.Tensor, layer: int) -> torch.Tensor:
        key, value = self.pool[layer, 0, slots], self.pool[layer, 1, slots]
        weights = (key @ query / self.width**0.5).softmax(0)
        return torch.matmul(weights, value)

    def keys(self, batch: Any) -> list[torch.Tensor]:
        """The slots that each new token attends to, as the mode has it."""
        requests, lens = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        if batch.forward_mode is Mode.DECODE:
            return [self.table[r, :kv] for r, kv in zip(requests, lens, strict=True)]
        if batch.forward_mode is Mode.TARGET_VERIFY:
            # The lengths are those before a request's rows; all requests have as many.
            rows = len(batch.input_ids) // len(requests)
            return [
                self.table[request, : before + row + 1]
                for request, before in zip(requests, lens, strict=True)
                for row in range(rows)
            ]
        return [
            self.table[request, : kv - new + token + 1]
            for request, kv, new in zip(requests, lens, batch.extend_seq_lens_cpu, strict=True)
            for token in range(new)
        ]

    def __call__(self, batch: Any) -> torch.Tensor:
        hidden = self.embedding[batch.input_ids]
        for layer in range(2):
            hidden = self._layer(hidden, batch, layer)
        return hidden
