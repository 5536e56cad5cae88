"""Options that say whose devices a run measures on: this host's, or a Ray cluster's."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_tune._errors import ExtraMissing, UsageError

if TYPE_CHECKING:
    from nsa_tune.autotune.runner.run import RunRequest
    from nsa_tune.autotune.worker.executor import Launcher


class ExecutorKind(StrEnum):
    """Whose devices measure."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Options that choose the executor."""

    executor: Annotated[
        ExecutorKind,
        typer.Option("--executor", help="Measure on devices of this host, or of a Ray cluster."),
    ] = ExecutorKind.LOCAL
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="The Ray cluster: HOST:PORT, auto for the one on this host, local for a new one.",
        ),
    ] = None
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            min=1,
            help="With --executor ray: measure on this many devices of each type only.",
        ),
    ] = None


def launcher_for(options: ExecutorOptions, request: RunRequest) -> Launcher | None:
    """The launcher of a Ray cluster, without connecting to it; None for devices of this host.

    Raises:
        UsageError: for options that do not go together.
        ExtraMissing: when Ray is not installed.
    """
    if options.executor is ExecutorKind.LOCAL:
        for name, value in (("--address", options.address), ("--sample", options.sample)):
            if value is not None:
                raise UsageError(f"{name} is for a cluster: add --executor ray")
        return None
    if not request.isolate:
        raise UsageError("--no-isolate is for devices of this host: leave out --executor ray")
    if importlib.util.find_spec("ray") is None:
        raise ExtraMissing.of("--executor ray", "ray")
    # Imported only here: it takes a second.
    from nsa_tune.autotune.cluster.launcher import RayLauncher

    return RayLauncher(options.address, request.device, options.sample, request.deadlines)
