"""Input tensors of a selection: the scores of each query, and what the right one is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch

from nsa_tune.backend.points.paging import query_rows
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

_PADDED = 256
"""DeepGEMM gives the logits of a row room for a multiple of so many."""
_SCORES_AT_ONCE = 2**27
_LAYERS = 64
"""Most layers that have scores of their own."""
_SCORES_OF_LAYERS, _ON_A_CPU = 2**26, 2**20
"""Scores of them all together, unless the first layer alone has more."""


class TopkCase:
    """The scores of one batch's queries, a row each, in several layers.

    How long a selection takes depends on the scores too: one that sorts them by their leading bits
    ends early where these bits alone tell what is selected from the rest. Layers differ, so that
    few batches are lucky in all of them; a large batch has one layer, whose many rows average it
    out. Each row's scores are normally distributed around a mean of their own, so that no length is
    lucky: around 0 floating-point numbers lie closest, and half of a row would be selected at once.
    """

    tolerance = 0.0
    """A selection is right or wrong."""

    def __init__(self, batch: Batch, setting: Setting, device: torch.device) -> None:
        self.batch, self.device = batch, device
        self.topk = setting.profile.index_topk
        _, self.lengths = query_rows(batch.given_lens, device)
        """[rows] int32: scores of a row that count."""
        shape = (batch.q_tokens, -(-batch.max_kv // _PADDED) * _PADDED)
        most = _ON_A_CPU if device.type == "cpu" else _SCORES_OF_LAYERS
        layers = max(min(_LAYERS, most // (shape[0] * shape[1])), 1)
        generator = torch.Generator(device=device).manual_seed(1)
        self._layers = [_scores(shape, generator) for _ in range(layers)]
        self.padded = self._layers[0]
        """[rows, columns] fp32, contiguous: the first layer's. Beyond a row's length any number, as
        in an engine."""
        self.scores = self.padded[:, : batch.max_kv]
        """[rows, max kv] fp32."""

    def layers(self, padded: bool = False) -> Iterator[torch.Tensor]:
        """The scores of one layer after another, from the first on, without end."""
        columns = self.padded.shape[1] if padded else self.batch.max_kv
        return cycle([layer[:, :columns] for layer in self._layers])

    def error_of(self, output: torch.Tensor) -> float:
        """0 where every row of `output` is a right selection of the first layer's, else inf.

        As a set: in any order, and with any of those scores that equal the least one selected.
        """
        if output.shape != (self.batch.q_tokens, self.topk) or output.is_floating_point():
            return float("inf")
        step = max(_SCORES_AT_ONCE // self.padded.shape[1], 1)
        for start in range(0, len(output), step):
            rows = slice(start, start + step)
            if not self._right(output[rows].long(), self.scores[rows], self.lengths[rows, None]):
                return float("inf")
        return 0.0

    def _right(self, chosen: torch.Tensor, scores: torch.Tensor, lengths: torch.Tensor) -> bool:
        """Whether as many are chosen as there should be, none of them twice, and none is left
        that is larger than the least of them."""
        chosen = chosen.sort(dim=1, descending=True).values
        taken, wanted = chosen >= 0, lengths.clamp_max(self.topk)
        if not torch.equal(taken.sum(1, keepdim=True), wanted) or (chosen < -1).any():
            return False
        twice = (chosen.diff(dim=1) == 0) & taken[:, 1:]
        if twice.any() or (chosen >= lengths).any():
            return False
        values = scores.gather(1, chosen.clamp_min(0))
        least = values.masked_fill(~taken, torch.inf).amin(1, keepdim=True)
        column = torch.arange(scores.shape[1], device=scores.device)
        larger = ((scores > least) & (column < lengths)).sum(1)
        return torch.equal(larger, ((values > least) & taken).sum(1))


def _scores(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Normally distributed, around a mean between -1 and 0 that each row has of its own."""
    scores = torch.randn(shape, generator=generator, device=generator.device)
    return scores.sub_(torch.rand((shape[0], 1), generator=generator, device=generator.device))
