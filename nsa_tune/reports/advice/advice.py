"""Advice on engine options, as records and as lines for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nsa_tune._errors import UsageError
from nsa_tune.backend.costmodel.regret import MARGIN
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.counted import counted


@dataclass(frozen=True, slots=True)
class EngineOption:
    """An option of the engine, with the advised value and the default."""

    name: str
    """An environment variable, or a launch argument with its dashes."""
    value: str
    default: str

    @property
    def is_variable(self) -> bool:
        """Whether it is an environment variable."""
        return not self.name.startswith("--")


@dataclass(frozen=True, slots=True)
class Advice:
    """Options to change together. Ratios are geometric means over the batches that they affect."""

    settings: tuple[EngineOption, ...]
    verdict: Verdict
    """WIN, or UNSURE if the defaults may be faster within the intervals, if the total time does not
    fall, or if a batch becomes much slower."""
    gain: float
    """Time with the defaults over time with these values."""
    low: float
    """Lower end of the gain's 95 % interval, if all measurements err to the same side. It does not
    cover that an engine may run other batches."""
    high: float
    total: float
    """Total time of all batches with the defaults over that with these values."""
    batches: int
    """Number of batches that the options can affect; the ratios are over these."""
    changed: int
    """Number of them whose time changes."""
    worst: float
    """Slowdown of the batch that slows down most: its time over that with the defaults."""
    worst_batch: str
    lost: float
    """Time with these values over the time if each batch ran its fastest choice."""
    lost_at_worst: float
    note: str = ""
    reservation: str = ""
    """Why to check the advice before use, however sure it is; empty if there is no reason."""


@dataclass(frozen=True, slots=True)
class Unadvised:
    """An option that stays at its default."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class AdviceReport:
    """All advice for one table and one release of the engine."""

    engine: str
    version: str
    gpu: str
    model: str
    heads: int
    kv_layout: str
    source: str
    weights: str
    """Which batches count, and how much."""
    advice: tuple[Advice, ...]
    unadvised: tuple[Unadvised, ...]

    @classmethod
    def of(
        cls,
        dispatcher: Dispatcher,
        engine: str,
        version: str,
        found: Sequence[Advice | Unadvised],
        *,
        weighted: bool,
    ) -> AdviceReport:
        """What was found by the table of `dispatcher`; `weighted` by batches that were given."""
        setting = dispatcher.setting
        return cls(
            engine,
            version,
            setting.device.name,
            setting.profile.name,
            setting.heads,
            str(setting.layout),
            dispatcher.source,
            "weighted by the batches given" if weighted else "each measured batch counts the same",
            tuple(one for one in found if isinstance(one, Advice)),
            tuple(one for one in found if isinstance(one, Unadvised)),
        )

    def shell(self) -> Iterator[str]:
        """Lines for a shell: exports, and the launch arguments as NSA_TUNE_SGLANG_ARGS or
        NSA_TUNE_VLLM_ARGS."""
        where = f"{self.model}, {self.heads} local heads, {self.kv_layout} KV, on {self.gpu}"
        yield _comment(f"{self.engine} {self.version}: {where}")
        yield _comment(f"from {self.source}; {self.weights}")
        arguments: list[str] = []
        for one in self.advice:
            yield _comment(_sentence(one))
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
            yield f"NSA_TUNE_{self.engine.upper()}_ARGS={shlex.quote(shlex.join(arguments))}"
        for other in self.unadvised:
            yield _comment(f"{other.name}: {other.why}")


def prefills_in(batches: Iterable[tuple[Batch, float]]) -> list[tuple[Batch, float]]:
    """The prefills among (batch, weight).

    Raises:
        UsageError: when there is none.
    """
    found = [one for one in batches if one[0].mode is Mode.EXTEND]
    if not found:
        raise UsageError("none of the given batches is a prefill")
    return found


def _comment(text: str) -> str:
    return "# " + " ".join(text.split())


def _sentence(one: Advice) -> str:
    changes = " with ".join(
        f"{setting.name} {setting.value} instead of {setting.default}" for setting in one.settings
    )
    batches = counted(one.batches, "batch", "batches")
    text = (
        f"{changes}: {one.gain:.2f}x faster ({one.low:.2f} to {one.high:.2f}) in the mean of "
        f"{batches}, of which {one.changed} change; in total time {one.total:.2f}x"
    )
    if one.worst > 1 + MARGIN:
        text += f"; up to {one.worst:.2f}x slower, on {one.worst_batch}"
    if one.lost > 1 + MARGIN:
        text += (
            f"; deciding for each batch would be {one.lost:.2f}x faster still, "
            f"{one.lost_at_worst:.2f}x at most"
        )
    return f"{text}. {one.note}" if one.note else text
