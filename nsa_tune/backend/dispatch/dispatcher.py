"""Dispatcher: opens the table for a key once and answers from it, batch after batch.

Without a usable table it answers by the engine's own baseline and says so; only a request that
cannot be (an unknown model, heads that do not divide) is an error.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from operator import index
from pathlib import Path

from nsa_tune._errors import BatchError, NsaTuneError, UsageError
from nsa_tune.backend.baselines import DEFAULT_BASELINE, Baseline
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.dispatch.decide import Choice
from nsa_tune.backend.dispatch.explain import explained
from nsa_tune.backend.dispatch.opening import Request
from nsa_tune.backend.dispatch.plan import Plan
from nsa_tune.backend.dispatch.table_planner import Match, TablePlanner
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.points import lossy_named
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device, Table
from nsa_tune.db.reader import Wanted

_log = logging.getLogger(__name__)

_opening = threading.Lock()
"""Held while tables are read. A process is not forked meanwhile: its child would have this lock,
and those within SQLite, taken for ever."""
os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_opening.release
)


class Dispatcher:
    """Answers for one GPU, model, head count and KV format. Safe to share between threads."""

    def __init__(
        self,
        setting: Setting,
        policies: Iterable[Policy],
        *,
        source: str,
        table: Table | None = None,
        baseline: Baseline = DEFAULT_BASELINE,
        forced: Mapping[str, str] | None = None,
        match: Match = Match.EXACT,
    ) -> None:
        """A dispatcher that cannot be reloaded; `Dispatcher.open` makes one that can.

        `forced` has for a point the arm that is taken where it is allowed.
        """
        match = Match.BASELINE if table is None else match
        planner = TablePlanner(
            setting, policies, source=source, match=match, baseline=baseline, table=table,
            forced=forced,
        )  # fmt: skip
        self._take(planner, None)

    def _take(self, planner: TablePlanner, request: Request | None) -> None:
        self._planner = planner
        self._request = request
        self._captured: dict[tuple[Mode, int, int], _Captured] = {}

    @classmethod
    def open(
        cls,
        db: str | Path | None = None,
        gpu: str | None = None,
        *,
        model: str,
        heads: int,
        kv_dtype: str,
        strict: bool = False,
        baseline: Baseline = DEFAULT_BASELINE,
        demote_failed: bool = False,
        layers: int | None = None,
        allow_lossy: Collection[str] = (),
    ) -> Dispatcher:
        """The dispatcher for `gpu` as the driver names it (None: this machine's) and local `heads`.

        `db` is a database or text table that is searched before the standard places. A table of
        exactly this GPU and these versions answers; else, unless `strict`, one of this GPU with
        other versions, one of another GPU of the same architecture, and at last `baseline`. `match`
        and `source` say which. With `demote_failed`, or NSA_TUNE_DEMOTE_FAILED, a table whose
        newest `nsa-tune check` with this driver and these libraries failed is stale, and comes
        after all others of this GPU. `layers` is how many layers share what is computed once a
        pass; None stands for the whole model's. `allow_lossy` names arms that may be taken though
        they round more than others, such as "flashmla_sparse_q8".

        Raises:
            UsageError: for an unknown model or KV dtype, heads that do not divide the model's, or
                a variable NSA_TUNE_... that means nothing.
            NoTunedData: when `strict`, or NSA_TUNE_ASSERT_HIT, and there is no exact table; it
                names what differs.
        """
        profile = profile_of(model)
        layout = profile.layout(kv_dtype)
        profile.check_heads(heads)
        if layers is not None and (type(layers) is not int or layers < 1):
            raise UsageError(f"layers must be a positive whole number, got {layers!r}")
        gpu = detect.local_device_name() if gpu is None else gpu
        setting = Setting(
            profile, heads, layout, Device(gpu, ""), layers=layers or 0,
            lossy=lossy_named(allow_lossy),
        )  # fmt: skip
        wanted = Wanted(gpu, model, heads, str(layout))
        place = None if db is None else Path(db)
        request = Request(place, wanted, setting, strict, baseline, demote_failed)
        self = cls.__new__(cls)
        with _opening:
            planner = request.opened()
        self._take(planner, request)
        return self

    def reload(self) -> str | None:
        """Look for tables again, as `open` did. None when what was found now answers.

        Otherwise the old table goes on, and the sentence says why. Plans that are under way are
        wholly the old table's or the new one's. What was decided for a captured size stays: the
        graph exists.
        """
        with _opening:
            if self._request is None:
                return "this dispatcher was not opened from a table"
            old = self._planner
            try:
                new = self._request.opened()
            except NsaTuneError as error:
                problem = str(error)
            else:
                if new.match is not Match.BASELINE or old.match is Match.BASELINE:
                    self._planner = new
                    return None
                problem = new.source
            _log.warning("not reloaded, %s goes on: %s", old.source, problem)
            return problem

    # --- what answers

    @property
    def setting(self) -> Setting:
        """What the answers are for."""
        return self._planner.setting

    @property
    def source(self) -> str:
        """Where the answers come from, and how that differs from this machine."""
        return self._planner.source

    @property
    def match(self) -> Match:
        """How well the table fits."""
        return self._planner.match

    @property
    def baseline(self) -> Baseline:
        """The engine's baseline, which answers where nothing is measured."""
        return self._planner.baseline

    @property
    def forced(self) -> Mapping[str, str]:
        """For a point the arm that NSA_TUNE_FORCE asks for."""
        return self._planner.forced

    @property
    def policies(self) -> Mapping[str, Policy]:
        """The fitted measurements, by point."""
        return self._planner.policies

    @property
    def unmeasured(self) -> Mapping[str, tuple[str, ...]]:
        """For a point, the arms that this GPU could run and that the table has no measurements or
        too few of, such as a table that is older than the arm. They are not chosen while others
        have times."""
        return self._planner.unmeasured

    @property
    def table(self) -> Table | None:
        """The measurements; None when the engine's baseline answers."""
        return self._planner.table

    # --- plans

    def plan(self, batch: Batch) -> Plan:
        """Every decision for `batch`. Does not raise because of a table.

        A captured batch gets what `captured` gives for its size.
        """
        if batch.captured and batch.mode is not Mode.EXTEND:
            plan = self.captured(batch.batch_size, batch.next_n, batch.mode)
            return self._planner.replayed(plan, batch)
        return self._planner.plan(batch)

    def chooser(self, name: str, mode: str = "extend") -> Callable[[Batch], str | None]:
        """A function that gives the tuned field `name` of `plan(batch)` alone, in less time.

        It is made for batches of `mode`; others, and captured ones, take longer. It goes on by the
        table of this moment: after a `reload` ask for it again.

        Raises:
            UnknownName: when the mode has no such question.
            BatchError: when there is no such mode.
        """
        choose = self.choosers((name,), mode)
        return lambda batch: choose(batch)[0]

    def choosers(
        self, names: Sequence[str], mode: str = "extend"
    ) -> Callable[[Batch], tuple[str | None, ...]]:
        """A function that gives several fields of a plan, a tuple in the order of `names`, in less
        time than one `chooser` each.

        All else is as for `chooser`.

        Raises:
            UnknownName: when the mode has no such question.
            BatchError: when there is no such mode.
        """
        return self._planner.choosers(tuple(names), _mode(mode))

    def captured(
        self,
        batch_size: int,
        next_n: int = 1,
        mode: str | None = None,
        contexts: Mapping[int, float] | None = None,
    ) -> Plan:
        """The one plan that a CUDA graph of `batch_size` sequences may hold, at any context.

        Of the choices that are allowed at every context it has the least mean regret over
        `contexts`, a histogram of context length to how often it comes, or else over the measured
        range, with sequences from a quarter of a context to all of it (equal ones in a decode with
        next_n above 1). Contexts where fewer than two choices were measured do not count. It is
        decided once: later calls, and plans of captured batches of this size, give the same. `mode`
        defaults to decode for next_n 1 and to target_verify above.

        Raises:
            BatchError: for sizes below 1, a mode that is not captured by size, a histogram that
                is none, or one that differs from what the size was decided for.
        """
        if type(batch_size) is not int or type(next_n) is not int:
            batch_size, next_n = _whole(batch_size), _whole(next_n)
        word = mode or str(Mode.DECODE if next_n == 1 else Mode.TARGET_VERIFY)
        if word == Mode.EXTEND or word not in list(Mode):
            raise BatchError(f"a graph is captured by size for decoding, not for {word!r}")
        histogram = None if contexts is None else _histogram(contexts, next_n)
        key = (Mode(word), batch_size, next_n)
        decided = self._captured.get(key)
        if decided is None:
            if batch_size < 1 or next_n < 1:
                raise BatchError(f"a graph of {batch_size} sequences of {next_n} tokens is none")
            plan = self._planner.captured_plan(*key, histogram)
            # Of two threads that get here together both have the answer of the first.
            decided = self._captured.setdefault(key, (histogram, plan))
        if histogram is not None and histogram != decided[0]:
            raise BatchError(
                f"{batch_size} sequences of {next_n} tokens are decided for other contexts "
                "already; give them at the first call, or open another dispatcher"
            )
        return decided[1]

    # --- reasons

    def questions(self, mode: Mode) -> tuple[str, ...]:
        """The tuned fields of a plan for `mode`."""
        return self._planner.questions(mode)

    def decide(self, batch: Batch, name: str) -> Choice:
        """The choice behind the tuned field `name` of `plan(batch)`, with all that led to it.

        Raises:
            UnknownName: when the batch's mode has no such question.
        """
        return self._planner.decide(batch, name)

    def explain(self, batch: Batch) -> str:
        """The plan for `batch` in words: each decision with what it rests on."""
        lacking = {} if self.match is Match.BASELINE else self.unmeasured
        points = {
            question.name: policy.point.name
            for policy in self.policies.values()
            for question in policy.point.questions
        }
        lines = explained(self.plan(batch), self.source, lacking, self.setting.sharing, points)
        return "\n".join(lines)


_Captured = tuple[Mapping[int, float] | None, Plan]


def _mode(word: str) -> Mode:
    if word not in list(Mode):
        raise BatchError(f"unknown mode {word!r}; use one of: {', '.join(Mode)}")
    return Mode(word)


def _whole(number: object) -> int:
    try:
        return index(number)  # type: ignore[arg-type]
    except TypeError as error:
        raise BatchError(f"a graph's sizes are whole numbers: {error}") from None


def _histogram(contexts: Mapping[int, float], next_n: int) -> dict[int, float]:
    """`contexts` without those that never come, checked."""
    if not isinstance(contexts, Mapping):
        raise BatchError("a histogram of contexts maps lengths to how often they come")
    counts = {length: weight for length, weight in contexts.items() if weight}
    if not counts:
        raise BatchError("a histogram of contexts needs one that comes")
    for length, weight in counts.items():
        if type(length) is not int or length < next_n or not 0 < weight < inf:
            raise BatchError(
                f"a histogram has whole contexts of at least {next_n} tokens and positive "
                f"weights, got {length!r}: {weight!r}"
            )
    return counts
