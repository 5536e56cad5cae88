"""Rows of scores on which selections go wrong: ties, infinities, what is no number, odd lengths."""

from __future__ import annotations

import torch

KINDS = ("numbers", "ties", "-inf", "inf", "NaN", "all equal", "only -inf", "only NaN")


def hard_scores(
    rows: int, columns: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scores [rows, columns] fp32, lengths [rows] int32, the index in `KINDS` of each row)."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def at(kind: str, share: float = 1.0) -> torch.Tensor:
        return (kinds == KINDS.index(kind))[:, None] & (uniform(rows, columns) < share)

    kinds = (uniform(rows) * len(KINDS)).long()
    scores = torch.randn((rows, columns), generator=generator, device=device) - uniform(rows, 1)
    scores = torch.where(at("ties"), (scores * 4).round() / 4, scores)
    # In each row another share, so that some have enough of the others and some have not.
    share = uniform(rows, 1)
    for kind, value in (("-inf", -torch.inf), ("inf", torch.inf), ("NaN", torch.nan)):
        scores[at(kind) & (uniform(rows, columns) < share)] = value
    scores[at("all equal")] = 0.5
    scores[at("only -inf")], scores[at("only NaN")] = -torch.inf, torch.nan
    # Short ones, full ones, and all in between.
    lengths = (uniform(rows) * 1.2 * (columns + 1)).long().clamp_max(columns).int()
    return scores, lengths, kinds


def wrong_rows(
    chosen: torch.Tensor, scores: torch.Tensor, lengths: torch.Tensor, count: int
) -> torch.Tensor:
    """[rows] bool: where `chosen` [rows, count] is no selection of the `count` largest scores.

    Up to ties: values are compared. What is no number is taken only where all of a row is, and -1
    fills up.
    """
    scores = scores.masked_fill(scores.isnan() & (lengths <= count)[:, None], -torch.inf)
    column = torch.arange(scores.shape[1], device=scores.device)
    valid = (column < lengths[:, None]) & ~scores.isnan()
    places = chosen.long().sort(1).values
    taken = places >= 0
    twice = ((places.diff(dim=1) == 0) & taken[:, 1:]).any(1)
    beyond = (places < -1).any(1) | (places >= lengths[:, None]).any(1)
    inside = places.clamp(0, scores.shape[1] - 1)
    few = taken.sum(1) != valid.sum(1).clamp_max(count)
    unfit = (taken & ~valid.gather(1, inside)).any(1)
    values = scores.masked_fill(~valid, -torch.inf).gather(1, inside)
    values = values.masked_fill(~taken, -torch.inf).sort(1).values
    least_first = scores.masked_fill(~valid, -torch.inf).sort(1).values[:, -count:]
    best = torch.nn.functional.pad(least_first, (count - least_first.shape[1], 0), value=-torch.inf)
    return twice | beyond | few | unfit | (values != best).any(1)
