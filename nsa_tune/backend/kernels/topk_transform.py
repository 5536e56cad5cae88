"""What selected places in a row of scores become: what a sparse attention kernel reads.

Engines fuse this with the selection. Over a pool a place becomes the slot that a page table has
for it. Over keys that lie one behind the other it becomes the place among all of a batch's keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


class Kind(IntEnum):
    """How a place is transformed; the kernel knows these numbers."""

    PLAIN = 0
    """Not at all."""
    OFFSET = 1
    """`map` has a number for each row that is added."""
    TABLE_BY_ROW = 2
    """`map` has, for each row, its sequence: a row of `table`."""
    TABLE_BY_START = 3
    """`map` has the first row of each sequence, and the number of rows."""


@dataclass(frozen=True, slots=True)
class Transform:
    """One batch's transform; contiguous int32 tensors, read unchecked."""

    kind: Kind
    map: torch.Tensor
    table: torch.Tensor | None = None
    """[sequences, columns]: the pool's pages of each sequence, last dimension contiguous."""
    page_size: int = 1
    """Slots of a page; a power of two."""

    @property
    def page_bits(self) -> int:
        """Bits of a place that say where in its page it is."""
        return self.page_size.bit_length() - 1

    @property
    def sequences(self) -> int:
        """Rows of the table."""
        return 0 if self.table is None else self.table.shape[0]


def transform_reference(places: torch.Tensor, transform: Transform) -> torch.Tensor:
    """`places` ([rows, topk] int32, -1 for none) transformed, in plain torch."""
    rows = torch.arange(places.shape[0], device=places.device)
    if transform.kind is Kind.PLAIN:
        return places
    if transform.kind is Kind.OFFSET:
        return torch.where(places < 0, -1, places + transform.map[: len(rows), None])
    assert transform.table is not None
    sequence = transform.map.long()
    if transform.kind is Kind.TABLE_BY_START:
        sequence = torch.searchsorted(transform.map, rows, right=True) - 1
    size, place = transform.page_size, places.long().clamp_min(0)
    pages = transform.table[sequence].gather(1, place // size)
    return torch.where(places < 0, -1, pages * size + place.int() % size)
