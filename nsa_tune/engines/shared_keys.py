"""What neighbouring queries' selections have in common in an engine, looked at now and then.

A kernel that reads the union of four queries' keys is as fast as they are alike. Which of their
keys two queries share by chance is known from their contexts; what they share beyond is sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

_ROWS = 33
"""Neighbouring queries in a sample."""
_FEWEST = 512
"""New tokens of a sequence that is looked at, at least: with fewer no union is worth it."""
_LAYERS, _SPACING = 3, 5
"""Layers of a pass that are looked at, and every how many."""
_LATER = 2
"""Prefills after which a sample is read: an engine has that pass's output by then, on any rank."""
_GOLDEN = (5**0.5 - 1) / 2


class SharedKeys:
    """The share of its selection that a query keeps from the query before it, beyond chance."""

    def __init__(self, topk: int) -> None:
        self._topk, self._passes, self._layer = topk, 0, 0
        self._begun = self._read_at = 0
        self._rows: list[tuple[int, float]] = []
        """First query of each sample of this pass, each elsewhere, and the mean of their keys."""
        self._waiting: list[tuple[Any, Any, float]] = []
        """How many keys they share, on its way to the host; the event after it; their keys."""
        self._shares: deque[float] = deque(maxlen=2 * _LAYERS)
        self.share = 0.0
        """The mean of the last samples; 0 while there are none."""

    def begin(self, prefix_lens: Sequence[int], extend_lens: Sequence[int]) -> None:
        """A prefill begins. Every other one with long sequences is looked at.

        When a sample is read follows from how many have begun, not from a rank's clock: all ranks
        look at the same rows, and choose alike.
        """
        self.end()
        self._begun += 1
        if self._waiting and self._begun < self._read_at:
            return
        for shared, event, keys in self._waiting:
            if event is not None:
                event.synchronize()
            chance = self._topk / keys
            beyond = int(shared) / ((_ROWS - 1) * self._topk) - chance
            self._shares.append(max(beyond, 0.0) / (1.0 - chance))
            self.share = sum(self._shares) / len(self._shares)
        self._waiting.clear()
        first, widest = 0, _FEWEST - _ROWS
        for prefix, new in zip(prefix_lens, extend_lens, strict=True):
            # Of few keys most are shared by chance.
            early = max(2 * self._topk - prefix, 0)
            if (room := new - early - _ROWS) > widest:
                widest = room
                turns = range(self._passes * _LAYERS, (self._passes + 1) * _LAYERS)
                at = [early + int(room * (turn * _GOLDEN % 1.0)) for turn in turns]
                self._rows = [(first + row, prefix + row + _ROWS / 2) for row in at]
            first += new
        self._passes += bool(self._rows)
        if len(self._shares) > _LAYERS and self._passes % 2:
            self._rows = []
        self._read_at = self._begun + _LATER

    @property
    def looks(self) -> bool:
        """Whether layers of this pass are looked at."""
        return bool(self._rows)

    def end(self) -> None:
        """What runs from now on is another pass."""
        self._rows, self._layer = [], 0

    def look(self, indices: Any) -> None:
        """A layer attends by `indices`, [rows, topk] int32 with -1 for none."""
        if not self._rows or indices is None:
            return
        self._layer += 1
        if self._layer % _SPACING or len(self._waiting) == _LAYERS:
            return
        import torch

        first, keys = self._rows[len(self._waiting)]
        some = indices[first : first + _ROWS]
        captures = indices.is_cuda and torch.cuda.is_current_stream_capturing()
        if captures or some.shape != (_ROWS, self._topk):
            return
        both = torch.cat((some[:-1], some[1:]), dim=1).sort(dim=1).values
        shared = ((both[:, 1:] == both[:, :-1]) & (both[:, 1:] >= 0)).sum()
        event = None
        if indices.is_cuda:
            host = torch.empty((), dtype=shared.dtype, pin_memory=True)
            shared = host.copy_(shared, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((shared, event, keys))
