"""Opens what prices the passes of one engine: a table, measured passes, and what the flags say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from nsa_tune._errors import UsageError
from nsa_tune.backend.baselines import SGLANG_0_5_23, VLLM_0_33_0
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.engines.sglang import releases
from nsa_tune.engines.sglang.costs.once import offered
from nsa_tune.engines.vllm import releases as vllm
from nsa_tune.reports.analysis.selection import TableFilter, select_tables
from nsa_tune.reports.traffic.attention import Answers, AttentionPrices, lent_policies, with_table
from nsa_tune.reports.traffic.engine_passes import EnginePasses, passes_for
from nsa_tune.reports.traffic.pass_prices import PassPrices

_VLLM_STEERED = frozenset({"flashmla_sparse", "flashmla_kv"})


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What of an engine the price of a pass depends on."""

    engine: str = "sglang"
    version: str | None = None
    """None: the newest known."""
    graphs: bool = True
    """Whether prefills run as CUDA graphs."""
    given: Answers = field(default_factory=lambda: MappingProxyType({}))
    """What the flags in use answer, by question."""
    indexer_layers: int | None = None
    """Layers that select keys; the others reuse a selection. None: all."""
    pass_times: Path | None = None
    """Measured passes to use instead of those that are kept or ship."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Prices, and where they come from."""

    prices: PassPrices
    lent: Mapping[str, str]
    """For each point whose times are another table's, which."""

    @property
    def measured(self) -> EnginePasses | None:
        """The measured passes."""
        return self.prices.measured


def opened(dispatcher: Dispatcher, settings: EngineSettings, database: Path | None) -> Opened:
    """Prices by `dispatcher`'s table.

    Raises:
        NoTunedData: when it has none.
        UsageError: for an unknown release, or pass times of another engine.
    """
    dispatcher = with_table(dispatcher)
    if dispatcher.setting.profile.family == "v4":
        raise UsageError(
            "passes of DeepSeek V4 are not priced: no engine was measured with it; "
            "`nsa-tune report` shows what its kernels take"
        )
    sglang = settings.engine == "sglang"
    release = sglang_release(settings.version) if sglang else None
    if not sglang:
        _check_vllm(settings.version)
    dispatcher = offered(dispatcher) if sglang else dispatcher
    setting = dispatcher.setting
    lent = lent_policies(
        dispatcher, select_tables(database, TableFilter(setting.device.name, setting.profile.name))
    )
    steered = _VLLM_STEERED if release is None else release.prefill_impls.get(setting.layout)
    attention = AttentionPrices(
        dispatcher,
        settings.engine,
        SGLANG_0_5_23 if sglang else VLLM_0_33_0,
        own_copies=release is not None and any(one.name == "read_back" for one in release.symbols),
        lent={name: policy for name, (policy, _) in lent.items()},
        indexer_layers=settings.indexer_layers,
        steered=steered or frozenset(),
    )
    graph_tokens = release.graph_tokens if release is not None and settings.graphs else 0
    return Opened(
        PassPrices(
            attention,
            passes_for(setting, settings.pass_times) if sglang else None,
            graph_tokens=graph_tokens,
            given=settings.given,
        ),
        {
            name: f"{table.source}, which has {table.key.heads} heads and {table.key.kv_layout}"
            for name, (_, table) in lent.items()
        },
    )


def sglang_release(version: str | None) -> releases.Release:
    """The release of that version, or the newest known.

    Raises:
        UsageError: when it is unknown.
    """
    release = releases.release_of(version or ".".join(map(str, releases.RELEASES[-1].last)))
    if release is None:
        raise UsageError(f"SGLang {version} is unknown; known releases: {releases.checked()}")
    return release


def _check_vllm(version: str | None) -> None:
    if version is not None and vllm.release_of(version) is None:
        raise UsageError(f"vLLM {version} is unknown; known releases: {vllm.checked()}")
