"""Advice: how to launch an engine for some traffic, and what that gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from types import MappingProxyType
from typing import Any, NamedTuple

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.autotune.workload.arrivals import Arrival
from nsa_tune.backend.dispatch.table_planner import Match
from nsa_tune.engines.sglang.pass_mode.steering.choice import GRAPH_SIZES
from nsa_tune.reports.traffic.attention import DEFAULT, PLUGIN
from nsa_tune.reports.traffic.deployment import Deployment, Traffic
from nsa_tune.reports.traffic.launch import Launch, flags_of
from nsa_tune.reports.traffic.memory import Memory
from nsa_tune.reports.traffic.served import Served, Setups, seconds_of

MOST_ENGINES = 64
AS_GIVEN, AS_ADVISED, WITH_PLUGIN = "as given", "as advised", "with the plug-in"
ALONE, WITH_POOL, WITH_DP = "one engine", "with a pool in", "with DP attention"
"""As advised, where one is not enough; followed by the KV format; beside a split by heads."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Traffic under one launch of the engine."""

    name: str
    command: str
    prefill_s: float
    decode_s: float | None
    """None without decodes, or where the table has no times of their attention."""
    pool_tokens: int
    """Of all KV pools of an engine that hold different ones."""
    engines: tuple[int, int]
    """That keep up with the trace at these prices, and where all passes take longer by the model's
    error. So many as the latter take requests in turn; all else is of one of them."""
    runs: tuple[Served, ...] = ()
    """At the price, with shorter passes, and with longer ones; none where that is not known."""

    @property
    def served(self) -> Served | None:
        """At the price."""
        return self.runs[0] if self.runs else None


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer."""

    traffic: str
    model: str
    kv_dtype: str
    given: Launch
    changes: dict[str, str]
    """Flags that surely save time, by these prices."""
    outcomes: tuple[Outcome, ...]
    """As given, with the changes if any, and what else was priced; none where nothing fits."""
    release: str
    """The engine that is assumed."""
    speed: float
    """How much faster than in the trace requests come."""
    gpus: int
    """GPUs that there are, or those of one engine."""
    memory: Memory | None
    whole_passes: bool
    """Whether whole passes are priced, and not attention alone."""
    error: float
    """What one in four measured passes is off by more than; 0 without a model."""
    source: str
    stands_in: str
    intervals: str
    """As `standing_in` and `measured_runs`."""
    notes: tuple[str, ...]
    """What is not sure, or not counted, and what to measure to be surer."""

    @property
    def advised(self) -> Launch:
        """The given launch where nothing is surely faster, or only by another GPU's times."""
        return self.given.changed({} if self.stands_in else self.changes)

    @property
    def usual(self) -> Outcome | None:
        """With the changes."""
        return self.outcomes[bool(self.changes)] if self.outcomes else None

    def outcome(self, name: str) -> Outcome | None:
        """The first outcome whose name begins so."""
        return next((each for each in self.outcomes if each.name.startswith(name)), None)

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        memory = self.memory
        return {
            "schema": "nsa-tune/advise/4",
            **asdict(replace(self, memory=None)),
            "command": self.advised.command(self.model),
            "fits": None if memory is None else memory.fits,
            "memory": memory and {
                **asdict(memory), "pool_gib": memory.pool_gib, "pool_tokens": memory.pool_tokens,
            },
        }  # fmt: skip


def advise(
    deployment: Deployment, traffic: Traffic,
    others: Mapping[str, Callable[[], Deployment]] = MappingProxyType({}), gpus: int = 0,
) -> Advice:  # fmt: skip
    """The advice for `traffic` on a deployment, which has the flags in use, where there are `gpus`.
    `others` make what is priced beside it, by name. UsageError when the traffic cannot be read,
    NoTunedData when there is nothing to advise from."""
    fleet, launch = _fleet(deployment, traffic), deployment.launch
    setups, stands_in = deployment.best_setups(), standing_in(deployment)
    changes = flags_of(*setups) if deployment.fits else {}
    notes, outcomes = list[str](), list[Outcome]()
    if deployment.fits:
        outcomes.append(fleet.outcome(AS_GIVEN, Setups(DEFAULT, DEFAULT)))
        if changes:
            flags = " and ".join(map(" ".join, changes.items()))
            outcomes.append(fleet.outcome(f"with {flags}" if stands_in else AS_ADVISED, setups))
        # SGLang's data-parallel ranks are left to it, but for copies and key selection.
        steered = launch.dp_attention == 1 or launch.engine != "sglang"
        if steered and not stands_in and "NSA_TUNE_DISABLE" not in launch.flags:
            outcomes.append(fleet.outcome(WITH_PLUGIN, Setups(PLUGIN, PLUGIN)))
        outcomes += fleet.alone
        for name, other in others.items():
            outcomes += _beside(name, other, traffic, notes, whole=deployment.model is not None)
    return Advice(
        traffic.name, deployment.served, deployment.kv_dtype, launch, changes, tuple(outcomes),
        deployment.release, traffic.speed, max(gpus, deployment.tp), deployment.memory,
        deployment.model is not None, deployment.error, deployment.source, stands_in,
        measured_runs(deployment), (*notes, *notes_on(deployment, traffic)),
    )  # fmt: skip


class _Fleet(NamedTuple):
    """As many engines of one deployment as surely keep up with its traffic."""

    deployment: Deployment
    requests: Sequence[Arrival]
    """Of one of them; their passes are counted."""
    engines: tuple[int, int] = (1, 1)
    alone: tuple[Outcome, ...] = ()
    """One engine, where that is not enough."""

    def outcome(self, name: str, setups: Setups) -> Outcome:
        """What one of them gives under `setups`."""
        one, runs = self.deployment, tuple[Served, ...]()
        prefill_s = seconds_of(one.prices, setups.prefill, extend=True)
        decodes_s = seconds_of(one.prices, setups.decode, extend=False)
        decode_s = decodes_s or None if prices_decode(one) else None
        if self.requests and one.model is not None:
            factors = (1.0, 1 - one.error, 1 + one.error)
            runs = tuple(one.serve(self.requests, setups, factor) for factor in factors)
        command = one.launch.changed(flags_of(*setups)).command(one.served)
        tokens = one.dp * one.scheduler.pool_tokens
        return Outcome(name, command, prefill_s, decode_s, tokens, self.engines, runs)


def _fleet(deployment: Deployment, traffic: Traffic) -> _Fleet:
    fleet = _Fleet(deployment, deployment.count(traffic))
    if not fleet.requests or deployment.model is None or not deployment.fits:
        return fleet
    setups = deployment.best_setups()
    alone = fleet.outcome(ALONE, setups)
    if all(run.engines == 1 for run in alone.runs):
        return fleet

    def load(engines: int, factor: float) -> float:
        requests = deployment.requests(replace(traffic, engines=engines))
        return deployment.serve(requests, setups, factor).engines

    engines = keeping_up(load, 1 + deployment.error)
    requests = deployment.requests(replace(traffic, engines=engines[1]))
    deployment.recount(requests)
    return _Fleet(deployment, requests, engines, (alone,))


def keeping_up(load: Callable[[int, float], float], longer: float) -> tuple[int, int]:
    """The engines that keep up at the prices, and where passes take `longer`: by their `load`."""
    engines, found = 1, list[int]()
    for factor in (1.0, longer):
        while engines < MOST_ENGINES and (times := load(engines, factor)) > 1:
            engines = min(ceil(engines * times), MOST_ENGINES)
        found.append(engines)
    return found[0], found[1]


def _beside(
    name: str, other: Callable[[], Deployment], traffic: Traffic, notes: list[str], *, whole: bool
) -> list[Outcome]:
    """Another deployment with its best flags; never advised: it computes or exchanges otherwise."""
    try:
        deployment = other()
        if not deployment.fits:
            raise NoTunedData("it does not fit")
        if whole and deployment.model is None:
            raise NoTunedData("its whole passes were not measured")
    except (NoTunedData, UsageError) as missing:
        notes.append(f"{name} it is not priced: {missing}")
        return []
    fleet = _fleet(deployment, traffic)
    return [fleet.outcome(name, deployment.best_setups())]


def standing_in(deployment: Deployment) -> str:
    """Whose table prices what was not measured on this GPU, as the beginning of a sentence; no
    plug-in takes it. "" where it is this GPU's."""
    dispatcher = deployment.passes.attention.dispatcher
    if deployment.measured or dispatcher.match is not Match.ARCHITECTURE or not dispatcher.table:
        return ""
    times = f"by times of {dispatcher.table.key.gpu}, which may be several times off,"
    return f"Nothing was measured for {deployment.where}: {times}"


def prices_decode(deployment: Deployment) -> bool:
    """Whether decodes priced so far count the attention that the engine runs in them."""
    return deployment.model is not None or "decode" not in deployment.passes.attention.unpriced


def notes_on(deployment: Deployment, traffic: Traffic) -> Iterator[str]:
    """What the figures leave out, and what to measure."""
    yield from _notes_on_passes(deployment)
    if deployment.tp > (deployment.measured.key.get("tp_size", 1) if deployment.measured else 1):
        yield "all-reduce is not counted: prices are too low"
    if deployment.tp > 2 and not standing_in(deployment):
        yield "the plug-in never ran with more than two ranks (TP2), and figures are of one"
    if deployment.dp > 1 and deployment.launch.engine == "sglang":
        yield "the plug-in leaves the kernels and passes of data-parallel attention to SGLang"
    if not deployment.launch.graphs or deployment.chunk > GRAPH_SIZES[-1]:
        yield "passes without a graph wait for their host: they take longer than is counted here"
    if deployment.scheduler.next_n > 1:
        accepted = f"{deployment.scheduler.acceptance:.0%} of drafted tokens (--acceptance)"
        yield f"{accepted} are assumed to be accepted; drafting itself is not counted"
    if traffic.trace is None and traffic.log is None:
        yield "each measured batch counts the same; give --trace for your own traffic"


def measured_runs(deployment: Deployment) -> str:
    """What intervals are, and how many measured runs of traces were inside (docs/replay.md)."""
    runs = f"no trace was measured with {deployment.heads} heads on a GPU"
    if inside := {16: "9 of 24", 128: "5 of 40"}.get(deployment.heads):
        runs = f"{inside} measured runs were inside, most others slower"
    return f"times to first token by passes {deployment.error:.0%} shorter or longer; {runs}"


def _notes_on_passes(deployment: Deployment) -> Iterator[str]:
    """Where the prices of passes come from, and what that means."""
    setting, measured = deployment.setting, deployment.measured
    if measured is None:
        where = deployment.where
        yield f"whole passes were not measured for {where}: attention alone is compared"
        if deployment.launch.engine == "vllm":
            yield "a trace's batches are those of SGLang's scheduler"
        else:
            yield "a start of the engine with the plug-in measures them; or give --pass-times"
        if unpriced := deployment.passes.attention.unpriced:
            steps = ", ".join(unpriced)
            yield f"the table has no times of what the engine runs in {steps}: not counted"
        return
    if measured.layers != setting.sharing:
        yield (
            f"whole passes were measured with {measured.layers} layers on one GPU and scaled to "
            f"{setting.sharing}: compare the rows; the seconds are not those of your engine"
        )
    if measured.key["version"] != deployment.version:
        yield (
            f"measured in {measured.key['engine']} {measured.key['version']}: a start of your own "
            "engine with the plug-in measures its passes, and makes this surer"
        )
