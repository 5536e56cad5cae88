"""What an engine's rule is: for each question the choice that the engine takes by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa_tune.backend.batch import Batch
    from nsa_tune.backend.point import Answer, Setting

__all__ = ["Default", "Rule"]


@dataclass(frozen=True, slots=True)
class Default:
    """The engine's choice for one question."""

    choose: Callable[[Batch, Setting], str]
    source: str
    """File and line of the engine."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One release of an engine."""

    name: str
    defaults: Mapping[str, Default]
    """By the name of the question."""

    def choose(self, answer: Answer, batch: Batch, setting: Setting) -> str:
        """The engine's choice, or the first declared one for a question it does not ask."""
        return self.chooser(answer)(batch, setting)

    def chooser(self, answer: Answer) -> Callable[[Batch, Setting], str]:
        """`choose` with the question looked up already."""
        default = self.defaults.get(answer.name)
        if default is not None:
            return default.choose
        first = next(iter(answer.choices))
        return lambda batch, setting: first

    def source(self, answer: str) -> str:
        """Where the engine decides the question called `answer`."""
        default = self.defaults.get(answer)
        return self.name if default is None else f"{self.name} {default.source}"
