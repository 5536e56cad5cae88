"""One tuning run: sweep the points on the devices, store every batch as soon as it is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.bench.registry import (
    ALL,
    REGISTRY,
    check_device,
    check_points,
    every_gpu,
    points_in,
)
from nsa_tune.autotune.runner.fleet import Fleet, Post
from nsa_tune.autotune.runner.ledger import flush_all
from nsa_tune.autotune.runner.progress import Incident, NoProgress, Progress
from nsa_tune.autotune.runner.schedule import MakeSchedule
from nsa_tune.autotune.runner.station import Station
from nsa_tune.autotune.runner.sweep import Sweep
from nsa_tune.autotune.runner.units import UnitReport
from nsa_tune.autotune.search.choosing import schedule_for
from nsa_tune.autotune.worker.isolation import Deadlines, IsolatedStation
from nsa_tune.autotune.worker.messages import Hello, Start
from nsa_tune.autotune.worker.quarantine import Quarantined
from nsa_tune.backend.types.layouts import layout_of
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Table
from nsa_tune.db.store import Store

__all__ = ["NoProgress", "Progress", "RunRequest", "RunResult", "run"]


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What `nsa-tune run` was asked for."""

    database: Path
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:N", or "all": every GPU of this host."""
    model: str | None = None
    """None takes V3.2 on a GPU and the tiny profile on a CPU."""
    heads: int | None = None
    """Local heads; None takes all of the model's."""
    kv_dtype: str = "fp8"
    points: tuple[str, ...] = ()
    """Names of decision points; none means all."""
    budget_s: float | None = None
    fresh: bool = False
    """Measure again what is stored already; the older rows stay."""
    target_regret: float = 0.0
    """The regret to expect on the worst tenth of batches at which to stop; 0 takes every batch."""
    trace: Path | None = None
    """Requests, or an engine's decisions, whose batches are to be measured as well."""
    ceilings: bool = True
    """With every point, also measure what a GPU itself reaches, once for each key."""
    isolate: bool = True
    """Measure in worker processes; without, a crash of an arm is one of the run."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """When a worker is taken for hanging."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run did."""

    tables: tuple[Table, ...]
    """Everything known under the run's keys, older runs included; one key a model of GPU."""
    measured: int
    """Rows stored by this run."""
    skipped: int
    """Rows that were there already."""
    failed: int
    """Rows of this run whose arm failed or was wrong."""
    quarantined: tuple[Quarantined, ...]
    """Arms that are not tried any more."""
    replaced: int
    """Workers that an arm killed, or that were killed because of one."""
    units: tuple[UnitReport, ...]
    """What each device did."""
    outcome: str
    """"done", "budget" or "interrupted"."""
    seconds: float
    expected_regret: Mapping[str, float] = field(default_factory=dict)
    """By question, what an adaptive run expects to be left on the worst tenth of batches; the
    largest of its keys'."""

    @property
    def table(self) -> Table:
        """The table, where the devices have one key."""
        return self.tables[0]


def run(
    request: RunRequest,
    progress: Progress | None = None,
    make_schedule: MakeSchedule | None = None,
    *,
    registry: str = REGISTRY,
    devices: Sequence[str] | None = None,
) -> RunResult:
    """Measure what is missing, batch by batch, until done, out of budget or interrupted.

    Args:
        make_schedule: what is measured, in place of what the request's target and trace say.
        registry: "module:attribute" of the decision points.
        devices: names of the devices to share the batches, instead of the request's.

    Raises:
        UsageError: for names, heads or devices that do not exist.
        MachineUnfit: when this machine cannot measure them.
        StoreError: when the database cannot be used; it names the file with what is not in it.
    """
    progress = progress or NoProgress()
    _check(request, registry)
    make_schedule = make_schedule or schedule_for(request.target_regret, request.trace)
    start = Start(
        request.device, request.model, request.heads, request.kv_dtype, request.points, registry
    )
    names = devices or (every_gpu() if request.device == ALL else [request.device])
    with ExitStack() as opened:
        ready = _stations(request, start, names, opened, progress)
        store = opened.enter_context(Store.open(request.database))
        posts, sweeps = [], []
        for key in dict.fromkeys(hello.key for _, hello in ready):
            ours = [(station, hello) for station, hello in ready if hello.key == key]
            hellos = [hello for _, hello in ours]
            points = points_in(registry, request.points, hellos[0].setting.profile)
            sweep = Sweep(hellos, points, store, _arguments(request), make_schedule)
            sweeps.append(sweep)
            posts += [Post(station, sweep, hello.unit) for station, hello in ours]
            progress.start(sweep.setting, key, sweep.left(), sweep.skipped)
        _warn_of_others(ready, progress)
        fleet = Fleet(posts, progress)
        outcome = _measure(fleet, sweeps, request.budget_s)
        return _result(fleet, sweeps, store, outcome, progress)


def _check(request: RunRequest, registry: str) -> None:
    """Refuse what is wrong on any device, before a worker is started."""
    check_device(request.device)
    if request.model is None:
        check_points(registry, request.points)
        layout_of(request.kv_dtype)
        return
    profile = profile_of(request.model)
    points_in(registry, request.points, profile)
    profile.layout(request.kv_dtype)
    if request.heads is not None:
        profile.check_heads(request.heads)


def _stations(
    request: RunRequest, start: Start, names: Sequence[str], opened: ExitStack, progress: Progress
) -> list[tuple[Station, Hello]]:
    """The devices, ready to measure. Of several, those that cannot are left out.

    Raises:
        NsaTuneError: when none can.
    """
    stations: list[Station] = []
    for name in names:
        station = _station(request, replace(start, device=name))
        opened.callback(station.close)
        stations.append(station)
    ready: list[tuple[Station, Hello]] = []
    for name, station in zip(names, stations, strict=True):
        try:
            hello = station.hello()
        except MachineUnfit as error:
            if len(names) == 1 or (name == names[-1] and not ready):
                raise
            progress.incident(Incident("unit_dropped", f"{name} is left out: {error}",
                                       {"unit": name, "reason": str(error)}))  # fmt: skip
            continue
        if any(other.unit == hello.unit for _, other in ready):
            hello = replace(hello, unit=f"{hello.unit}/{len(ready)}")
        ready.append((station, hello))
    return ready


def _station(request: RunRequest, start: Start) -> Station:
    if request.isolate:
        return IsolatedStation(start, request.deadlines)
    # Loads torch, which a run with workers does without.
    from nsa_tune.autotune.runner.inline import InlineStation

    return InlineStation(start)


def _warn_of_others(ready: Sequence[tuple[Station, Hello]], progress: Progress) -> None:
    for _, hello in ready:
        if hello.others:
            processes = ", ".join(map(str, hello.others))
            text = f"others compute on {hello.unit}: process {processes}; times may be theirs too"
            progress.incident(
                Incident("others_compute", text, {"unit": hello.unit, "processes": hello.others})
            )


def _measure(fleet: Fleet, sweeps: Sequence[Sweep], budget_s: float | None) -> str:
    """Let the fleet measure; however that ends, what is measured is stored."""
    outcome = "interrupted"
    try:
        outcome = fleet.measure(budget_s)
    except KeyboardInterrupt:
        # The caller reports what there is and leaves with 130.
        pass
    finally:
        flush_all(sweep.ledger for sweep in sweeps)
    for sweep in sweeps:
        sweep.ledger.end(outcome)
    return outcome


def _result(
    fleet: Fleet, sweeps: Sequence[Sweep], store: Store, outcome: str, progress: Progress
) -> RunResult:
    units = tuple(unit for sweep in sweeps for unit in sweep.units())
    for unit in units:
        if unit.out_of_line and unit.ratio is not None:
            text = f"{unit.unit} takes {unit.ratio:.3f} times as long as the other {unit.device}"
            progress.incident(Incident("unit_out_of_line", text, asdict(unit)))
    return RunResult(
        tables=tuple(store.table(sweep.key) for sweep in sweeps),
        measured=sum(sweep.measured for sweep in sweeps),
        skipped=sum(sweep.skipped for sweep in sweeps),
        failed=sum(sweep.failed for sweep in sweeps),
        quarantined=tuple(arm for sweep in sweeps for arm in sweep.quarantine.arms),
        replaced=fleet.replaced,
        units=units,
        outcome=outcome,
        seconds=fleet.seconds,
        expected_regret=_worst(sweep.schedule.expected() for sweep in sweeps),
    )


def _worst(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for expected in found:
        for name, regret in expected.items():
            worst[name] = max(regret, worst.get(name, 0.0))
    return worst


def _arguments(request: RunRequest) -> dict[str, object]:
    """What the database keeps of the request."""
    return {
        "device": request.device,
        "model": request.model,
        "heads": request.heads,
        "kv_dtype": request.kv_dtype,
        "points": list(request.points),
        "budget_s": request.budget_s,
        "fresh": request.fresh,
        "ceilings": request.ceilings and not request.points,
        "target_regret": request.target_regret,
        "trace": None if request.trace is None else str(request.trace),
    }
