"""The device pool: devices share the batches, also when one breaks, and are compared."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from nsa_tune import MachineUnfit
from nsa_tune.autotune.bench.ceilings import POINT as CEILINGS
from nsa_tune.autotune.bench.job import Job
from nsa_tune.autotune.runner import first_calls
from nsa_tune.autotune.runner.arrivals import Arrivals
from nsa_tune.autotune.runner.device_agreement import Spread
from nsa_tune.autotune.runner.device_pool import DevicePool
from nsa_tune.autotune.runner.pooled_device import PooledDevice
from nsa_tune.autotune.runner.progress import Incident, Progress, Stored
from nsa_tune.autotune.runner.run import RunRequest, run
from nsa_tune.autotune.runner.sweep import Sweep
from nsa_tune.autotune.search.exhaustive import Exhaustive
from nsa_tune.autotune.worker.executor import DeviceLost, Executor, FirstCall, JobUpdate
from nsa_tune.autotune.worker.messages import Ready
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Key, Measurement, Status
from nsa_tune.db.store import Store
from tests.autotune.fake_point import MANY
from tests.records import DEVICE, KEY

SETTING = Setting(profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, DEVICE)
POINT = MANY["runnable"]
BATCHES = 40
CEILING = Measurement(CEILINGS, "copy:1", "copy", Status.OK, 1.0, 1.0, 1.0, 8)


class Scripted:
    """A device whose jobs take some calls of `advance`, and which breaks after some jobs."""

    connection: Connection | None = None

    def __init__(self, unit: str, slowness: float = 1.0, calls: int = 1, lives: int = 10**6):
        self.unit, self.slowness, self.calls, self.lives = unit, slowness, calls, lives
        self.name = unit
        self.job: Job | None = None
        self.closed = False
        self.ceiling_calls = self.ceilings = 0
        self._left = 0

    def ready(self) -> Ready:
        return Ready(SETTING, KEY, self.unit)

    def arrival(self) -> Ready | None:
        return self.ready()

    def begin_ceilings(self) -> None:
        self.ceiling_calls = self.calls

    def begin(self, job: Job) -> None:
        self.job, self._left = job, self.calls

    def advance(self) -> JobUpdate | None:
        if self.lives == 0:
            raise MachineUnfit(f"{self.unit} fell off the bus")
        if self.ceiling_calls:
            self.ceiling_calls -= 1
            self.ceilings += not self.ceiling_calls
            return None if self.ceiling_calls else JobUpdate([CEILING], finished=True)
        assert self.job is not None
        self._left -= 1
        if self._left > 0:
            return None
        self.lives -= 1
        rows = [
            Measurement(
                self.job.point.name, str(self.job.batch), arm.name, Status.OK,
                time := self.slowness * self.job.batch.kv_tokens, time, time, 8,
            )
            for arm in self.job.arms
        ]  # fmt: skip
        self.job = None
        return JobUpdate(rows, finished=True)

    def first_call(self) -> FirstCall | None:
        return None

    def close(self) -> None:
        self.closed = True


class Listener(Progress):
    """Records the calls."""

    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self.counts: list[tuple[int, int]] = []

    def batch(self, stored: Stored) -> None:
        self.counts.append((stored.done, stored.total))

    def incident(self, incident: Incident) -> None:
        self.incidents.append(incident)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "t.db") as store:
        yield store


Make = Callable[..., tuple[DevicePool, Sweep, Listener]]


def sweep_of(executors: Sequence[Scripted], store: Store, **arguments: object) -> Sweep:
    first, *others = executors
    sweep = Sweep(first.ready(), [POINT], store, {"fresh": False, **arguments}, Exhaustive)
    for executor in others:
        sweep.join(executor.unit, "")
    return sweep


@pytest.fixture
def pool(store: Store) -> Make:
    def make(*executors: Scripted, ceilings: bool = False) -> tuple[DevicePool, Sweep, Listener]:
        sweep = sweep_of(executors, store, ceilings=ceilings)
        pooled = [PooledDevice(executor, sweep, executor.unit) for executor in executors]
        listener = Listener()
        return DevicePool(pooled, listener), sweep, listener

    return make


def stored(store: Store, key: Key = KEY) -> Counter[tuple[str, str]]:
    return Counter((row.batch, row.arm) for row in store.table(key).measurements)


def test_devices_share_the_batches_and_each_row_is_stored_once(pool: Make, store: Store) -> None:
    runner, sweep, listener = pool(Scripted("A"), Scripted("B"))

    assert runner.measure(None) == "done"

    assert len(stored(store)) == sweep.measured == 2 * BATCHES
    assert sum(unit.batches for unit in sweep.device_reports()) == BATCHES
    assert listener.counts == [(done, BATCHES) for done in range(1, BATCHES + 1)]


class Compiles(Scripted):
    """All of its calls are first calls, which began at one time."""

    since = 400.0

    def first_call(self) -> FirstCall | None:
        return None if self.job is None else FirstCall(self.job.arms[0].name, self.since, 1800.0)


@pytest.mark.parametrize(("others", "where"), [([], ""), ([Scripted("B")], " on A")])
def test_a_first_call_that_takes_long_is_reported_once_in_a_while(
    pool: Make, others: list[Scripted], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_calls, "monotonic", lambda: 1000.0)
    runner, _, listener = pool(Compiles("A", calls=9), *others)

    assert runner.measure(0.0) == "budget"

    (incident,) = listener.incidents
    assert incident.kind == "first_call"
    assert re.fullmatch(
        rf"\S+ of runnable{where}: its first call on \S+, which may compile its kernel, has taken "
        "600 s so far; after 1800 s it counts as hung",
        incident.text,
    )


def test_a_first_call_is_reported_again_while_it_goes_on(
    pool: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([400.0, 411.0, 412.0, 442.0])
    monkeypatch.setattr(first_calls, "monotonic", lambda: next(times))
    runner, _, listener = pool(Compiles("A", calls=5))

    assert runner.measure(0.0) == "budget"

    taken = [re.findall(r"taken (\d+) s", one.text) for one in listener.incidents]
    assert taken == [["11"], ["42"]]


def test_a_first_call_that_is_over_soon_is_not_reported(
    pool: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_calls, "monotonic", lambda: 409.0)
    runner, _, listener = pool(Compiles("A", calls=5))

    assert runner.measure(0.0) == "budget"

    assert listener.incidents == []


def test_no_device_waits_for_the_disk(store: Store) -> None:
    class Watching(Scripted):
        def begin(self, job: Job) -> None:
            on_disk.append(sweep.measured)
            super().begin(job)

    on_disk: list[int] = []
    executor = Watching("A")
    sweep = Sweep(executor.ready(), [POINT], store, {"fresh": False}, Exhaustive)

    assert DevicePool([PooledDevice(executor, sweep, "A")], Progress()).measure(None) == "done"

    assert on_disk == [2 * max(batch - 1, 0) for batch in range(BATCHES)]
    assert sweep.measured == 2 * BATCHES


def test_one_device_measures_the_ceilings_while_the_others_measure_batches(
    pool: Make, store: Store
) -> None:
    one, two = Scripted("a", calls=10), Scripted("b")
    told, sweep, _ = pool(one, two, ceilings=True)

    assert told.measure(None) == "done"
    assert (one.ceilings, two.ceilings) == (1, 0)
    assert stored(store)["copy:1", "copy"] == 1
    counts = {unit.unit: unit.batches for unit in sweep.device_reports()}
    assert counts["b"] > counts["a"]


def test_the_ceilings_of_a_device_that_breaks_are_measured_by_another(
    pool: Make, store: Store
) -> None:
    one, two = Scripted("a", lives=0), Scripted("b")
    told, _, _ = pool(one, two, ceilings=True)

    assert told.measure(None) == "done"
    assert two.ceilings == 1
    assert stored(store)["copy:1", "copy"] == 1


def test_a_slow_device_gets_fewer_batches(pool: Make) -> None:
    runner, sweep, _ = pool(Scripted("A"), Scripted("B", calls=4))

    runner.measure(None)

    fast, slow = (unit.batches for unit in sweep.device_reports())
    assert fast + slow == BATCHES
    assert 3 * slow < fast


def test_a_device_that_is_out_of_line_is_found_by_batches_that_all_measured(pool: Make) -> None:
    runner, sweep, _ = pool(Scripted("A"), Scripted("B", 1.1), Scripted("C", 1.01))

    runner.measure(None)

    ratios = {unit.unit: unit.ratio for unit in sweep.device_reports()}
    assert ratios == pytest.approx({"A": 1 / 1.01, "B": 1.1 / 1.01, "C": 1.0})
    assert [unit.unit for unit in sweep.device_reports() if unit.out_of_line] == ["B"]


def test_of_two_devices_each_is_compared_with_the_other(pool: Make) -> None:
    runner, sweep, _ = pool(Scripted("A"), Scripted("B", 1.04))

    runner.measure(None)

    assert [unit.ratio for unit in sweep.device_reports()] == pytest.approx([1 / 1.04, 1.04])


def test_a_single_device_has_no_ratio(pool: Make) -> None:
    runner, sweep, _ = pool(Scripted("A"))

    runner.measure(None)

    assert [(unit.batches, unit.ratio) for unit in sweep.device_reports()] == [(BATCHES, None)]


def test_the_work_of_a_device_that_breaks_is_done_by_the_others(pool: Make, store: Store) -> None:
    broken = Scripted("B", lives=7)
    runner, _, listener = pool(Scripted("A"), broken)

    assert runner.measure(None) == "done"

    assert len(stored(store)) == 2 * BATCHES
    assert broken.closed
    assert [incident.kind for incident in listener.incidents] == ["unit_dropped"]
    assert "B is left out: B fell off the bus" in listener.incidents[0].text


def test_a_device_whose_worker_cannot_be_killed_is_left_out_too(pool: Make, store: Store) -> None:
    class Stuck(Scripted):
        def close(self) -> None:
            raise MachineUnfit("the worker hangs in the driver")

    runner, _, listener = pool(Scripted("A"), Stuck("B", lives=7))

    assert runner.measure(None) == "done"
    assert len(stored(store)) == 2 * BATCHES
    assert [incident.kind for incident in listener.incidents] == ["unit_dropped"]


def test_when_the_last_device_breaks_the_run_ends_and_keeps_its_rows(
    pool: Make, store: Store
) -> None:
    runner, sweep, _ = pool(Scripted("A", lives=3), Scripted("B", lives=5))

    with pytest.raises(MachineUnfit, match="fell off the bus"):
        runner.measure(None)

    sweep.writer.flush()
    assert len(stored(store)) == 2 * sum(unit.batches for unit in sweep.device_reports()) > 0


@pytest.mark.parametrize("error", [MachineUnfit("a broken context"), KeyboardInterrupt()])
def test_what_was_finished_before_a_run_fails_is_stored_and_reported(
    pool: Make, store: Store, error: BaseException
) -> None:
    class Broken(Scripted):
        jobs = 0

        def begin(self, job: Job) -> None:
            self.jobs += 1
            if self.jobs == 4:
                raise error
            super().begin(job)

    runner, _, listener = pool(Broken("A"))

    with pytest.raises(type(error)):
        runner.measure(None)

    assert [done for done, _ in listener.counts] == [1, 2, 3]
    assert len(stored(store)) == 6


def test_equal_devices_are_so_far_apart(pool: Make, store: Store) -> None:
    runner, sweep, _ = pool(Scripted("A"), Scripted("B", 1.1), Scripted("C", 1.01))

    runner.measure(None)
    sweep.end("done")

    found = sweep.spread()
    assert found is not None
    assert found == Spread(DEVICE.name, KEY.driver, 3, 5, found.median, found.most)
    assert (found.median, found.most) == pytest.approx((0.1, 0.1))
    with closing(sqlite3.connect(store.path)) as db:
        units = db.execute("SELECT unit, node, ratio FROM units ORDER BY unit").fetchall()
    assert units == [
        ("A", "", pytest.approx(1 / 1.01)), ("B", "", pytest.approx(1.1 / 1.01)), ("C", "", 1.0)
    ]  # fmt: skip


def test_what_each_device_did_is_stored_with_its_rows(pool: Make, store: Store) -> None:
    runner, _, listener = pool(Scripted("A"), Scripted("B", 1.1))
    seen: list[tuple[int, int]] = []

    def look(stored: Stored) -> None:
        # As whoever opens the database after a kill at this moment.
        with closing(sqlite3.connect(store.path)) as db:
            (batches,) = db.execute("SELECT sum(batches) FROM units").fetchone()
            (rows,) = db.execute("SELECT count(*) FROM measurements").fetchone()
        seen.append((batches, rows))
        assert batches >= stored.done

    listener.batch = look  # type: ignore[method-assign]
    runner.measure(None)

    assert len(seen) == BATCHES
    assert all(rows == 2 * batches for batches, rows in seen)
    assert seen[-1] == (BATCHES, 2 * BATCHES)
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("SELECT ended_at FROM runs").fetchall() == [(None,)]
        found = db.execute("SELECT unit, ratio FROM units ORDER BY unit").fetchall()
    assert found == [("A", pytest.approx(1 / 1.1)), ("B", pytest.approx(1.1))]


def test_a_single_device_has_no_spread(pool: Make) -> None:
    runner, sweep, _ = pool(Scripted("A"))

    runner.measure(None)

    assert sweep.spread() is None


def test_the_units_of_a_sample_share_more_batches(store: Store) -> None:
    executors = [Scripted("A"), Scripted("B")]
    sweep = sweep_of(executors, store, sample=2)
    pooled = [PooledDevice(executor, sweep, executor.unit) for executor in executors]

    DevicePool(pooled, Progress()).measure(None)

    found = sweep.spread()
    assert found is not None
    assert found.batches == 20


class Comes(Scripted):
    """A device that is ready after some questions, and is lost during some of its jobs."""

    def __init__(self, unit: str, waits: int = 0, loses: tuple[int, ...] = (), calls: int = 1):
        super().__init__(unit, calls=calls)
        self.waits, self.loses, self.begun = waits, loses, 0

    def arrival(self) -> Ready | None:
        self.waits -= 1
        return None if self.waits >= 0 else self.ready()

    def begin(self, job: Job) -> None:
        self.begun += 1
        super().begin(job)

    def advance(self) -> JobUpdate | None:
        if self.begun in self.loses:
            self.loses, self.waits = self.loses[1:], 3
            raise DeviceLost("its node is gone")
        return super().advance()


class Refused(Comes):
    """A device that turns out not to be able to measure."""

    def arrival(self) -> Ready | None:
        if self.waits == 0:
            raise MachineUnfit("no kernel library")
        return super().arrival()


def gathered(store: Store, *executors: Comes) -> tuple[DevicePool, Sweep, Listener]:
    """A pool that begins with the first device that is ready."""
    sweeps: list[Sweep] = []
    listener = Listener()

    def admit(executor: Executor, ready: Ready) -> PooledDevice:
        if sweeps:
            sweeps[0].join(ready.unit, ready.node)
        else:
            sweeps.append(Sweep(ready, [POINT], store, {"fresh": False}, Exhaustive))
        return PooledDevice(executor, sweeps[0], ready.unit)

    arrivals = Arrivals(executors, admit, listener)
    first = arrivals.gather(everyone=False)
    return DevicePool(first, listener, arrivals), sweeps[0], listener


def test_a_device_that_comes_late_takes_its_share(store: Store) -> None:
    runner, sweep, _ = gathered(store, Comes("A"), Comes("B", waits=5))

    assert runner.measure(None) == "done"

    assert len(stored(store)) == 2 * BATCHES
    reports = {unit.unit: unit for unit in sweep.device_reports()}
    assert 0 < reports["B"].batches < reports["A"].batches
    assert reports["B"].ratio == 1.0


@pytest.mark.parametrize("others", [0, 1])
def test_what_a_lost_device_was_measuring_is_measured_again(store: Store, others: int) -> None:
    alone = [Comes("A", loses=(3, 8))]
    runner, sweep, listener = gathered(store, *alone, *[Comes("B")] * others)

    assert runner.measure(None) == "done"

    assert set(stored(store).values()) == {1}
    assert len(stored(store)) == 2 * BATCHES
    assert runner.lost == 2
    assert [one.kind for one in listener.incidents] == ["unit_lost", "unit_lost"]
    assert "A is lost" in listener.incidents[0].text
    assert "its node is gone" in listener.incidents[0].text
    assert sum(unit.batches for unit in sweep.device_reports()) == BATCHES


@pytest.mark.parametrize("arms", [1, 2])
def test_a_schedule_learns_what_a_lost_device_had_measured(store: Store, arms: int) -> None:
    """A device goes when it has measured one arm of a batch, or both."""
    learnt, ended = Counter[tuple[str, str]](), Counter[str]()

    class Learning(Exhaustive):
        def done(self, job: Job, measurements: Sequence[Measurement]) -> None:
            ended[str(job.batch)] += 1
            learnt.update((row.batch, row.arm) for row in measurements)

    def rows_of(job: Job) -> list[Measurement]:
        return [
            Measurement(job.point.name, str(job.batch), arm.name, Status.OK, 1.0, 1.0, 1.0, 8)
            for arm in job.arms
        ]

    sweep = Sweep(Scripted("A").ready(), [POINT], store, {"fresh": False}, Learning)
    gone = sweep.next("A")
    assert gone is not None
    sweep.take("A", gone, rows_of(gone.to_measure)[:arms])
    sweep.give_back("A", gone)
    while (task := sweep.next("A")) is not None:
        sweep.take("A", task, rows_of(task.to_measure))
        sweep.finished("A", task)

    assert set(learnt.values()) == set(ended.values()) == {1}
    assert (len(learnt), len(ended)) == (2 * BATCHES, BATCHES)


def test_a_run_without_a_device_says_for_what_it_waits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa_tune.autotune.runner.arrivals.TELL_AFTER_S", 0.0)

    _, _, listener = gathered(store, Comes("A", waits=3), Comes("B", waits=5))

    assert [(one.kind, one.text) for one in listener.incidents] == [
        ("waiting", "no device is ready yet: waiting for A and 1 more")
    ]


def test_a_run_does_not_wait_for_devices_that_it_does_not_need(store: Store) -> None:
    runner, _, _ = gathered(store, Comes("A"), Comes("B", waits=10**9))

    assert runner.measure(None) == "done"
    assert len(stored(store)) == 2 * BATCHES


def test_a_late_device_that_cannot_measure_is_left_out(store: Store) -> None:
    runner, _, listener = gathered(store, Comes("A"), Refused("B", waits=5))

    assert runner.measure(None) == "done"

    assert [one.text for one in listener.incidents] == ["B is left out: no kernel library"]
    assert len(stored(store)) == 2 * BATCHES


def test_when_no_device_can_measure_the_reason_is_raised(store: Store) -> None:
    with pytest.raises(MachineUnfit, match="no kernel library"):
        gathered(store, Refused("A"), Refused("B", waits=3))


def test_a_lost_device_that_cannot_come_back_ends_the_run_and_its_rows_are_kept(
    store: Store,
) -> None:
    class Gone(Comes):
        def arrival(self) -> Ready | None:
            if self.begun:
                raise MachineUnfit("no node has room")
            return super().arrival()

    runner, sweep, _ = gathered(store, Gone("A", loses=(4,)))

    with pytest.raises(MachineUnfit, match="no node has room"):
        runner.measure(None)

    sweep.writer.flush()
    assert len(stored(store)) == 6


def test_a_budget_lets_every_device_finish_its_batch(pool: Make, store: Store) -> None:
    runner, sweep, _ = pool(Scripted("A"), Scripted("B"))

    assert runner.measure(0.0) == "budget"

    assert 0 < len(stored(store)) == 2 * sum(unit.batches for unit in sweep.device_reports()) <= 8


def test_a_schedule_that_ends_early_is_done_and_not_out_of_budget(store: Store) -> None:
    """An adaptive schedule does not know how many jobs are left before its last one is done."""

    class Guessing(Exhaustive):
        def remaining(self) -> int:
            return 18

    executor = Scripted("A")
    sweep = Sweep(executor.ready(), [POINT], store, {"fresh": False}, Guessing)
    runner = DevicePool([PooledDevice(executor, sweep, "A")], Progress())

    assert runner.measure(None) == "done"
    assert sweep.measured == 2 * BATCHES


def test_devices_of_different_models_have_separate_sweeps(store: Store) -> None:
    class Other(Scripted):
        def ready(self) -> Ready:
            return Ready(SETTING, replace(KEY, gpu="NVIDIA H200"), self.unit)

    pooled = []
    for executor in (Scripted("A"), Other("B")):
        sweep = Sweep(executor.ready(), [POINT], store, {"fresh": False}, Exhaustive)
        pooled.append(PooledDevice(executor, sweep, executor.unit))

    assert DevicePool(pooled, Progress()).measure(None) == "done"

    assert len(stored(store)) == 2 * BATCHES
    assert stored(store) == stored(store, replace(KEY, gpu="NVIDIA H200"))


@pytest.mark.slow
def test_two_workers_on_a_cpu_share_a_run(tmp_path: Path) -> None:
    request = RunRequest(tmp_path / "t.db", device="cpu")

    result = run(request, registry="tests.autotune.fake_point:MANY", devices=["cpu", "cpu"])

    alone = run(
        replace(request, database=tmp_path / "alone.db", isolate=False),
        registry="tests.autotune.fake_point:MANY",
    )
    assert {(row.batch, row.arm) for row in result.table.measurements} == {
        (row.batch, row.arm) for row in alone.table.measurements
    }
    assert [unit.unit for unit in result.units] == ["cpu", "cpu/1"]
    assert all(unit.batches > 0 and unit.ratio is not None for unit in result.units)
    assert sum(unit.batches for unit in result.units) == len(alone.table.measurements) / 2
