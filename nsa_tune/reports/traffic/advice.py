"""Advice: how to launch an engine for some traffic, and what that gives.

The flags in use are the baseline. A flag is advised only where it surely saves time: more than 3 %
of the passes it changes. What does not fit into memory is never advised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from typing import Any

from nsa_tune._errors import NoTunedData
from nsa_tune.autotune.workload.arrivals import Arrival
from nsa_tune.backend.dispatch.table_planner import Match
from nsa_tune.engines.sglang.pass_mode.steering.choice import GRAPH_SIZES
from nsa_tune.reports.traffic.attention import DEFAULT, PLUGIN
from nsa_tune.reports.traffic.deployment import SURE, Deployment, Traffic
from nsa_tune.reports.traffic.launch import Launch, differences, flags_of
from nsa_tune.reports.traffic.memory import Memory
from nsa_tune.reports.traffic.served import Served, Setups, seconds_of

MOST_ENGINES = 64
_MENTIONED = 0.005
"""Part of its passes' time for which a flag is worth a sentence."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Traffic under one launch of the engine."""

    name: str
    command: str
    prefill_s: float
    decode_s: float | None
    """None without decodes, or where the table has no times of their attention."""
    pool_tokens: int
    """Of each GPU's KV pool."""
    served: Served | None
    """None where requests, or whole passes, are not known."""
    best: Served | None = None
    """The same if all passes take as much less as the model may be off."""
    worst: Served | None = None

    @property
    def runs(self) -> list[Served]:
        """At the price, with shorter passes, and with longer ones; none without a trace."""
        return [run for run in (self.served, self.best, self.worst) if run]


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer."""

    traffic: str
    model: str
    kv_dtype: str
    given: Launch
    advised: Launch
    """The given launch where nothing is surely faster."""
    outcomes: tuple[Outcome, ...]
    """As given, as advised if that differs, with the plug-in, and what else was priced."""
    engines: int
    """That surely keep up with a trace and take its requests in turn; outcomes are those of one."""
    load: float
    """How many times the load that one engine, as advised, serves the trace is; 1 or more."""
    memory: Memory | None
    whole_passes: bool
    """Whether whole passes are priced, and not attention alone."""
    error: float
    """What one in four measured passes is off by more than; 0 without a model."""
    source: str
    plugin: tuple[str, ...]
    """How sure the row with the plug-in is."""
    notes: tuple[str, ...]
    """What is not sure, or not counted, and what to measure to be surer."""

    @property
    def changes(self) -> list[str]:
        """Lines of a diff from the given launch."""
        return list(differences(self.given, self.advised))

    def outcome(self, *names: str) -> Outcome | None:
        """The first outcome whose name begins with one of these."""
        return next((each for each in self.outcomes if each.name.startswith(names)), None)

    @property
    def usual(self) -> Outcome | None:
        """As advised, which may be as given; None where nothing fits."""
        return self.outcome(AS_ADVISED) or self.outcome(AS_GIVEN)

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        memory = self.memory
        return {
            "schema": "nsa-tune/advise/3",
            **asdict(replace(self, memory=None)),
            "command": self.advised.command(self.model),
            "changes": self.changes,
            "fits": None if memory is None else memory.fits,
            "memory": memory and {
                **asdict(memory), "pool_gib": memory.pool_gib, "pool_tokens": memory.pool_tokens,
            },
        }  # fmt: skip


AS_GIVEN, AS_ADVISED, WITH_PLUGIN = "as given", "as advised", "with the plug-in"
OTHER_FORMAT = "with a pool in"
"""Followed by the KV format."""


def advise(
    deployment: Deployment, traffic: Traffic, other: Callable[[], Deployment] | None = None
) -> Advice:
    """The advice for `traffic` on a deployment, which has the flags in use. `other` makes the same
    with the other KV format, to be priced beside it. UsageError when the traffic cannot be read,
    NoTunedData when there is nothing to advise from."""
    requests = deployment.count(traffic)
    launch, load = deployment.launch, 1.0
    if requests and deployment.fits and deployment.model is not None:
        load = deployment.serve(requests, deployment.best_setups()).engines
        traffic = shared(deployment, traffic, load)
    if traffic.engines > 1:
        requests = deployment.count(traffic)
    setups = deployment.best_setups()
    notes = [
        f"{best} may take {saved:.1%} off the {kind}: too little to be sure"
        for kind, extend in (("prefills", True), ("decode passes", False))
        for best, saved in [deployment.best_flag(extend=extend)]
        if _MENTIONED < saved <= SURE
    ]
    changes = flags_of(setups.prefill, setups.decode)
    advised = launch.changed(changes) if deployment.fits else launch
    outcome = partial(_outcome, deployment, requests)
    outcomes = []
    if deployment.fits:
        outcomes.append(outcome(AS_GIVEN, launch, Setups(DEFAULT, DEFAULT)))
        if changes:
            outcomes.append(outcome(AS_ADVISED, advised, setups))
        # SGLang's data-parallel ranks are left to it, but for copies and key selection.
        steered = launch.dp_attention == 1 or launch.engine != "sglang"
        steered = steered and not of_another_gpu(deployment)
        if steered and "NSA_TUNE_DISABLE" not in launch.flags:
            outcomes.append(outcome(WITH_PLUGIN, launch, Setups(PLUGIN, PLUGIN)))
        if other is not None:
            outcomes += _with_other_format(other, traffic, notes)
    return Advice(
        traffic.name, deployment.served, deployment.kv_dtype, launch, advised, tuple(outcomes),
        traffic.engines, load, deployment.memory, deployment.model is not None, deployment.error,
        deployment.source, (*notes_on_plugin(deployment),),
        (*notes, *notes_on(deployment, traffic)),
    )  # fmt: skip


def _outcome(
    deployment: Deployment, requests: Sequence[Arrival], name: str, launch: Launch, setups: Setups
) -> Outcome:
    prefill_s = seconds_of(deployment.prices, setups.prefill, extend=True)
    decodes_s = seconds_of(deployment.prices, setups.decode, extend=False)
    decode_s = decodes_s or None if prices_decode(deployment) else None
    runs: list[Served | None] = [None]
    if requests and deployment.model is not None:
        off = deployment.error
        runs = [deployment.serve(requests, setups, factor) for factor in (1.0, 1 - off, 1 + off)]
    command, pool_tokens = launch.command(deployment.served), deployment.scheduler.pool_tokens
    return Outcome(name, command, prefill_s, decode_s, pool_tokens, *runs)


def shared(deployment: Deployment, traffic: Traffic, load: float) -> Traffic:
    """The traffic, shared by as many engines as keep up, also where passes take longer."""
    longer = 1 + deployment.error
    while load > 1 and traffic.engines < MOST_ENGINES:
        engines = min(ceil(traffic.engines * load), MOST_ENGINES)
        traffic = replace(traffic, engines=engines)
        requests, setups = deployment.requests(traffic), deployment.best_setups()
        load = deployment.serve(requests, setups, longer).engines
    return traffic


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
    setups, name = deployment.best_setups(), f"{OTHER_FORMAT} {deployment.kv_dtype}"
    launch = deployment.launch.changed(flags_of(setups.prefill, setups.decode))
    return [_outcome(deployment, requests, name, launch, setups)]


def of_another_gpu(deployment: Deployment) -> bool:
    """Whether all prices come from a table of another GPU, which no plug-in takes."""
    match = deployment.passes.attention.dispatcher.match
    return deployment.measured is None and match is Match.ARCHITECTURE


def prices_decode(deployment: Deployment) -> bool:
    """Whether decodes priced so far count the attention that the engine runs in them."""
    return deployment.model is not None or "decode" not in deployment.passes.attention.unpriced


def notes_on(deployment: Deployment, traffic: Traffic) -> Iterator[str]:
    """What the figures leave out, and what to measure."""
    yield from _notes_on_passes(deployment)
    whole = deployment.model is not None
    if whole and traffic.trace is not None:
        yield (
            "times to first token were 52% too low to 5% too high on 12 traces in an engine"
            if deployment.heads == 16
            else f"no trace was measured with {deployment.heads} heads on a GPU"
        )
    if deployment.tp > (deployment.measured.key.get("tp_size", 1) if deployment.measured else 1):
        error = ": TP2's prefills were priced 20% too low, GLM-5's tokens at TP8 16%"
        yield f"all-reduce is not counted{error if whole else ''}"
    if deployment.dp > 1 and deployment.launch.engine == "sglang":
        yield "the plug-in leaves the kernels and passes of data-parallel attention to SGLang"
    if not deployment.launch.graphs or deployment.chunk > GRAPH_SIZES[-1]:
        yield "passes without a graph wait for their host: they take longer than is counted here"
    if deployment.scheduler.next_n > 1:
        yield (
            f"{deployment.scheduler.acceptance:.0%} of drafted tokens are assumed to be accepted "
            "(--acceptance); drafting itself is not counted"
        )
    if traffic.trace is None and traffic.log is None:
        yield (
            "each measured batch counts the same; give --trace for your own traffic, which also "
            "says bf16 or fp8"
        )


def notes_on_plugin(deployment: Deployment) -> Iterator[str]:
    """How sure what it adds is."""
    if deployment.model is not None and deployment.heads == 16:
        yield (
            "on 12 traces in an engine the plug-in's gain in time to first token lay between 17 "
            "percentage points below and 38 above its estimate"
        )
    if deployment.tp > 2:
        yield "the plug-in never ran with more than two ranks (TP2), and figures are of one"


def _notes_on_passes(deployment: Deployment) -> Iterator[str]:
    """Where the prices of passes come from, and what that means."""
    setting, measured = deployment.setting, deployment.measured
    if measured is None:
        key = setting.device.name, setting.profile.name, f"{setting.heads} heads"
        where = ", ".join((*key, deployment.kv_dtype))
        yield f"whole passes were not measured for {where}: attention alone is compared"
        if deployment.launch.engine == "vllm":
            yield "a trace's batches are those of SGLang's scheduler"
        else:
            yield "a start of the engine with the plug-in measures them; or give --pass-times"
        if of_another_gpu(deployment):
            yield (
                "times are another GPU's, whose table the plug-in does not take, and may be "
                "several times off: `nsa-tune run` on this one"
            )
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
