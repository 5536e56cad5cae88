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
_ALIKE = 1.2
"""Both formats' times that differ by less are not told apart: their ratio was up to 19 % off."""
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
    pool_tokens: int  # of all KV pools of an engine that hold different ones
    engines: tuple[int, int]
    """That keep up with the trace at these prices, and where all passes take longer by `error`."""
    runs: tuple[Served, ...] = ()
    """At the price, with shorter passes, and with longer ones; none where that is not known."""
    shared: int = 1  # engines that take requests in turn; all but `loads` is of one of them
    loads: tuple[float, ...] = (1.0, 1.0, 1.0)
    """`Served.engines` of one engine that gets the whole trace, by runs."""
    error: float = 0.0
    intervals: str = ""  # as `Deployment.error` and `measured_runs`: each deployment has its own

    @property
    def served(self) -> Served | None:
        """At the price."""
        return self.runs[0] if self.runs else None

    def verdict(self, other: Outcome, names: tuple[str, str]) -> str:
        """Which of both, by their names, needs fewer GPUs, else takes surely less time."""
        if self.engines != other.engines:
            fewer = names[0] if self.engines < other.engines else names[1]
            signs = {(x > y) - (x < y) for x, y in zip(self.engines, other.engines, strict=True)}
            return f"{fewer} {'takes' if len(signs) == 1 else 'may take'} fewer GPUs"
        first, later = (self._faster(other, times, names) for times in ("ttft_s", "tpot_s"))
        if not first and not later:
            return "No sure difference, so send the trace to an engine with each"
        both = f"{first or 'unsure'} for the first token, {later or 'unsure'} for the next ones"
        return first if first == later else both

    def _faster(self, other: Outcome, times: str, names: tuple[str, str]) -> str:
        """Whose time is surely shorter: at the price, and with all passes shorter or longer by the
        model's error; "" where neither is."""
        pairs = zip(self.runs, other.runs, strict=True)
        # A trace of single tokens has no time of a further one.
        ratios = [getattr(b, times)["mean"] / (getattr(a, times)["mean"] or 1) for a, b in pairs]
        return names[0] if min(ratios) > _ALIKE else names[1] * (0 < max(ratios) < 1 / _ALIKE)


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer."""

    traffic: str
    model: str
    kv_dtype: str
    given: Launch
    changes: dict[str, str]  # flags that surely save time, by these prices
    outcomes: tuple[Outcome, ...]
    """As given, with the changes if any, and what else was priced; none where nothing fits."""
    release: str
    speed: float
    gpus: int  # GPUs that there are; 0 where that is not said
    memory: Memory | None
    whole_passes: bool
    source: str
    stands_in: str
    notes: tuple[str, ...]  # what is not sure, or not counted, and what to measure to be surer

    @property
    def advised(self) -> Launch:
        """The given launch where nothing is surely faster, or only by another GPU's times."""
        return self.given.changed({} if self.stands_in else self.changes)

    @property
    def usual(self) -> Outcome | None:
        """With the changes."""
        return self.outcomes[bool(self.changes)] if self.outcomes else None

    @property
    def ranks(self) -> Outcome | None:
        """Data-parallel attention, where it surely serves more by the estimates."""
        usual, other = self.usual, self.outcome(WITH_DP)
        if not (usual and other and usual.served and other.served):
            return None
        if self.gpus >= usual.engines[1] * (self.given.number("tp") or 1):  # enough for both
            usual = replace(usual, engines=other.engines)
        verdict = usual.verdict(other, ("", WITH_DP))
        return other if verdict in (WITH_DP, f"{WITH_DP} takes fewer GPUs") else None

    @property
    def command(self) -> str:
        """The answer."""
        return self.ranks.command if self.ranks else self.advised.command(self.model)

    def outcome(self, name: str) -> Outcome | None:
        """The first outcome whose name begins so."""
        return next((each for each in self.outcomes if each.name.startswith(name)), None)

    def document(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "schema": "nsa-tune/advise/5",
            **asdict(replace(self, memory=None)),
            "command": self.command,
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
    fleet, launch = _fleet(deployment, traffic, gpus), deployment.launch
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
        steered = steered and not stands_in and "NSA_TUNE_DISABLE" not in launch.flags
        if steered:
            outcomes.append(fleet.outcome(WITH_PLUGIN, Setups(PLUGIN, PLUGIN)))
        outcomes += fleet.alone
        for name, other in others.items():
            try:
                one = other()
                if not one.fits:
                    raise NoTunedData("it does not fit")
                if one.model is None and deployment.model:
                    raise NoTunedData("its whole passes were not measured")
            except (NoTunedData, UsageError) as missing:
                notes.append(f"{name} it is not priced: {missing}")
                continue
            beside, setups = _fleet(one, traffic, gpus), one.best_setups()
            kernels = (f", {kernel}" for kernel in flags_of(*setups).values())
            outcomes.append(beside.outcome(name + "".join(kernels), setups))
            if steered and one.dp == 1:
                both = f"{WITH_PLUGIN} and {one.kv_dtype}"
                outcomes.append(beside.outcome(both, Setups(PLUGIN, PLUGIN)))
    return Advice(
        traffic.name, deployment.served, deployment.kv_dtype, launch, changes, tuple(outcomes),
        deployment.release, traffic.speed, gpus, deployment.memory,
        deployment.model is not None, deployment.source, stands_in,
        (*notes, *notes_on(deployment, traffic)),
    )  # fmt: skip


class _Fleet(NamedTuple):
    """As many engines of one deployment as surely keep up with its traffic."""

    deployment: Deployment
    requests: Sequence[Arrival]  # of one of them; their passes are counted
    runs: dict[Setups, tuple[Served, ...]]  # that are known already
    engines: tuple[int, int] = (1, 1)
    alone: tuple[Outcome, ...] = ()
    """One engine, where that is not enough."""
    shared: int = 1

    def outcome(self, name: str, setups: Setups) -> Outcome:
        """What one of them gives under `setups`."""
        one, runs = self.deployment, self.runs.get(setups, ())
        prefill_s = seconds_of(one.prices, setups.prefill, extend=True)
        decodes_s = seconds_of(one.prices, setups.decode, extend=False)
        decode_s = decodes_s or None if prices_decode(one) else None
        if self.requests and one.model is not None and not runs:
            factors = (1.0, 1 - one.error, 1 + one.error)
            runs = tuple(one.serve(self.requests, setups, factor) for factor in factors)
            self.runs[setups] = runs
        command = one.launch.changed(flags_of(*setups)).command(one.served)
        tokens = one.dp * one.scheduler.pool_tokens
        loads = tuple(run.engines for row in self.alone for run in row.runs) or (1.0, 1.0, 1.0)
        return Outcome(
            name, command, prefill_s, decode_s, tokens, self.engines, runs, self.shared, loads,
            one.error, measured_runs(one),
        )  # fmt: skip


def _fleet(deployment: Deployment, traffic: Traffic, gpus: int) -> _Fleet:
    fleet = _Fleet(deployment, deployment.count(traffic), {})
    if not fleet.requests or deployment.model is None or not deployment.fits:
        return fleet
    setups = deployment.best_setups()
    alone = fleet.outcome(ALONE, setups)
    late, engines = any(run.engines > 1 for run in alone.runs), (1, 1)

    def load(engines: int, factor: float) -> float:
        if engines == 1:
            return alone.runs[0 if factor == 1 else 2].engines
        requests = deployment.requests(replace(traffic, engines=engines))
        return deployment.serve(requests, setups, factor).engines

    if late:
        engines = keeping_up(load, 1 + deployment.error)
    shared = max(engines[1], gpus // deployment.tp)
    if shared == 1:
        return fleet
    requests = deployment.requests(replace(traffic, engines=shared))
    deployment.recount(requests)
    return _Fleet(deployment, requests, {}, engines, (alone,) * late, shared)


def keeping_up(load: Callable[[int, float], float], longer: float) -> tuple[int, int]:
    """The engines that keep up at the prices, and where passes take `longer`: by their `load`."""
    engines, found = 1, list[int]()
    for factor in (1.0, longer):
        while engines < MOST_ENGINES and (times := load(engines, factor)) > 1:
            engines = min(ceil(engines * times), MOST_ENGINES)
        found.append(engines)
    return found[0], found[1]


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
    most = 8 if deployment.launch.engine == "sglang" else 1
    if deployment.tp > most and not standing_in(deployment):
        yield f"the plug-in never ran with more than TP{most}"
    if unread := deployment.launch.unread:
        yield f"not priced, and with some the plug-in does less: {', '.join(unread)}"
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
    if inside := {16: "30 of 46", 128: "38 of 60"}.get(deployment.heads):
        runs = f"{inside} measured runs were inside, most others slower"
    few = deployment.measured is not None and not deployment.exact
    least = "; a few layers in one GPU, scaled to the whole model: the least certain"
    return f"all passes {deployment.error:.0%} shorter or longer; {runs}{least * few}"


def _notes_on_passes(deployment: Deployment) -> Iterator[str]:
    """Where the prices of passes come from, and what that means."""
    setting, measured = deployment.setting, deployment.measured
    if measured is None:
        yield f"whole passes were not measured for {deployment.where}: attention alone is compared"
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
