"""What one way to run a pass was measured to take."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.sglang.pass_mode.mode import ALWAYS_SELECTS, PassMode


@dataclass(frozen=True, slots=True)
class PassTime:
    """A measured pass."""

    mode: PassMode
    q_tokens: int
    """New tokens; for a graph the size that was captured."""
    context: int
    """Mean number of keys that a new token attends to."""
    pass_us: float
    """From the pass's first call on the host until the GPU has finished it."""
    selects: bool = False
    """Whether a sequence is so long that the indexer scores and selects keys. Ways that
    always do that, or never, have False here."""
    host_us: float | None = None
    """Until the host had launched it; None where that was not measured."""
    padding: int = 0
    """How many of `q_tokens` are no new tokens, but fill the graph."""

    @property
    def waits(self) -> bool:
        """Whether the GPU waited for the host, so that launching was all that the pass took."""
        return self.host_us is not None and self.pass_us < WAITS * self.host_us

    def batch(self, index_topk: int) -> Batch:
        """The batch that ran: the fewest equal sequences with this context, none of more than
        `index_topk` keys unless the pass selected."""
        new = self.q_tokens - self.padding
        selects = self.selects or self.mode in ALWAYS_SELECTS
        for count in range(1, new + 1):
            tokens = ceil(new / count)
            prefix = floor(self.context - (tokens + 1) / 2)
            if prefix >= 0 and (selects or prefix + tokens <= index_topk):
                return Batch.extend([prefix] * count, [tokens] * count)
        return Batch.extend([0], [new])


WAITS = 1.1
"""A pass that takes up to so many times what launching it takes is one that waits for the host."""
