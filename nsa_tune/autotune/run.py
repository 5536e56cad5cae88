"""One tuning run: sweep the points' grids, store every batch as soon as it is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from nsa_tune.autotune import devices
from nsa_tune.autotune.measure import ContextLost, measure_batch
from nsa_tune.autotune.timing import Timer, timer_for
from nsa_tune.backend import detect
from nsa_tune.backend.batch import Batch
from nsa_tune.backend.point import Arm, Point, Setting
from nsa_tune.backend.points import POINTS, points_for
from nsa_tune.backend.profiles import profile_of
from nsa_tune.backend.records import Key, Measurement, Status, Table
from nsa_tune.db.store import Store

if TYPE_CHECKING:
    import torch

__all__ = ["NoProgress", "Progress", "RunRequest", "RunResult", "default_model", "run"]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What `nsa-tune run` was asked for."""

    database: Path
    device: str = "auto"
    model: str | None = None
    """None takes `default_model`."""
    heads: int | None = None
    """Local heads; None takes all of the model's."""
    kv_dtype: str = "fp8"
    points: tuple[str, ...] = ()
    """Names of decision points; none means all."""
    budget_s: float | None = None
    fresh: bool = False
    """Measure again what is stored already; the older rows stay."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run did."""

    table: Table
    """Everything known under the run's key, older runs included."""
    measured: int
    """Rows stored by this run."""
    skipped: int
    """Rows that were there already."""
    failed: int
    """Rows of this run whose arm failed or was wrong."""
    outcome: str
    """"done", "budget" or "interrupted"."""
    seconds: float


class Progress(Protocol):
    """Who is told how the run goes."""

    def start(self, setting: Setting, key: Key, batches: int, skipped: int) -> None:
        """`batches` are to be measured; `skipped` rows were there already."""
        ...

    def batch(
        self, done: int, total: int, point: Point, batch: Batch, rows: Sequence[Measurement],
        seconds: float,
    ) -> None:  # fmt: skip
        """Batch number `done` is stored; `seconds` since the start."""
        ...


class NoProgress:
    """Tells nobody."""

    def start(self, setting: Setting, key: Key, batches: int, skipped: int) -> None:
        """Nothing."""

    def batch(
        self, done: int, total: int, point: Point, batch: Batch, rows: Sequence[Measurement],
        seconds: float,
    ) -> None:  # fmt: skip
        """Nothing."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """One batch to measure, with the arms that are still missing."""

    point: Point
    batch: Batch
    arms: tuple[Arm, ...]


def default_model(device: torch.device) -> str:
    """What is measured when nobody says: V3.2 on a GPU, the tiny profile on a CPU."""
    return "deepseek-v3.2" if device.type == "cuda" else "tiny"


def _setting(request: RunRequest, device: torch.device) -> Setting:
    profile = profile_of(request.model or default_model(device))
    heads = profile.heads if request.heads is None else profile.check_heads(request.heads)
    return Setting(
        profile=profile,
        heads=heads,
        layout=profile.layout(request.kv_dtype),
        device=devices.describe(device),
        libraries=dict(detect.library_versions()),
    )


def _cells(
    points: Sequence[Point], setting: Setting, stored: set[tuple[str, str, str]]
) -> Iterator[_Cell]:
    """What is missing of the points' grids. A batch that leaves no choice needs no measuring."""
    for point in points:
        arms = list(point.candidates(setting))
        for batch in point.grid(setting):
            allowed = [arm for arm in arms if arm.allowed(batch, setting) is None]
            word = str(batch)
            missing = tuple(a for a in allowed if (point.name, word, a.name) not in stored)
            if len(allowed) > 1 and missing:
                yield _Cell(point, batch, missing)


def run(request: RunRequest, progress: Progress | None = None) -> RunResult:
    """Measure what is missing, batch by batch, until done, out of budget or interrupted.

    Raises:
        UsageError: for names, heads or devices that do not exist.
        MachineUnfit: when this machine cannot measure them.
        StoreError: when the database cannot be used.
    """
    progress = progress or NoProgress()
    device = devices.pick_device(request.device)
    setting = _setting(request, device)
    points = points_for(setting.profile, request.points, POINTS)
    devices.check_libraries([arm for point in points for arm in point.candidates(setting)])
    timer = timer_for(device)
    key = devices.key_of(setting, timer)
    with Store.open(request.database) as store:
        setting = replace(setting, limits=store.limits(key))
        stored = set() if request.fresh else store.measured(key)
        cells = list(_cells(points, setting, stored))
        progress.start(setting, key, len(cells), len(stored))
        number = store.begin_run(key, setting.device, _arguments(request))
        started = perf_counter()
        rows: list[Measurement] = []
        outcome = "interrupted"
        try:
            outcome = _sweep(request, cells, setting, device, timer, store, number, progress, rows)
        except KeyboardInterrupt:
            # What was measured is stored; the caller reports it and leaves with 130.
            pass
        finally:
            store.end_run(number, outcome)
        return RunResult(
            table=store.table(key),
            measured=len(rows),
            skipped=len(stored),
            failed=sum(row.status is not Status.OK for row in rows),
            outcome=outcome,
            seconds=perf_counter() - started,
        )


def _sweep(
    request: RunRequest, cells: list[_Cell], setting: Setting, device: torch.device, timer: Timer,
    store: Store, number: int, progress: Progress, rows: list[Measurement],
) -> str:  # fmt: skip
    """Measure and store `cells` in their order; returns how it ended."""
    started = perf_counter()
    for done, cell in enumerate(cells, start=1):
        try:
            new = measure_batch(cell.point, cell.batch, cell.arms, setting, device, timer)
        except ContextLost as lost:
            store.add(number, lost.measured)
            rows.extend(lost.measured)
            raise
        store.add(number, new)
        rows.extend(new)
        seconds = perf_counter() - started
        progress.batch(done, len(cells), cell.point, cell.batch, new, seconds)
        if request.budget_s is not None and seconds >= request.budget_s and done < len(cells):
            return "budget"
    return "done"


def _arguments(request: RunRequest) -> dict[str, object]:
    return {
        "device": request.device,
        "model": request.model,
        "heads": request.heads,
        "kv_dtype": request.kv_dtype,
        "points": list(request.points),
        "budget_s": request.budget_s,
        "fresh": request.fresh,
    }
