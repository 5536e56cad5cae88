"""The queue: a job is given to one worker at a time, and ends once, whatever goes silent."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.fleet.service.jobs import queue as module
from nsa_tune.fleet.service.jobs.job import Job, Worker
from nsa_tune.fleet.service.jobs.queue import JobLost, Jobs, TooManyJobs
from nsa_tune.fleet.service.jobs.targets import Target
from nsa_tune.fleet.service.state import State

H200 = "NVIDIA H200"
TARGET = Target(H200, "deepseek-v3.2", 128, "fp8_packed")
ONE = Worker("one", H200, "580.1", (("torch", "2.13.0"),))
TWO = ONE._replace(name="two")
LEASE_S = 100.0


class Clock:
    """Seconds that a test sets."""

    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def jobs(tmp_path: Path, clock: Clock) -> Iterator[Jobs]:
    with State.open(tmp_path / "s.db") as state:
        yield Jobs(state, lease_s=LEASE_S, clock=clock)


def claimed(jobs: Jobs, worker: Worker, claim: str) -> Job:
    """The job that `worker` got."""
    job = jobs.claim(worker, claim)
    assert job is not None
    return job


def test_a_proposal_waits_for_an_approval_and_then_for_a_worker(jobs: Jobs) -> None:
    job = jobs.propose(TARGET, "no table", by="host")
    assert (job.state, job.reason, job.created_by) == ("proposed", "no table", "host")
    assert jobs.claim(ONE, "a") is None
    assert jobs.approve(job.number).state == "queued"
    mine = claimed(jobs, ONE, "a")
    assert (mine.number, mine.state, mine.worker, mine.attempts) == (1, "running", "one", 1)
    assert jobs.claim(TWO, "b") is None
    assert jobs.beat(1, "a", 7).rows == 7
    assert jobs.end(1, "a", "done", 9, "fine").state == "done"
    assert [(one.state, one.rows, one.message) for one in jobs.all()] == [("done", 9, "fine")]
    assert jobs.claim(TWO, "b") is None


def test_whoever_approves_all_needs_not_wait(tmp_path: Path) -> None:
    with State.open(tmp_path / "s.db") as state:
        assert Jobs(state, approve=True).propose(TARGET, "no table", by="x").state == "queued"


def test_a_lost_answer_is_given_again(jobs: Jobs) -> None:
    jobs.create(TARGET, by="boss")
    jobs.create(replace(TARGET, heads=16), by="boss")
    first = claimed(jobs, ONE, "a")
    assert claimed(jobs, ONE, "a") == first
    assert claimed(jobs, ONE, "b").number == 2
    assert jobs.end(1, "a", "done", 1) == jobs.end(1, "a", "done", 1)
    with pytest.raises(JobLost):
        jobs.end(1, "a", "failed", 1, "after all not")


@pytest.mark.parametrize(
    ("worker", "fits"),
    [
        (ONE, True),
        (ONE._replace(driver="999"), False),
        (ONE._replace(libraries=()), False),
        (ONE._replace(gpu="NVIDIA H100"), False),
    ],
)
def test_a_job_goes_to_a_worker_that_makes_this_key(worker: Worker, fits: bool, jobs: Jobs) -> None:
    jobs.create(replace(TARGET, driver=ONE.driver, libraries=ONE.libraries), by="boss")
    assert (jobs.claim(worker, "a") is not None) == fits


def test_a_silent_worker_loses_its_job_to_the_next(jobs: Jobs, clock: Clock) -> None:
    jobs.create(TARGET, by="boss")
    claimed(jobs, ONE, "a")
    clock.now += LEASE_S - 1
    assert jobs.claim(TWO, "b") is None
    clock.now += 2
    assert claimed(jobs, TWO, "b").attempts == 2
    with pytest.raises(JobLost, match="job 1 is no longer yours"):
        jobs.beat(1, "a", 1)
    with pytest.raises(JobLost, match="job 1 is no longer yours"):
        jobs.end(1, "a", "done", 1)
    assert jobs.end(1, "b", "done", 5).worker == "two"


def test_a_worker_that_comes_back_in_time_keeps_its_job(jobs: Jobs, clock: Clock) -> None:
    jobs.create(TARGET, by="boss")
    claimed(jobs, ONE, "a")
    clock.now += LEASE_S + 1
    assert jobs.beat(1, "a", 3).state == "running"
    assert jobs.claim(TWO, "b") is None
    assert jobs.end(1, "a", "done", 4).state == "done"


def test_a_job_that_silences_workers_is_given_up(jobs: Jobs, clock: Clock) -> None:
    jobs.create(TARGET, by="boss")
    for claim in "abc":
        claimed(jobs, ONE, claim)
        clock.now += LEASE_S + 1
    assert jobs.claim(ONE, "d") is None
    assert jobs.all()[0].state == "failed"
    assert jobs.all()[0].message == "worker one went silent"


def test_after_a_restart_workers_get_a_new_lease(jobs: Jobs, clock: Clock) -> None:
    jobs.create(TARGET, by="boss")
    claimed(jobs, ONE, "a")
    clock.now += 10 * LEASE_S
    jobs.resume()
    assert jobs.claim(TWO, "b") is None
    assert jobs.beat(1, "a", 1).attempts == 1


def test_a_job_that_is_given_back_goes_to_the_next(jobs: Jobs) -> None:
    jobs.create(TARGET, by="boss")
    claimed(jobs, ONE, "a")
    job = jobs.give_back(1, "a")
    assert (job.state, job.worker) == ("queued", None)
    assert claimed(jobs, TWO, "b").attempts == 1


def test_a_cancelled_job_is_no_longer_anybodys(jobs: Jobs) -> None:
    jobs.create(TARGET, by="boss")
    claimed(jobs, ONE, "a")
    assert jobs.cancel(1).state == "cancelled"
    with pytest.raises(JobLost, match="cancelled"):
        jobs.beat(1, "a", 1)
    with pytest.raises(UsageError, match="job 1 is cancelled and cannot be approved"):
        jobs.approve(1)
    with pytest.raises(NoTunedData, match="there is no job 2"):
        jobs.cancel(2)


# --- proposals


def test_asking_again_makes_no_second_job(jobs: Jobs, clock: Clock) -> None:
    first = jobs.propose(TARGET, "no table", by="x")
    assert jobs.propose(TARGET, "no table", by="y").number == first.number
    assert jobs.all()[0].asked == 2
    jobs.approve(1)
    claimed(jobs, ONE, "a")
    jobs.end(1, "a", "failed", 0, "no kernels")
    assert jobs.propose(TARGET, "no table", by="y").number == first.number
    clock.now += 86_401
    assert jobs.propose(TARGET, "no table", by="y").number == 2


def test_proposals_of_one_table_are_one_job_with_all_points(jobs: Jobs) -> None:
    def found(point: str) -> Job:
        return jobs.propose(TARGET, "moved", by="x", points=[point], digest="d")

    assert found("prefill").points == ("prefill",)
    job = found("decode")
    assert (job.number, job.points, job.fresh) == (1, ("decode", "prefill"), True)
    jobs.approve(1)
    claimed(jobs, ONE, "a")
    assert found("decode").number == 1
    assert found("indexer_topk").number == 2, "the running job does not measure it"
    assert jobs.propose(replace(TARGET, heads=16), "no table", by="x").number == 3


def test_one_token_leaves_room_for_the_proposals_of_others(jobs: Jobs) -> None:
    with pytest.raises(
        TooManyJobs, match=r"100 jobs that token mallory .* job cancel --by mallory"
    ):
        for number in range(1000):
            jobs.propose(replace(TARGET, gpu=f"junk{number}"), "no table", by="mallory")
    assert jobs.propose(TARGET, "no table", by="honest").state == "proposed"
    assert jobs.create(replace(TARGET, heads=16), by="boss").state == "queued"
    assert jobs.cancel_proposals("mallory") == 100
    assert jobs.counts() == {"proposed": 1, "queued": 1, "cancelled": 100}


def test_admins_add_jobs_however_many_are_proposed(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_PROPOSED", 2)
    for heads in (1, 2):
        jobs.propose(replace(TARGET, heads=heads), "no table", by=f"token {heads}")
    with pytest.raises(TooManyJobs, match="2 proposed jobs wait already"):
        jobs.propose(replace(TARGET, heads=4), "no table", by="x")
    assert jobs.propose(replace(TARGET, heads=2), "no table", by="x").asked == 2
    assert jobs.create(replace(TARGET, heads=8), by="boss").state == "queued"
    assert jobs.cancel_proposals("boss") == 0, "an admin's own jobs stay"


def test_what_nobody_asks_for_any_longer_is_no_proposal(jobs: Jobs, clock: Clock) -> None:
    jobs.propose(TARGET, "no table", by="x")
    clock.now += 13 * 86_400
    jobs.propose(TARGET, "no table", by="y")
    clock.now += 13 * 86_400
    other = replace(TARGET, heads=16)
    jobs.propose(other, "no table", by="y")
    assert jobs.counts() == {"proposed": 2}
    clock.now += 2 * 86_400
    jobs.propose(other, "no table", by="y")
    assert jobs.counts() == {"proposed": 1, "cancelled": 1}


def test_jobs_that_ended_long_ago_are_forgotten(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_ENDED", 3)
    for _ in range(6):
        jobs.cancel(jobs.create(TARGET, by="boss").number)
    assert [job.number for job in jobs.all()] == [6, 5, 4]


# --- workers


def test_workers_that_are_gone_are_forgotten(
    jobs: Jobs, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_WORKERS", 3)
    for number in range(9):
        clock.now += 1
        jobs.claim(ONE._replace(name=f"pod-{number}"), "a")
    assert [worker.name for worker, _ in jobs.workers()] == ["pod-8", "pod-7", "pod-6"]
    clock.now += 7 * 86_400 + 1
    jobs.claim(ONE, "a")
    assert jobs.worker_count() == 1
    assert jobs.worker("one") == ONE
    assert jobs.worker("pod-8") is None


# --- clocks that jump


def test_a_clock_that_steps_back_leaves_no_job_with_a_dead_worker(jobs: Jobs, clock: Clock) -> None:
    jobs.create(TARGET, by="boss")
    claimed(jobs, ONE, "a")
    clock.now -= 30 * 86_400
    assert claimed(jobs, TWO, "b").attempts == 2


def test_a_clock_that_steps_back_keeps_no_proposal_away(jobs: Jobs, clock: Clock) -> None:
    jobs.propose(TARGET, "no table", by="x")
    jobs.cancel(1)
    clock.now -= 30 * 86_400
    assert jobs.propose(TARGET, "no table", by="x").number == 2


# --- whatever happens in whatever order


class Queue(RuleBasedStateMachine):
    """Workers that claim, beat, end, go silent and come back; services that restart."""

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.folder = tempfile.TemporaryDirectory()
        self.state = State.open(Path(self.folder.name, "s.db"))
        self.jobs = Jobs(self.state, lease_s=LEASE_S, clock=self.clock)
        self.claims: dict[str, int] = {}
        self.ended: dict[int, str] = {}
        self.made = 0

    def teardown(self) -> None:
        self.state.close()
        self.folder.cleanup()

    @rule()
    def add(self) -> None:
        self.made = self.jobs.create(TARGET, by="boss").number

    @rule(worker=st.sampled_from([ONE, TWO]))
    def claim(self, worker: Worker) -> None:
        claim = f"claim {len(self.claims)}"
        job = self.jobs.claim(worker, claim)
        if job is not None:
            assert job.number not in self.ended, "a job that had ended was given out"
            self.claims[claim] = job.number

    @rule(data=st.data(), how=st.sampled_from(["beat", "done", "give_back"]))
    def speak(self, data: st.DataObject, how: str) -> None:
        if not self.claims:
            return
        claim = data.draw(st.sampled_from(sorted(self.claims)))
        number = self.claims[claim]
        try:
            if how == "give_back":
                self.jobs.give_back(number, claim)
            elif how == "done":
                self.jobs.end(number, claim, "done", 1)
            else:
                self.jobs.beat(number, claim, 1)
        except JobLost:
            return
        if how == "done":
            assert self.ended.setdefault(number, claim) == claim, "a job was done twice"

    @rule(seconds=st.sampled_from([1.0, 60.0, LEASE_S + 1]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def restart(self) -> None:
        self.jobs = Jobs(self.state, lease_s=LEASE_S, clock=self.clock)
        self.jobs.resume()

    @invariant()
    def no_job_is_lost(self) -> None:
        assert sum(self.jobs.counts().values()) == self.made
        assert self.jobs.counts().get("done", 0) == len(self.ended)


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
