"""`nsa-tune run`: measure decision points on the devices, and store each batch as it is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path

from nsa_tune.autotune.bench.device_names import ALL, check_device, every_gpu
from nsa_tune.autotune.bench.registry import REGISTRY, check_points, points_in
from nsa_tune.autotune.runner.arrivals import Arrivals
from nsa_tune.autotune.runner.device_agreement import DeviceReport, Spread
from nsa_tune.autotune.runner.device_pool import DevicePool
from nsa_tune.autotune.runner.progress import Incident, Progress
from nsa_tune.autotune.runner.quarantine import Quarantined
from nsa_tune.autotune.runner.row_writer import flush_all
from nsa_tune.autotune.runner.sweeps import Sweeps
from nsa_tune.autotune.search.left_out import LeftOut, left_out
from nsa_tune.autotune.search.schedule import MakeSchedule
from nsa_tune.autotune.search.strategy import schedule_for
from nsa_tune.autotune.worker.executor import Launcher
from nsa_tune.autotune.worker.isolated import Deadlines
from nsa_tune.autotune.worker.local import LocalLauncher
from nsa_tune.autotune.worker.messages import Setup
from nsa_tune.backend.points import LOSSY, lossy_named
from nsa_tune.backend.types.layouts import layout_of
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Table


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The options of `nsa-tune run`."""

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
    """Seconds after which no new batch is started."""
    fresh: bool = False
    """Measure again what is stored already. The older rows stay in the database."""
    target_regret: float = 0.0
    """Stop when this regret is expected on the worst tenth of batches; 0 measures every batch."""
    trace: Path | None = None
    """Requests, or an engine's decision log, whose batches are measured too."""
    ceilings: bool = True
    """Also measure a GPU's roofline ceilings, once for each key, if no `points` are named."""
    lossy: tuple[str, ...] = ()
    """Lossy arms that are measured too, which round more than others do."""
    overlap: float | None = None
    """What neighbouring selections of `prefill` share, from 0 to 1; None draws them one by one."""
    executor: str = "local"
    """"local", or "ray" when a launcher for a Ray cluster is given to `run`."""
    sample: int | None = None
    """Devices of each type that measure, which then compare themselves on more batches; None takes
    all devices."""
    isolate: bool = True
    """Measure in worker processes. Otherwise an arm that crashes ends the run."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """When a worker counts as hung."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run did."""

    tables: tuple[Table, ...]
    """Everything stored under the run's keys, by earlier runs too. One key for each GPU model."""
    measured: int
    """Rows stored by this run."""
    skipped: int
    """Rows that were stored before."""
    failed: int
    """Rows of this run whose arm failed or was wrong."""
    quarantined: tuple[Quarantined, ...]
    """Arms that are no longer tried."""
    replaced: int
    """Worker processes that died, or were killed because they hung."""
    units: tuple[DeviceReport, ...]
    """What each device did."""
    outcome: str
    """"done", "budget" or "interrupted"."""
    seconds: float
    spreads: tuple[Spread, ...] = ()
    """How far equal devices are apart, for each key of which several measured."""
    lost: int = 0
    """Times that a device of a cluster was lost while it measured."""
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)
    """By question: the regret of what is stored on batches that were left out of the fit, the
    largest over the run's keys."""

    @property
    def table(self) -> Table:
        """The table of the first key; the only one unless the GPUs are of several models."""
        return self.tables[0]


def run(
    request: RunRequest,
    progress: Progress | None = None,
    make_schedule: MakeSchedule | None = None,
    *,
    registry: str = REGISTRY,
    devices: Sequence[str] | None = None,
    launcher: Launcher | None = None,
) -> RunResult:
    """Measure what is not stored yet, batch by batch, until done, out of budget or interrupted.

    Args:
        make_schedule: makes each sweep's schedule, instead of the request's target and trace.
        registry: "module:attribute" of the mapping that has the decision points.
        devices: names of devices that share the batches, instead of the request's device.
        launcher: starts the executors, instead of those of this host's devices. It is closed.

    Raises:
        UsageError: for names, heads or devices that do not exist.
        MachineUnfit: when this machine cannot measure them.
        StoreError: when the database cannot be used; it names the file that has the rows instead.
    """
    progress = progress or Progress()
    _check(request, registry)
    make_schedule = make_schedule or schedule_for(request.target_regret, request.trace)
    setup = Setup(
        request.device, request.model, request.heads, request.kv_dtype, request.points, registry,
        lossy_named(request.lossy),
        request.overlap,
    )  # fmt: skip
    if launcher is None:
        names = devices or (every_gpu() if request.device == ALL else [request.device])
        launcher = LocalLauncher(tuple(names), request.isolate, request.deadlines)
    arguments = _arguments(request)
    with ExitStack() as opened:
        opened.callback(launcher.close)
        executors = launcher.launch(setup)
        for executor in executors:
            opened.callback(executor.close)
        sweeps = opened.enter_context(
            Sweeps(request.database, setup, arguments, make_schedule, progress)
        )
        arrivals = Arrivals(executors, sweeps.admit, progress)
        first = arrivals.gather(everyone=launcher.waits_for_all)
        for name in request.lossy:
            text = f"{name} {LOSSY[name]}"
            progress.incident(Incident("lossy_arm", text))
        pool = DevicePool(first, progress, arrivals)
        outcome = _measure(pool, sweeps, request.budget_s)
        return _result(pool, sweeps, outcome, progress)


def _check(request: RunRequest, registry: str) -> None:
    """Raise what does not depend on the device, before a worker is started."""
    check_device(request.device)
    lossy_named(request.lossy)
    if request.model is None:
        check_points(registry, request.points)
        layout_of(request.kv_dtype)
        return
    profile = profile_of(request.model)
    points_in(registry, request.points, profile)
    profile.layout(request.kv_dtype)
    if request.heads is not None:
        profile.check_heads(request.heads)


def _measure(pool: DevicePool, sweeps: Sweeps, budget_s: float | None) -> str:
    """Measure; returns the outcome. However it ends, the rows that were measured are stored."""
    outcome = "interrupted"
    try:
        outcome = pool.measure(budget_s)
    except KeyboardInterrupt:
        # The command prints what was measured and exits with 130.
        pass
    finally:
        flush_all(sweep.writer for sweep in sweeps)
    for sweep in sweeps:
        sweep.end(outcome)
    return outcome


def _result(pool: DevicePool, sweeps: Sweeps, outcome: str, progress: Progress) -> RunResult:
    store = sweeps.store
    units = tuple(unit for sweep in sweeps for unit in sweep.device_reports())
    for unit in units:
        if unit.out_of_line and unit.ratio is not None:
            where = f" on {unit.node}" if unit.node else ""
            slower = f"{unit.ratio:.3f} times as long as the other {unit.device}"
            text = f"{unit.unit}{where} takes {slower}"
            progress.incident(Incident("unit_out_of_line", text))
    tables = tuple(store.table(sweep.key) for sweep in sweeps)
    return RunResult(
        tables=tables,
        measured=sum(sweep.measured for sweep in sweeps),
        skipped=sum(sweep.skipped for sweep in sweeps),
        failed=sum(sweep.failed for sweep in sweeps),
        quarantined=tuple(arm for sweep in sweeps for arm in sweep.quarantine.arms),
        replaced=pool.replaced,
        units=units,
        outcome=outcome,
        seconds=pool.seconds,
        spreads=tuple(spread for sweep in sweeps if (spread := sweep.spread()) is not None),
        lost=pool.lost,
        left_out=_least_sure(
            left_out(sweep.points, sweep.setting, table.measurements)
            for sweep, table in zip(sweeps, tables, strict=True)
        ),
    )


def _least_sure(by_sweep: Iterable[Mapping[str, LeftOut]]) -> dict[str, LeftOut]:
    worst: dict[str, LeftOut] = {}
    for estimates in by_sweep:
        for name, estimate in estimates.items():
            if name not in worst or estimate.most > worst[name].most:
                worst[name] = estimate
    return worst


def _arguments(request: RunRequest) -> dict[str, object]:
    """The part of the request that the database stores with the run."""
    names = {field.name for field in fields(request)} - {"database", "isolate", "deadlines"}
    return {
        **{name: getattr(request, name) for name in sorted(names)},
        "ceilings": request.ceilings and not request.points,
        "trace": None if request.trace is None else str(request.trace),
    }
