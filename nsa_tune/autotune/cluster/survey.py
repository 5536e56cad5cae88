"""The survey of a cluster: what each node says of itself before workers are placed."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_tune import __version__
from nsa_tune.backend.hardware import detect, nvml


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says of itself."""

    version: str
    """Of the nsa-tune that is installed there."""
    gpus: tuple[str, ...]
    """Names of its GPUs, as the driver reports them."""
    driver: str
    """Version of the GPU driver; empty without one."""
    cpu: str


def facts_of_this_node() -> NodeFacts:
    """Run as a Ray task on each node; it needs no GPU and loads no torch."""
    return NodeFacts(__version__, tuple(nvml.gpu_names()), nvml.driver_version(), detect.cpu_name())
