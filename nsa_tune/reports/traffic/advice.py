"""Advice: how to launch an engine for some traffic, and what that gives.

The flags in use are the baseline. A flag is advised only where it surely saves time: more than 3 %
of the passes it changes. On the traces that engines ran (docs/replay.md) a flag's priced gain was
at most 2.4 points larger than the measured one. What does not fit into memory is never advised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.autotune.workload.arrivals import Arrival
from nsa_tune.autotune.workload.simulation import SchedulerConfig
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.reports.traffic.attention import (
    DECODE_FLAG,
    DEFAULT,
    FORCE_MQA,
    PLUGIN,
    PREFILL_FLAG,
)
from nsa_tune.reports.traffic.launch import Launch, differences, flag_of, kv_flag
from nsa_tune.reports.traffic.memory import Memory, memory_of
from nsa_tune.reports.traffic.opening import EngineSettings, Opened, opened
from nsa_tune.reports.traffic.pass_model import GRAPH_SIZES
from nsa_tune.reports.traffic.pass_prices import PriceList
from nsa_tune.reports.traffic.served import (
    Served,
    Setups,
    best_flag,
    logged,
    requests_of,
    seconds_of,
    served,
)

SURE = 0.03
"""Part of its passes' time that a flag must save."""
_MENTIONED = 0.005
"""Part that is worth a sentence."""
_MOST_RUNNING = 512
"""Requests at once where nothing is given: SGLang's largest decode graph."""
_POOL_TOKENS = 2**20
"""Tokens of the KV pool where memory is not known."""


class Opener(Protocol):
    """Opens the dispatcher of some local heads and KV format."""

    def __call__(self, heads: int, kv_dtype: str) -> Dispatcher: ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an engine is to serve."""

    trace: Path | None = None
    """Requests."""
    log: Path | None = None
    """An engine's decision log, instead of a trace."""
    requests: int | None = None
    speed: float = 1.0
    acceptance: float = 0.7

    @property
    def name(self) -> str:
        """What it is called."""
        path = self.trace or self.log
        return "the batches that were measured" if path is None else path.name


@dataclass(frozen=True, slots=True)
class Outcome:
    """Traffic under one launch of the engine."""

    name: str
    command: str
    prefill_s: float
    decode_s: float
    served: Served | None
    """None where requests, or whole passes, are not known."""
    best: Served | None = None
    """The same if all passes take as much less as the model may be off."""
    worst: Served | None = None

    @property
    def seconds(self) -> float:
        """All passes: of attention alone where nothing else is known."""
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer."""

    traffic: str
    engine: str
    model: str
    given: Launch
    advised: Launch
    """The given launch where nothing is surely faster."""
    outcomes: tuple[Outcome, ...]
    """As given, as advised if that differs, with the plug-in, and what else was priced."""
    saved: float
    """Part of the given launch's time that the advised one saves."""
    memory: Memory | None
    whole: bool
    """Whether whole passes are priced, and not attention alone."""
    error: float
    """The model's error (p90) on measured passes; 0 without a model."""
    source: str
    notes: tuple[str, ...]
    """What is not sure, or not counted, and what to measure to be surer."""

    @property
    def changes(self) -> list[str]:
        """Lines of a diff from the given launch."""
        return list(differences(self.given, self.advised))

    def outcome(self, name: str) -> Outcome | None:
        """The outcome of that name."""
        return next((one for one in self.outcomes if one.name == name), None)

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "schema": "nsa-tune/advise/3",
            "traffic": self.traffic,
            "engine": self.engine,
            "model": self.model,
            "command": self.advised.command(self.model),
            "changes": self.changes,
            "saved": self.saved,
            "fits": None if self.memory is None else self.memory.fits,
            "memory": None if self.memory is None else {
                **asdict(self.memory), "pool_gib": self.memory.pool_gib,
                "pool_tokens": self.memory.pool_tokens,
            },
            "whole_passes": self.whole,
            "error": self.error,
            "source": self.source,
            "outcomes": [asdict(one) for one in self.outcomes],
            "notes": list(self.notes),
        }  # fmt: skip


AS_GIVEN, AS_ADVISED, WITH_PLUGIN = "as given", "as advised", "with the plug-in"


class Deployment:
    """An engine with given flags: its parallelism, memory, scheduler and prices."""

    def __init__(
        self,
        open_dispatcher: Opener,
        launch: Launch,
        heads_of_model: int,
        *,
        heads: int | None = None,
        kv_dtype: str | None = None,
        settings: EngineSettings | None = None,
        database: Path | None = None,
        acceptance: float = 0.7,
    ) -> None:
        """Open what prices it.

        Args:
            open_dispatcher: opens a table.
            launch: the flags in use.
            heads_of_model: query heads of the whole model.
            heads: local heads; None: by --tp.
            kv_dtype: KV format; None: by the flags, else bf16.
            settings: of the engine; what the flags say of it is added.
            database: searched for the indexer's times.
            acceptance: share of drafted tokens that are accepted.

        Raises:
            UsageError: when options and flags contradict each other.
            NoTunedData: without a table.
        """
        self.launch = launch
        self.kv_dtype = (
            _agreed("--kv-dtype", kv_dtype, launch.kv_dtype, "--kv-cache-dtype") or "bf16"
        )
        self.dp = launch.dp_attention
        tp = launch.number("tp")
        local = None if tp is None else heads_of_model // (1 if self.dp > 1 else tp)
        self.heads = _agreed("--heads", heads, local, "--tp") or heads_of_model
        base = settings or EngineSettings(launch.engine)
        self.settings = EngineSettings(
            launch.engine, base.version, launch.graphs, launch.answers, base.indexer_layers,
            base.pass_times,
        )  # fmt: skip
        self.opened: Opened = opened(
            open_dispatcher(self.heads, self.kv_dtype), self.settings, database
        )
        self.setting = self.opened.prices.attention.setting
        self.tp = tp or heads_of_model // self.heads
        self.memory = memory_of(
            self.setting, tp=self.tp, dp=self.dp, static_fraction=launch.fraction
        )
        pool = _POOL_TOKENS if self.memory is None else self.memory.pool_tokens
        drafts = launch.number("drafts") or 1
        self.chunk = launch.number("chunk") or 8192
        self.scheduler = SchedulerConfig(
            chunk_tokens=max(self.chunk // self.dp, 1),
            next_n=drafts,
            acceptance=acceptance,
            max_running=max((launch.number("running") or _MOST_RUNNING) // self.dp, 1),
            pool_tokens=max(pool, 1),
        )
        self.prices = PriceList(self.opened.prices)

    @property
    def whole(self) -> bool:
        """Whether whole passes are priced."""
        return self.opened.prices.model is not None

    def requests(self, traffic: Traffic, engines: int = 1) -> list[Arrival]:
        """What one of so many engines, and of its data-parallel ranks, gets of a trace."""
        assert traffic.trace is not None
        return requests_of(
            traffic.trace, self.scheduler.pool_tokens, requests=traffic.requests,
            speed=traffic.speed, share=engines * self.dp,
        )  # fmt: skip

    def flags(self, *, extend: bool) -> list[str]:
        """Setups of one flag for a kind of pass."""
        names = (PREFILL_FLAG, FORCE_MQA) if extend else (DECODE_FLAG,)
        return [one for one in self.opened.prices.setups if one.startswith(names)]

    def count(self, traffic: Traffic) -> list[Arrival]:
        """Count the traffic's passes in the price list; its requests, if it has any."""
        if traffic.trace is not None:
            requests = self.requests(traffic)
            served(requests, self.scheduler, self.prices, Setups(DEFAULT, DEFAULT), count=True)
            return requests
        for batch, weight in self._batches(traffic):
            sums = (batch.batch_size, batch.q_tokens, batch.kv_tokens, batch.max_kv, batch.pairs)
            shape = self.prices.shape(batch.mode is Mode.EXTEND, sums, partial(_same, batch))
            shape.count += round(weight)
        return []

    def _batches(self, traffic: Traffic) -> Iterable[tuple[Batch, float]]:
        dispatcher = self.opened.prices.attention.dispatcher
        if traffic.log is not None:
            return logged(traffic.log, dispatcher)
        measured = self.opened.measured
        if measured is not None:
            return [(batch, 1.0) for batch in dict.fromkeys(one.batch for one in measured.passes)]
        policy = dispatcher.policies.get("prefill")
        if policy is None or not policy.measured:
            raise NoTunedData(f"there is nothing to advise from: {dispatcher.source}")
        return [(batch, 1.0) for batch in policy.measured]


def _same(batch: Batch) -> Batch:
    return batch


_T = TypeVar("_T", str, int)


def _agreed(option: str, asked: _T | None, flagged: _T | None, flag: str) -> _T | None:
    """The value that an option and a flag give.

    Raises:
        UsageError: when both do, and differ.
    """
    if asked is not None and flagged is not None and asked != flagged:
        raise UsageError(f"{option} {asked} contradicts {flag} in --flags, which means {flagged}")
    return asked if asked is not None else flagged


def advise(
    deployment: Deployment, traffic: Traffic, other: Callable[[], Deployment] | None = None
) -> Advice:
    """The advice for `traffic` on a deployment.

    Args:
        deployment: with the flags in use.
        traffic: what it serves.
        other: makes the same deployment with the other KV format, to be priced beside it.

    Raises:
        UsageError: when the traffic cannot be read.
        NoTunedData: when there is nothing to advise from.
    """
    requests = deployment.count(traffic)
    prices, launch, model = deployment.prices, deployment.launch, deployment.setting.profile.name
    changes: dict[str, str] = {}
    chosen: dict[bool, str] = {}
    notes: list[str] = []
    for extend in (True, False):
        before_s = seconds_of(prices, DEFAULT, extend=extend)
        best = best_flag(prices, deployment.flags(extend=extend), DEFAULT, extend=extend)
        saved = 1 - seconds_of(prices, best, extend=extend) / before_s if before_s else 0.0
        chosen[extend] = best if saved > SURE else DEFAULT
        if chosen[extend] != DEFAULT:
            changes |= flag_of(best)
        elif saved > _MENTIONED:
            kind = "prefills" if extend else "decode passes"
            notes.append(f"{best} may take {saved:.1%} off the {kind}: too little to be sure")
    fits = deployment.memory is None or deployment.memory.fits
    advised = launch.changed(changes) if fits else launch
    outcome = partial(_outcome, deployment, requests)
    outcomes = [outcome(AS_GIVEN, launch, Setups(DEFAULT, DEFAULT))]
    if advised.flags != launch.flags:
        outcomes.append(outcome(AS_ADVISED, advised, Setups(chosen[True], chosen[False])))
    if fits and "NSA_TUNE_DISABLE" not in launch.flags:
        outcomes.append(outcome(WITH_PLUGIN, launch, Setups(PLUGIN, PLUGIN)))
    if fits and other is not None:
        outcomes += _with_other_format(other, traffic, notes)
    advised_s = outcomes[1 if advised.flags != launch.flags else 0].seconds
    given_s = outcomes[0].seconds
    return Advice(
        traffic.name, launch.engine, model, launch, advised,
        tuple(outcomes) if fits else (), 1 - advised_s / given_s if given_s and fits else 0.0,
        deployment.memory, deployment.whole, _error(deployment), _source(deployment),
        (*notes, *notes_on(deployment, traffic)),
    )  # fmt: skip


def _outcome(
    deployment: Deployment, requests: Sequence[Arrival], name: str, launch: Launch, setups: Setups
) -> Outcome:
    prices = deployment.prices
    command = launch.command(deployment.setting.profile.name)
    prefill_s = seconds_of(prices, setups.prefill, extend=True)
    decode_s = seconds_of(prices, setups.decode, extend=False)
    if not requests or not deployment.whole:
        return Outcome(name, command, prefill_s, decode_s, None)
    error = _error(deployment)
    serve = partial(served, requests, deployment.scheduler, prices, setups)
    ends = serve(factor=1 - error), serve(factor=1 + error)
    return Outcome(name, command, prefill_s, decode_s, serve(), *ends)


def _with_other_format(
    other: Callable[[], Deployment], traffic: Traffic, notes: list[str]
) -> list[Outcome]:
    """The same launch with the other KV format; not advised, as it changes what is computed."""
    try:
        deployment = other()
    except NoTunedData as missing:
        notes.append(f"the other KV format is not priced: {missing}")
        return []
    requests = deployment.count(traffic)
    best = best_flag(deployment.prices, deployment.flags(extend=True), DEFAULT, extend=True)
    flags = {**kv_flag(deployment.launch.engine, deployment.kv_dtype)}
    if best != DEFAULT:
        flags |= flag_of(best)
    launch = deployment.launch.changed(flags)
    name = f"with a pool in {deployment.kv_dtype}"
    return [_outcome(deployment, requests, name, launch, Setups(best, DEFAULT))]


def _error(deployment: Deployment) -> float:
    model = deployment.opened.prices.model
    return 0.0 if model is None else model.error().p90


def _source(deployment: Deployment) -> str:
    measured = deployment.opened.measured
    table = deployment.opened.prices.attention.dispatcher.source
    return table if measured is None else f"{table}; {measured.source}"


def notes_on(deployment: Deployment, traffic: Traffic) -> Iterable[str]:
    """What the figures leave out, and what to measure."""
    setting, measured = deployment.setting, deployment.opened.measured
    where = (
        f"{setting.profile.name}, {setting.heads} local heads, {deployment.kv_dtype}, "
        f"{setting.device.name}"
    )
    if measured is None:
        yield (
            f"whole passes were not measured for {where}: attention alone is compared. Start the "
            "engine once with the plug-in, which measures them, or give --pass-times"
            if deployment.launch.engine == "sglang"
            else f"whole passes of vLLM were not measured for {where}: attention alone is compared"
        )
    elif measured.layers != setting.sharing:
        yield (
            f"whole passes were measured with {measured.layers} layers on one GPU and scaled to "
            f"{setting.sharing}: compare the rows; the seconds are not those of your engine"
        )
    if deployment.tp > 1:
        yield "what GPUs say to each other (all-reduce) is not counted"
    if not deployment.settings.graphs or deployment.chunk > GRAPH_SIZES[-1]:
        yield "passes without a graph wait for their host: they take longer than is counted here"
    if deployment.scheduler.next_n > 1:
        yield (
            f"{deployment.scheduler.acceptance:.0%} of drafted tokens are assumed to be accepted "
            "(--acceptance); drafting itself is not counted"
        )
    if traffic.trace is None and traffic.log is None:
        yield "each measured batch counts the same; give --trace or --log for your own traffic"
    unpriced = deployment.opened.prices.attention.unpriced
    if unpriced and not deployment.whole:
        yield f"the table has no times of {', '.join(unpriced)}: not counted"
    if measured is not None and measured.key.get("version") not in (
        None,
        deployment.settings.version,
    ):
        yield (
            f"measured in {measured.key['engine']} {measured.key['version']}: a start of your own "
            "engine with the plug-in measures its passes, and makes this surer"
        )


def other_format(deployment: Deployment) -> str:
    """The KV format that a deployment does not have."""
    return "fp8" if deployment.setting.layout is KVLayout.BF16 else "bf16"
