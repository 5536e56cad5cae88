"""An engine with given flags, and the traffic that it is to serve."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.autotune.workload.arrivals import Arrival, arrivals
from nsa_tune.autotune.workload.requests import read_requests
from nsa_tune.autotune.workload.simulation import SchedulerConfig
from nsa_tune.backend.baselines import DEFAULT_BASELINE, VLLM_0_33_0
from nsa_tune.backend.baselines.sglang_0_5_23 import V4_GRAPHS
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.profiles import REUSING, profile_of
from nsa_tune.engines.decision_log import batches_of
from nsa_tune.engines.sglang import releases
from nsa_tune.engines.sglang.costs import untaken, without_unsupported
from nsa_tune.engines.vllm import releases as vllm
from nsa_tune.reports.traffic.attention import (
    DECODE_FLAG,
    DEFAULT,
    FORCE_MQA,
    PREFILL_FLAG,
    AttentionPrices,
)
from nsa_tune.reports.traffic.engine_passes import passes_for
from nsa_tune.reports.traffic.launch import Launch
from nsa_tune.reports.traffic.memory import memory_of
from nsa_tune.reports.traffic.pass_prices import PassPrices, PriceList
from nsa_tune.reports.traffic.served import Served, Setups, seconds_of, served

SURE = 0.03  # part of its passes' time that a flag must save to be advised
_VLLM_STEERED = frozenset({"flashmla_sparse", "flashmla_kv"})
_MOST_RUNNING = 512  # requests at once where nothing is given: SGLang's largest decode graph
_POOL_TOKENS = 2**20  # tokens of the KV pool where memory is not known
_NEWEST = ".".join(map(str, releases.RELEASES[-1].last))
_OVERLAPPED, _BETWEEN_S = (0, 5, 23), (0.003, 0.0002)
"""From one pass to the next, before and since a release: 0.5.17 took 2.8 to 3.6 ms, 0.5.23 0.2."""
_SCALED = 0.18  # one in four traces predicted from engines of a few layers took longer by more
_SAMPLED = 1000  # requests tell which flags are fastest
_read = lru_cache(maxsize=1)(read_requests)  # deployments serve the same trace


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an engine is to serve."""

    trace: Path | None = None
    log: Path | None = None
    requests: int | None = None
    speed: float = 1.0
    engines: int = 1  # equal engines that take a trace's requests in turn; one of them is priced

    @property
    def name(self) -> str:
        path = self.trace or self.log
        return "the batches that were measured" if path is None else path.name


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What of an engine its flags do not say."""

    version: str | None = None
    pass_times: Path | None = None  # measured passes to use instead of those that are kept or ship
    acceptance: float = 0.7


class Deployment:
    """An engine with given flags: its parallelism, memory, scheduler and prices."""

    def __init__(
        self, open_dispatcher: Callable[[int, str], Dispatcher], launch: Launch, model: str, *,
        heads: int | None = None, kv_dtype: str | None = None,
        settings: EngineSettings | None = None,
    ) -> None:  # fmt: skip
        """Open what prices `model`. `open_dispatcher` opens its table by local heads and KV format;
        where these are None the flags in use say them, or it is all heads and bf16.
        UsageError when options and flags contradict each other, NoTunedData without a table.
        """
        settings = settings or EngineSettings()
        self.served = model
        shapes, selecting = REUSING.get(model, (model, None))
        if (family := profile_of(shapes).family) != "dsa":
            more = f". {V4_GRAPHS}" * (launch.engine == "sglang" and family == "v4")
            text = f"passes of {model} are not priced: `nsa-tune report` says what attention takes"
            raise UsageError(f"{text}{more}")
        all_heads = profile_of(shapes).heads
        asked = _agreed("--kv-dtype", kv_dtype, launch.kv_dtype, "--kv-cache-dtype")
        self.kv_is_given, self.kv_dtype = asked is not None, asked or "bf16"
        self.dp, tp, tp_flag = launch.dp_attention, launch.number("tp"), launch.name("tp")
        if tp is not None and all_heads % tp:
            raise UsageError(f"{tp_flag} {tp} does not divide {model}'s {all_heads} heads")
        # Ranks of DP attention have all heads; SGLang counts them among TP's.
        local, said = (all_heads, "--dp") if self.dp > 1 else (tp and all_heads // tp, "--tp")
        self.heads = _agreed("--heads", heads, local, said) or all_heads
        self.tp = tp or max(self.dp if launch.engine == "sglang" else 1, all_heads // self.heads)
        if tp is None and self.tp > 1:
            launch = launch.changed({tp_flag: str(self.tp)})
        if kv_dtype is not None and launch.kv_dtype is None:
            launch = launch.changed(launch.kv_flag(kv_dtype))
        self.launch, self.version = launch, settings.version or _NEWEST
        vllm_release = f"vLLM {settings.version or VLLM_0_33_0.name.split()[-1]}"
        self.release = f"SGLang {self.version}" if launch.engine == "sglang" else vllm_release
        dispatcher = open_dispatcher(self.heads, self.kv_dtype)
        self.passes = opened(dispatcher, launch, settings, selecting)
        self.prices, self.setting = PriceList(self.passes), self.passes.attention.setting
        device, shapes = self.setting.device.name, self.setting.profile.name
        self.where = f"{device}, {shapes}, {self.heads} heads, {self.kv_dtype}"
        self.model, self.measured = self.passes.model, self.passes.measured
        """Prices whole passes, fitted to measured ones; None where attention alone is priced."""
        sources = [dispatcher.source, *([self.measured.source] if self.measured else [])]
        self.source = re.sub(r"T\d\d:\d\d:[^;]*", "", "; ".join(sources))
        layers = 0 if self.measured is None else self.measured.layers
        self.exact = self.model is not None and 2 * layers > self.setting.sharing
        """Whether whole passes are those of a whole model, and not of a few layers."""
        self.error = max(self.model.error(), _SCALED * (not self.exact)) if self.model else 0.0
        """What one in four measured passes, or traces, is off by more than."""
        self.memory = memory_of(
            self.setting, model, tp=self.tp, dp=self.dp, static_fraction=launch.fraction
        )
        self.fits = self.memory is None or self.memory.fits
        """Whether it fits into memory, as far as that is known."""
        self._requests: dict[Traffic, list[Arrival]] = {}
        self.chunk = launch.number("chunk") or 8192
        self.scheduler = SchedulerConfig(
            chunk_tokens=max(self.chunk // self.dp, 1),
            next_n=launch.number("drafts") or 1,
            acceptance=settings.acceptance,
            max_running=max((launch.number("running") or _MOST_RUNNING) // self.dp, 1),
            pool_tokens=_POOL_TOKENS if self.memory is None else max(self.memory.pool_tokens, 1),
        )

    def flags(self, *, extend: bool) -> list[str]:
        """Setups of one flag for a kind of pass."""
        names = (PREFILL_FLAG, FORCE_MQA) if extend else (DECODE_FLAG,)
        return [name for name in self.passes.setups if name.startswith(names)]

    def serve(
        self, requests: Sequence[Arrival], setups: Setups, factor: float = 1.0, *,
        keep: bool = False,
    ) -> Served:  # fmt: skip
        """Serve what `count` or `requests` gave; tokens a second are those of all ranks. With
        `keep` later runs take the prices of this one."""
        # Passes that share a price have that of the first: what was served before must not matter.
        only = DEFAULT, *setups
        prices = self.prices if keep else PriceList(self.passes, dict(self.prices.shapes), only)
        result = served(requests, self.scheduler, prices, setups, factor=factor)
        return replace(result, output_tokens_per_s=self.dp * result.output_tokens_per_s)

    def best_setups(self) -> Setups:
        """By the passes counted: for each kind the flag that surely saves time, else none."""
        flags = (self.best_flag(extend=extend) for extend in (True, False))
        return Setups(*(best if saved > SURE else DEFAULT for best, saved in flags))

    def best_flag(self, *, extend: bool) -> tuple[str, float]:
        """The flag that saves most of the counted passes' time, and what part; `DEFAULT` and 0."""
        seconds = {
            name: seconds_of(self.prices, name, extend=extend)
            for name in (DEFAULT, *self.flags(extend=extend))
        }
        best = min(seconds, key=seconds.__getitem__)
        return best, 1 - seconds[best] / seconds[DEFAULT] if seconds[DEFAULT] else 0.0

    def with_chunk(self, chunk: int) -> Deployment:
        """The same with another chunk size; it shares the prices."""
        other = copy(self)
        flag = {self.launch.name("chunk"): str(chunk)}
        other.chunk, other.launch = chunk, self.launch.changed(flag)
        other.scheduler = replace(self.scheduler, chunk_tokens=max(chunk // self.dp, 1))
        return other

    def count(self, traffic: Traffic) -> list[Arrival]:
        """Count the traffic's passes in the price list; gives `requests` of a trace."""
        if traffic.trace is None:
            for batch, weight in self._batches(traffic):
                self.prices.of_batch(batch).count += round(weight)
            return []
        requests, self._fastest = self.requests(traffic), Setups(DEFAULT, DEFAULT)
        *compared, _ = self.passes.setups  # all but the plug-in
        for part, setups in ((requests[:_SAMPLED], compared), (requests, [])):
            # Which passes run depends on their times. Those with the fastest flags are compared, so
            # that a flag has one price, in use or not.
            self.prices = PriceList(self.passes, setups=setups)
            self.recount(part)
        return requests

    def recount(self, requests: Sequence[Arrival]) -> None:
        """Count only the passes of `requests`, with the flags that were fastest so far."""
        for shape in self.prices.shapes.values():
            shape.count = 0
        served(requests, self.scheduler, self.prices, self._fastest, count=True)
        self._fastest = Setups(*(self.best_flag(extend=extend)[0] for extend in (True, False)))

    def requests(self, traffic: Traffic) -> list[Arrival]:
        """What one engine, and of its data-parallel ranks one, gets of a trace."""
        assert traffic.trace is not None
        if traffic not in self._requests:
            served_here = _read(traffic.trace)[: traffic.requests : traffic.engines * self.dp]
            faster = (r._replace(arrival_s=r.arrival_s / traffic.speed) for r in served_here)
            self._requests[traffic] = list(arrivals(faster, self.scheduler.pool_tokens))
        return self._requests[traffic]

    def _batches(self, traffic: Traffic) -> Iterable[tuple[Batch, float]]:
        dispatcher = self.passes.attention.dispatcher
        if traffic.log is not None:
            return batches_of(traffic.log, self.setting)
        if self.measured is not None:
            return [(batch, 1.0) for batch in dict.fromkeys(p.batch for p in self.measured.passes)]
        policy = dispatcher.policies.get("prefill")
        if policy is None or not policy.measured:
            raise NoTunedData(f"there is nothing to advise from: {dispatcher.source}")
        return [(batch, 1.0) for batch in policy.measured]


def _agreed(option: str, asked: Any, flagged: Any, flag: str) -> Any:
    """The value that an option and a flag give, which must not differ."""
    if asked is not None and flagged is not None and asked != flagged:
        raise UsageError(f"{option} {asked} contradicts {flag} in --flags, which means {flagged}")
    return asked if asked is not None else flagged


def opened(
    dispatcher: Dispatcher, launch: Launch, settings: EngineSettings, selecting: int | None = None
) -> PassPrices:
    """Prices by `dispatcher`'s table, NoTunedData when it has none; `selecting` layers select keys
    (None: all). UsageError for what is not priced: a release, a model, a flag's kernel."""
    layers = dispatcher.setting.sharing
    share = min((selecting or layers) / layers, 1.0)
    if launch.engine == "vllm":
        if settings.version is not None and vllm.release_of(settings.version) is None:
            raise UsageError(f"{settings.version} is no known vLLM: {vllm.checked()}")
        attention = AttentionPrices(
            dispatcher, "vllm", VLLM_0_33_0, indexer_share=share, steered=_VLLM_STEERED
        )
        return PassPrices(attention, None, graph_tokens=0, given=launch.answers)
    version = settings.version or _NEWEST
    release = releases.release_of(version)
    if release is None:
        raise UsageError(f"{version} is no known SGLang: {releases.checked()}")
    steered = release.prefill_impls.get(dispatcher.setting.layout, frozenset())
    if dispatcher.table is not None:
        dispatcher = without_unsupported(dispatcher, untaken(steered))
    attention = AttentionPrices(
        dispatcher, "sglang", DEFAULT_BASELINE, indexer_share=share,
        own_copies=any(symbol.name == "read_back" for symbol in release.symbols),
        steered=steered,
    )  # fmt: skip
    graph_tokens = release.graph_tokens if launch.graphs else 0
    measured = passes_for(dispatcher.setting, settings.pass_times)
    return PassPrices(
        attention, measured, graph_tokens=graph_tokens, given=launch.answers,
        between_s=_BETWEEN_S[release.last >= _OVERLAPPED], ranks=launch.dp_attention,
    )  # fmt: skip
