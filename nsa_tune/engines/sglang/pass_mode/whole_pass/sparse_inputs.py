"""Where sparse graphs read a batch: its lengths and its pages, and what follows from them.

A graph keeps the addresses of what it reads, and the sizes of what it launches. So everything here
has room for the largest batch, and the kernels stop where this batch ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nsa_tune.engines.sglang.facts import PAGE

SEQUENCES = 32
"""The most sequences of a batch. Gathering the indexer's keys visits them all, empty or not."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What attention and the indexer read of each row, int32 [rows] each, on the GPU.

    Rows of padding see the first key of the first sequence: no row may be without keys, for a NaN
    would reach the experts' router.
    """

    sequences: Any
    """The row's sequence."""
    first_keys: Any
    """Where its sequence's keys begin among the keys of all."""
    last_keys: Any
    """Behind the last of them that the row sees."""
    kv_lens: Any
    """How many it sees."""
    selected: Any
    """How many of them are selected."""


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys of a batch, one sequence behind the other, on the GPU."""

    slots: Any
    """The pool's slot of each; int32 [most keys], behind the last key anything."""
    count: Any
    """How many there are; int32 [1]."""


class SparseInputs:
    """One batch in the GPU's memory, as all sparse graphs of one engine read it."""

    def __init__(self, most_keys: int, device: Any) -> None:
        """`most_keys`: of all sequences together, a multiple of the page size."""
        import torch

        self.most_keys = most_keys
        numbers = torch.zeros(3 * SEQUENCES + 2, dtype=torch.int32, device=device)
        self._numbers = numbers
        self._starts, self._kv_starts, self.kv_lens = numbers.split(
            [SEQUENCES + 1, SEQUENCES + 1, SEQUENCES]
        )
        self.pages = torch.zeros((SEQUENCES, most_keys // PAGE), dtype=torch.int32, device=device)
        """The pool's pages of each sequence."""

    def write(self, prefix_lens: Sequence[int], extend_lens: Sequence[int]) -> None:
        """Write a batch's lengths; sequences without new tokens are not part of it."""
        import torch

        starts, kv_starts, kv_lens = [0], [0], []
        for prefix, new in zip(prefix_lens, extend_lens, strict=True):
            starts.append(starts[-1] + new)
            kv_lens.append(prefix + new)
            kv_starts.append(kv_starts[-1] + prefix + new)
        absent = SEQUENCES - len(kv_lens)
        assert absent >= 0 and kv_starts[-1] <= self.most_keys, "a batch that fits"
        numbers = starts + starts[-1:] * absent + kv_starts + kv_starts[-1:] * absent
        numbers += kv_lens + [0] * absent
        host = torch.tensor(numbers, dtype=torch.int32, pin_memory=self._numbers.is_cuda)
        self._numbers.copy_(host, non_blocking=True)

    def write_pages(self, table: Any, requests: Any, longest: int) -> None:
        """Write the pages of the sequences, of which the longest has so many keys.

        Args:
            table: SGLang's page table of single tokens, [requests, context length] int32.
            requests: [sequences] int64, the rows of `table`.
            longest: keys.
        """
        pages = table[requests, :longest:PAGE] // PAGE
        self.pages[: pages.shape[0], : pages.shape[1]] = pages

    def rows(self, size: int, index_topk: int) -> Rows:
        """What `size` rows read, computed on the GPU: within a graph, in each replay."""
        import torch

        row = torch.arange(size, dtype=torch.int32, device=self._numbers.device)
        ends = self._starts[1:]
        at = torch.searchsorted(ends, row, right=True).clamp_max(SEQUENCES - 1)
        real = row < self._starts[-1]
        at = torch.where(real, at, 0)
        kv_lens = torch.where(real, self.kv_lens[at] - ends[at] + row + 1, 1)
        first = self._kv_starts[at]
        selected = kv_lens.clamp_max(index_topk)
        return Rows(at.int(), first, first + kv_lens, kv_lens, selected)

    def keys(self) -> Keys:
        """All keys of the batch, computed on the GPU as `rows` are."""
        import torch

        key = torch.arange(self.most_keys, dtype=torch.int32, device=self._numbers.device)
        ends = self._kv_starts[1:]
        at = torch.searchsorted(ends, key, right=True).clamp_max(SEQUENCES - 1)
        place = key - self._kv_starts[at]
        page = (place // PAGE).clamp_max(self.pages.shape[1] - 1)
        return Keys(self.pages[at, page] * PAGE + place % PAGE, self._kv_starts[-1:])
