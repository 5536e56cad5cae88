"""Messages between a run and its worker processes, pickled over one pipe each."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_tune._errors import NsaTuneError
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Key, Measurement


@dataclass(frozen=True, slots=True)
class Setup:
    """To the worker, first: what it will measure. It replies with Ready or CannotContinue."""

    device: str
    """"auto", "cpu", "cuda" or "cuda:N"."""
    model: str | None
    """None takes V3.2 on a GPU and the tiny profile on a CPU."""
    heads: int | None
    """Local heads; None takes all of the model's."""
    kv_dtype: str
    points: tuple[str, ...]
    """Names of decision points; none means all."""
    registry: str
    """"module:attribute" of the mapping that has the points."""
    lossy: frozenset[str] = frozenset()
    """Lossy arms that are measured too."""
    overlap: float | None = None
    """What neighbouring selections share, from 0 to 1; None draws them one by one."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From the worker: its device is ready, and this is what it measures."""

    setting: Setting
    key: Key
    unit: str
    """Which of several equal devices it is: a GPU's UUID, or "cpu"."""
    others: tuple[int, ...] = ()
    """Ids of other processes that compute on the device."""
    node: str = ""
    """Name of the cluster's node that has the device; empty on this host."""


@dataclass(frozen=True, slots=True)
class CannotContinue:
    """From the worker: an error that a new worker would meet as well."""

    error: NsaTuneError


@dataclass(frozen=True, slots=True)
class MeasureBatch:
    """To the worker: measure one batch. It replies with Results or CannotContinue, or dies."""

    point: str
    batch: Batch
    arms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasureCeilings:
    """To the worker: measure the roofline ceilings. It replies with Results, or dies."""


@dataclass(frozen=True, slots=True)
class Results:
    """From the worker: the rows of a MeasureBatch or MeasureCeilings.

    An arm without a row was not measured, though it did not fail: it is to be measured again.
    """

    rows: tuple[Measurement, ...]
    context_lost: bool = False
    """This process can no longer use the device. The rows then are of the arm that broke it."""
