"""What an engine's rule is: for each question the choice that the engine takes by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa_tune.backend.types.batch import Batch
    from nsa_tune.backend.types.point import Answer, Setting

__all__ = ["Default", "Rule", "capability", "kernel_here"]


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


_TORCH = {"fa3": "torch", "flashmla_sparse": "torch_sparse", "flashmla_kv": "torch_kv"}


def capability(setting: Setting) -> int:
    """Compute capability times ten; a CPU counts as Hopper, anything else as 0."""
    arch = setting.device.arch
    if arch == "cpu":
        return 90
    digits = arch.removeprefix("sm")
    return int(digits) if digits.isdecimal() else 0


def kernel_here(kernel: str, setting: Setting) -> str:
    """`kernel`, or on a CPU the torch arm in its place: no engine's rule covers a CPU, and a table
    that was measured on one has so a default to compare with."""
    return _TORCH[kernel] if setting.device.arch == "cpu" else kernel
