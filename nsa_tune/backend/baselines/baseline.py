"""What an engine's baseline is: for each question the choice that the engine takes by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Question, Setting

Choose: TypeAlias = Callable[[Batch], str]
"""The choice for a batch."""


@dataclass(frozen=True, slots=True)
class Default:
    """The engine's choice for one question."""

    choice: Callable[[Setting], str | Choose]
    """What it takes in a setting: always the same, or by the batch."""
    source: str
    """File and line of the engine."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """One release of an engine."""

    name: str
    defaults: Mapping[str, Default]
    """By the name of the question."""

    def chooser(self, question: Question, setting: Setting) -> Choose:
        """What the engine takes, or the first declared choice of a question it does not ask."""
        default = self.defaults.get(question.name)
        choice = next(iter(question.choices)) if default is None else default.choice(setting)
        return (lambda batch: choice) if isinstance(choice, str) else choice

    def choose(self, question: Question, batch: Batch, setting: Setting) -> str:
        """`chooser` for one batch."""
        return self.chooser(question, setting)(batch)

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
    """`kernel`, or on a CPU the torch arm in its place: no engine's baseline covers a CPU, and so a
    table that was measured on one has a default to compare with."""
    return _TORCH[kernel] if setting.device.arch == "cpu" else kernel


def unless_cpu(kernel: str, on_cpu: str = "torch") -> Callable[[Setting], str]:
    """The choice of `kernel` in every setting, with the torch arm `on_cpu` as in `kernel_here`."""
    return lambda setting: on_cpu if setting.device.arch == "cpu" else kernel
