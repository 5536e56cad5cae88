"""A call of the method by which SGLang runs a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Forward:
    """A call of `ModelRunner._forward_raw`."""

    original: Callable[..., Any]
    """SGLang's own method."""
    runner: Any
    batch: Any
    """SGLang's ForwardBatch."""
    rest: Sequence[Any] = ()
    """The method's further arguments."""

    def run(self) -> Any:
        """The pass as SGLang has it."""
        return self.original(self.runner, self.batch, *self.rest)

    def of(self, batch: Any) -> Forward:
        """The same call with another batch."""
        return Forward(self.original, self.runner, batch, self.rest)
