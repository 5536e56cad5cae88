"""What a run and its workers tell each other, pickled, over one connection each."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_tune._errors import NsaTuneError
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Key, Measurement

__all__ = ["Answer", "Hello", "Refusal", "Roof", "Start", "Work"]


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker: what it is going to measure. Answered by Hello or Refusal."""

    device: str
    """"auto", "cpu" or "cuda:N" among the devices that the worker sees."""
    model: str | None
    heads: int | None
    kv_dtype: str
    points: tuple[str, ...]
    """Names of decision points; none means all."""
    registry: str
    """"module:attribute" of the mapping that has the points."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker is ready on a device."""

    setting: Setting
    key: Key
    unit: str
    """Which of several equal devices: a GPU's UUID."""
    others: tuple[int, ...] = ()
    """Other processes that compute on it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The worker cannot go on, for a reason that a new one would meet as well."""

    error: NsaTuneError


@dataclass(frozen=True, slots=True)
class Work:
    """One batch to measure. Answered by Answer or Refusal, or by the worker's death."""

    point: str
    batch: Batch
    arms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Roof:
    """Measure what the device itself reaches. Answered by Answer, or by the worker's death."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a Work or a Roof. Arms without a row are to be measured again."""

    rows: tuple[Measurement, ...]
    lost: bool = False
    """The device can no longer be used in this process; the one row says which arm did it."""
