"""Fleet: the stations of a run, kept busy by one writer until there is nothing left to measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from time import perf_counter

from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.bench.ceilings import POINT as CEILINGS
from nsa_tune.autotune.runner.ledger import flush_all
from nsa_tune.autotune.runner.progress import Incident, Progress
from nsa_tune.autotune.runner.station import Station, Step
from nsa_tune.autotune.runner.sweep import Sweep, Task
from nsa_tune.autotune.worker.quarantine import Quarantined
from nsa_tune.backend.types.records import Measurement

__all__ = ["Fleet", "Post"]

_LOOK_S = 0.25
"""How often a silent worker's deadline is looked at."""


@dataclass(slots=True)
class Post:
    """A station and the sweep that it works for."""

    station: Station
    sweep: Sweep
    unit: str
    task: Task | None = None
    at_ceilings: bool = False

    @property
    def busy(self) -> bool:
        """Whether its station measures something."""
        return self.at_ceilings or self.task is not None


class Fleet:
    """Runs the posts' sweeps."""

    def __init__(self, posts: Sequence[Post], progress: Progress) -> None:
        self._posts = list(posts)
        self._sweeps = list({id(post.sweep): post.sweep for post in posts}.values())
        self._progress = progress
        self._done = 0
        self._started = perf_counter()
        self._told: list[tuple[Task, list[Measurement]]] = []
        self.replaced = 0
        """Workers."""

    @property
    def seconds(self) -> float:
        """Since the start."""
        return perf_counter() - self._started

    def measure(self, budget_s: float | None) -> str:
        """Measure until all is done or the budget is spent; returns "done" or "budget".

        What is under way when the budget is spent comes to its end.

        Raises:
            StoreError: when the database takes no more rows.
            MachineUnfit: when no device of a sweep can go on.
        """
        try:
            spent = self._work(budget_s)
        except (MachineUnfit, KeyboardInterrupt):
            # What was finished before is stored and told all the same.
            self._store()
            raise
        return "budget" if spent and any(sweep.left() for sweep in self._sweeps) else "done"

    def _work(self, budget_s: float | None) -> bool:
        """Have every post measure until nothing is left; returns whether the budget is spent."""
        while True:
            # A budget of nothing still measures one batch.
            over = self._done + len(self._told)
            spent = budget_s is not None and self.seconds >= budget_s and over > 0
            for post in list(self._posts):
                if not post.busy and not spent:
                    self._attempt(self._take_up, post)
            # Behind the next jobs' begin: no device waits for the disk.
            self._store()
            busy = [post for post in self._posts if post.busy]
            if not busy:
                return spent
            for post in self._ready(busy):
                self._attempt(self._advance, post)

    def _ready(self, busy: Sequence[Post]) -> Sequence[Post]:
        """The posts to advance, after a wait for the first one to have news."""
        connections = [post.station.connection for post in busy]
        awaited = [connection for connection in connections if connection is not None]
        if len(awaited) == len(busy):
            wait(awaited, _LOOK_S)
        return busy

    def _take_up(self, post: Post) -> None:
        if post.sweep.hand_out_ceilings():
            post.at_ceilings = True
            post.station.begin_ceilings()
            return
        post.task = post.sweep.next(post.unit)
        if post.task is not None:
            post.station.begin(post.task.arms)

    def _advance(self, post: Post) -> None:
        step, task = post.station.advance(), post.task
        if step is None:
            return
        if task is None:
            self._take_ceilings(post, step)
            return
        self._report(post, task, step, post.sweep.take(post.unit, task, step.rows))
        if step.finished:
            rows = post.sweep.finished(post.unit, task)
            post.task = None
            if not task.anchor:
                self._told.append((task, rows))

    def _take_ceilings(self, post: Post, step: Step) -> None:
        post.at_ceilings = False
        if step.replaced:
            facts = {"point": CEILINGS}
            self._tell_replaced(post, "measuring the ceilings", step.replaced, facts)
        post.sweep.ledger.note(step.rows)

    def _report(self, post: Post, task: Task, step: Step, out: Sequence[Quarantined]) -> None:
        batch = str(task.job.batch)
        if step.replaced:
            arms = ", ".join(row.arm for row in step.rows)
            facts = {"point": task.job.point.name, "batch": batch, "arms": arms}
            self._tell_replaced(post, f"{arms} on {batch}", step.replaced, facts)
        for arm in out:
            text = f"{arm.arm} of {arm.point} is quarantined: not tried again without --fresh"
            self._progress.incident(Incident("quarantined", text, asdict(arm)))

    def _tell_replaced(
        self, post: Post, after: str, reason: str, facts: Mapping[str, object]
    ) -> None:
        self.replaced += 1
        text = f"the worker is replaced after {after}: {reason}"
        facts = {"unit": post.unit, **facts, "reason": reason}
        self._progress.incident(Incident("worker_replaced", text, facts))

    def _store(self) -> None:
        """Bring the rows of all posts to the disk, then say so."""
        flush_all(sweep.ledger for sweep in self._sweeps)
        told, self._told = self._told, []
        under_way = sum(post.task is not None and not post.task.anchor for post in self._posts)
        left = sum(sweep.left() for sweep in self._sweeps)
        total = self._done + len(told) + under_way + left
        for task, rows in told:
            self._done += 1
            self._progress.batch(
                self._done, total, task.job.point, task.job.batch, rows, self.seconds
            )

    def _attempt(self, act: Callable[[Post], None], post: Post) -> None:
        """Have `post` do something; when its device cannot go on, the others do its work.

        Raises:
            MachineUnfit: when there are no others.
        """
        try:
            act(post)
        except MachineUnfit as error:
            self._posts.remove(post)
            if post.task is not None:
                post.sweep.give_back(post.unit, post.task)
            if post.at_ceilings:
                post.sweep.give_back_ceilings()
            # A device that hangs in its driver keeps its worker from ending, too.
            with suppress(MachineUnfit):
                post.station.close()
            if not any(other.sweep is post.sweep for other in self._posts):
                raise
            text, facts = f"{post.unit} is left out: {error}", {"unit": post.unit}
            self._progress.incident(Incident("unit_dropped", text, facts))
