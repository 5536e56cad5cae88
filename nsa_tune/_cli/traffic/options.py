"""Options of `replay` and `advise --trace`: the simulated scheduler, and SGLang's release."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._errors import UsageError
from nsa_tune.autotune.workload.simulation import SchedulerConfig
from nsa_tune.engines.sglang.releases import RELEASES, Release, checked, release_of
from nsa_tune.reports.replay.rest import RestOfPass


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Options of the simulated scheduler."""

    requests: Annotated[
        int | None,
        typer.Option("--requests", min=1, help="Requests of the trace to replay. Default: all."),
    ] = None
    speed: Annotated[
        float,
        typer.Option("--speed", min=1e-6, help="How much faster than in the trace requests come."),
    ] = 1.0
    chunk: Annotated[
        int,
        typer.Option("--chunk", min=1, help="Most new tokens of a prefill (chunked_prefill_size)."),
    ] = 8192
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, help="Most requests that run at once.")
    ] = 64
    cache_tokens: Annotated[
        int,
        typer.Option("--cache-tokens", min=0, help="Tokens that the prefix cache holds."),
    ] = 2**20
    next_n: Annotated[
        int,
        typer.Option(
            "--next-n", min=1, help="Tokens of a sequence in a decode pass; 1 without drafts."
        ),
    ] = 1
    acceptance: Annotated[
        float,
        typer.Option("--acceptance", min=0, max=1, help="Share of drafted tokens accepted."),
    ] = 0.7
    dp: Annotated[
        int,
        typer.Option(
            "--dp",
            min=1,
            help="Ranks of data-parallel attention. Of N ranks one is simulated: every N-th "
            "request, and an N-th of the chunk and of the running requests.",
        ),
    ] = 1
    graph_tokens: Annotated[
        int | None,
        typer.Option(
            "--graph-tokens",
            min=0,
            help="New tokens up to which a prefill runs as a CUDA graph; 0: none. Default: the "
            "engine's.",
        ),
    ] = None
    rest: Annotated[
        list[Path] | None,
        typer.Option(
            "--rest",
            help="File that says what a pass takes besides attention. May be given once for each "
            "KV format.",
        ),
    ] = None
    pass_times: Annotated[
        list[Path] | None,
        typer.Option(
            "--pass-times",
            help="Times of whole passes that the plug-in measured in an engine. Default: the "
            "newest that it has kept for this GPU, model, heads and KV format. May be given once "
            "for each KV format.",
        ),
    ] = None

    @property
    def scheduler(self) -> SchedulerConfig:
        """The scheduler of one rank."""
        return SchedulerConfig(
            chunk_tokens=max(self.chunk // self.dp, 1),
            next_n=self.next_n,
            acceptance=self.acceptance,
            max_running=max(self.max_running // self.dp, 1),
            cache_tokens=self.cache_tokens,
            prefill_rate=SchedulerConfig().prefill_rate / self.dp,
        )

    def model(self, kv_dtype: str) -> RestOfPass | None:
        """The model of the rest of a pass for a format of the KV pool, if any is given.

        Raises:
            UsageError: as `RestOfPass.read_for`.
        """
        return RestOfPass.read_for(self.rest or (), kv_dtype)

    def graphs(self, release: Release) -> int:
        """New tokens up to which a prefill runs as a graph: what is asked for, or the engine's
        own, which it never lets pass the chunk."""
        if self.graph_tokens is not None:
            return self.graph_tokens
        return min(release.graph_tokens, max(self.chunk // self.dp, 1))

    def settings(self) -> dict[str, float]:
        """What was simulated, for a document."""
        scheduler = self.scheduler
        return {
            "speed": self.speed,
            "chunk": scheduler.chunk_tokens,
            "max_running": scheduler.max_running,
            "cache_tokens": scheduler.cache_tokens,
            "next_n": scheduler.next_n,
            "acceptance": scheduler.acceptance,
            "dp": self.dp,
        }


def release_named(version: str | None) -> Release:
    """The release of that version, or the newest known.

    Raises:
        UsageError: when it is unknown.
    """
    release = release_of(version or ".".join(map(str, RELEASES[-1].last)))
    if release is None:
        raise UsageError(f"SGLang {version} is unknown; known releases: {checked()}")
    return release
