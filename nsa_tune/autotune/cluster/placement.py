"""Placement: which workers Ray is asked for. Where they run is Ray's decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_tune._errors import DeviceMissing, UsageError
from nsa_tune.autotune.bench.device_names import ALL
from nsa_tune.autotune.cluster.survey import NodeFacts


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster."""

    id: str
    """As Ray has it."""
    name: str
    """For people; no two nodes have the same one."""
    gpus: int
    """That Ray may hand out."""
    cpus: int
    """That Ray may hand out."""
    facts: NodeFacts

    @property
    def gpu_type(self) -> str:
        """Model of its GPUs, with the driver: workers of one type measure for one table."""
        models = " and ".join(dict.fromkeys(self.facts.gpus)) or "unknown GPU"
        return f"{models}, driver {self.facts.driver}" if self.facts.driver else models


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers that Ray may place on any of some nodes."""

    type: str
    """Of their device, for people."""
    device: str
    """What a worker measures on, as `Setup.device` has it: "cpu", or the GPU that Ray gives it."""
    workers: int
    gpus: int
    """That each worker reserves."""
    cpus: int
    """That each worker reserves."""
    nodes: tuple[str, ...] = ()
    """Ids of the nodes that are good for it; none means any."""


def check_device(device: str) -> None:
    """Accept "auto"; "cpu", which ignores GPUs; "cuda" and "all", which insist on them.

    Raises:
        UsageError: for a device that names one GPU.
    """
    if device not in ("auto", "cpu", "cuda", ALL):
        raise UsageError(
            f"--device {device} names one GPU, but Ray chooses them; use auto, cpu, cuda or all"
        )


def groups_of(nodes: Sequence[Node], device: str, sample: int | None = None) -> list[WorkerGroup]:
    """The workers to ask Ray for: one for each GPU; in a cluster without GPUs, one for each node.

    Args:
        device: as `check_device` accepts it.
        sample: workers of each device type at most; None takes all.

    Raises:
        DeviceMissing: when the cluster has no such device.
    """
    with_gpus = [node for node in nodes if node.gpus]
    if device == "cpu" or (device == "auto" and not with_gpus):
        return _cpu_groups(nodes, sample)
    if not with_gpus:
        raise DeviceMissing("the Ray cluster has no node with a GPU; see `ray status`")
    return _gpu_groups(with_gpus, sample)


def _gpu_groups(nodes: Sequence[Node], sample: int | None) -> list[WorkerGroup]:
    types = list(dict.fromkeys(node.gpu_type for node in nodes))
    groups = []
    for kind in types:
        ours = [node for node in nodes if node.gpu_type == kind]
        count = sum(node.gpus for node in ours)
        # With a single type any node will do, one that replaces a lost node as well.
        good = tuple(node.id for node in ours) if len(types) > 1 else ()
        workers = count if sample is None else min(sample, count)
        groups.append(WorkerGroup(kind, "cuda:0", workers, gpus=1, cpus=1, nodes=good))
    return groups


def _cpu_groups(nodes: Sequence[Node], sample: int | None) -> list[WorkerGroup]:
    """One worker a node: a CPU is one device, and a second worker would disturb the first."""
    fit = [node for node in nodes if node.cpus]
    if not fit:
        raise DeviceMissing("no node of the Ray cluster offers a CPU; see `ray status`")
    groups = []
    for kind in dict.fromkeys(node.facts.cpu for node in fit):
        ours = [node for node in fit if node.facts.cpu == kind]
        groups += [
            WorkerGroup(kind, "cpu", 1, gpus=0, cpus=node.cpus, nodes=(node.id,))
            for node in ours[:sample]
        ]
    return groups
