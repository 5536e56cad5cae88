"""Selections with stated statistics: what neighbouring queries share, and where their keys lie.

A kernel that gathers keys once for several queries is judged by what these share. Of trained models
little is published; docs/method.md says what, and what is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_COLUMNS_AT_ONCE = 256
_SINKS = 1 / 512
"""4 of 2048 keys, as many as StreamingLLM keeps (arXiv 2309.17453)."""
_RECENT = 1 / 16
"""128 of 2048 keys. Assumed: no measurement of it is published."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Statistics of the keys that an indexer selects, as shares of index_topk from 0 to 1.

    Neighbours share sinks and recent keys, so that together these are no more than the overlap.
    """

    overlap: float
    """Share of its selection that a query has in common with the query before it."""
    sinks: float = _SINKS
    """Share of keys at the beginning of the sequence, which all queries select."""
    recent: float = _RECENT
    """Share of keys right before the query, all of which it selects."""

    @classmethod
    def sharing(cls, overlap: float) -> Selection:
        """The usual shares of sinks and recent keys, or less where these pass the `overlap`."""
        return cls(overlap, min(_SINKS, overlap / 2), min(_RECENT, overlap / 2))


def selected_keys(
    selection: Selection, seen: torch.Tensor, first: torch.Tensor, topk: int, seed: int
) -> torch.Tensor:
    """Keys of queries, in one scrambled order for all of them.

    Between the sinks and the recent keys, each column of a selection owns every n-th key, so that
    no key is selected twice. From one query to the next it keeps its key, or draws a new one.

    Args:
        selection: what they have in common.
        seen: [rows] int64: how many keys each query sees, its own included; it grows by one from a
            query to the next of its sequence.
        first: [rows] int64: row of the first query of each row's sequence.
        topk: keys that a query selects.
        seed: of what is drawn.

    Returns:
        [rows, topk] int64 places in the sequence, below `seen`; behind the keys of a query that
        sees fewer than `topk`, and selects all of them, -1.
    """
    rows, device = len(seen), seen.device
    generator = torch.Generator(device=device).manual_seed(seed)
    sinks, recent = round(selection.sinks * topk), round(selection.recent * topk)
    drawn = topk - sinks - recent
    # Of the recent keys the oldest leaves as the query's own comes.
    shared = sinks + max(recent - 1, 0)
    wanted = (selection.overlap * topk - shared) / max(drawn, 1)
    seen, row = seen[:, None], torch.arange(rows, device=device)[:, None]
    order = torch.randperm(topk, generator=generator, device=device)
    out = torch.empty(rows, topk, dtype=torch.int64, device=device)
    column = torch.arange(topk, device=device)
    out[:, order[:sinks]] = column[:sinks].expand(rows, -1)
    out[:, order[sinks : sinks + recent]] = seen - recent + column[:recent]
    for start in range(0, drawn, _COLUMNS_AT_ONCE):
        part = column[start : min(start + _COLUMNS_AT_ONCE, drawn)]
        # How many keys the column may draw from.
        count = (-((part - (seen - sinks - recent)) // drawn)).clamp_min(1)
        dice = torch.rand(2, rows, len(part), generator=generator, device=device)
        # A new draw may hit the old key.
        keep = ((wanted - 1 / count) / (1 - 1 / count).clamp_min(1e-6)).clamp(0.0, 1.0)
        new = (dice[0] >= keep) | (row == first[:, None]) | (seen == topk + 1)
        since = torch.where(new, row, 0).cummax(0).values
        turn = (dice[1] * count).long().clamp_max(count - 1).gather(0, since)
        out[:, order[sinks + recent + part]] = sinks + part + turn * drawn
    place = torch.where(column < seen, column, -1)
    return torch.where(seen > topk, out, place)
