"""Advice as records, and as lines for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from nsa_tune.backend.dispatch.decide import MARGIN, Verdict

__all__ = ["Advice", "Advised", "Setting", "Unadvised"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One of the engine's own settings."""

    name: str
    """The environment variable, or the launch argument with its dashes."""
    value: str
    default: str

    @property
    def is_variable(self) -> bool:
        """Whether it is an environment variable."""
        return not self.name.startswith("--")


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings other than the defaults. Ratios are geometric means, of all of them together."""

    settings: tuple[Setting, ...]
    verdict: Verdict
    """WIN, or UNSURE where the intervals leave room for the defaults, where all batches together
    do not become faster, or where one becomes much slower."""
    gain: float
    """Time with the default over time with this value."""
    low: float
    """Least gain, were all measurements off to the same side; 95 %. It says nothing of how near
    the batches and their weights are to those that an engine will run."""
    high: float
    total: float
    """Time of all batches together with the defaults over that with these values."""
    batches: int
    """Batches that the setting has a say in, and over which the ratios are taken."""
    changed: int
    """Those of them that it changes."""
    worst: float
    """The most that one batch becomes slower: its time with this value over the default's."""
    worst_batch: str
    lost: float
    """Time with this value over the best that the table knows, batch by batch."""
    lost_at_worst: float
    note: str = ""
    reservation: str = ""
    """Why it is to be looked at first, however sure; empty when it need not be."""


@dataclass(frozen=True, slots=True)
class Unadvised:
    """One setting that stays at its default."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Advised:
    """All advice for one table and one release of SGLang."""

    engine: str
    version: str
    gpu: str
    model: str
    heads: int
    kv_layout: str
    source: str
    weights: str
    """What the batches are and how they count."""
    advice: tuple[Advice, ...]
    unadvised: tuple[Unadvised, ...]

    def shell(self) -> Iterator[str]:
        """Lines for a shell: exports, and the arguments in NSA_TUNE_SGLANG_ARGS."""
        where = f"{self.model}, {self.heads} local heads, {self.kv_layout} KV, on {self.gpu}"
        yield _comment(f"{self.engine} {self.version}: {where}")
        yield _comment(f"from {self.source}; {self.weights}")
        arguments: list[str] = []
        for one in self.advice:
            yield _comment(_in_words(one))
            unsure = one.verdict is not Verdict.WIN
            reservation = "not sure enough" if unsure else one.reservation
            for setting in one.settings:
                if reservation:
                    yield _comment(f"{reservation}: {setting.name}={setting.value}")
                elif setting.is_variable:
                    yield f"export {setting.name}={shlex.quote(setting.value)}"
                else:
                    arguments += [setting.name, setting.value]
        if arguments:
            yield f"NSA_TUNE_SGLANG_ARGS={shlex.quote(shlex.join(arguments))}"
        for other in self.unadvised:
            yield _comment(f"{other.name}: {other.why}")


def _comment(text: str) -> str:
    return "# " + " ".join(text.split())


def _in_words(one: Advice) -> str:
    changes = " with ".join(
        f"{setting.name} {setting.value} instead of {setting.default}" for setting in one.settings
    )
    text = (
        f"{changes}: {one.gain:.2f}x ({one.low:.2f} to {one.high:.2f}) over {one.batches} "
        f"batches, {one.changed} of them changed; all together {one.total:.2f}x"
    )
    if one.worst > 1 + MARGIN:
        text += f"; loses up to {one.worst:.2f}x, on {one.worst_batch}"
    if one.lost > 1 + MARGIN:
        text += (
            f"; the table would be {one.lost:.2f}x faster still, {one.lost_at_worst:.2f}x at most"
        )
    return f"{text}. {one.note}" if one.note else text
