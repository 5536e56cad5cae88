"""Placement: which workers Ray is asked for. Where they run is Ray's decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nsa_tune._errors import DeviceMissing, UsageError
from nsa_tune.autotune.bench.device_names import ALL

_TYPE = "accelerator_type:"
"""What Ray calls a node's GPU model begins with this among the node's resources."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers that Ray is asked for in the same way."""

    name: str
    """Of their device, for people."""
    device: str
    """What a worker measures on, as `Setup.device` has it: "cpu", or the GPU that Ray gives it."""
    workers: int
    options: Mapping[str, Any]
    """Of the actor: what it reserves, and where."""


def check_device(device: str) -> None:
    """Accept "auto"; "cpu", which ignores GPUs; "cuda" and "all", which insist on them.

    Raises:
        UsageError: for a device that names one GPU.
    """
    if device not in ("auto", "cpu", "cuda", ALL):
        raise UsageError(
            f"--device {device} names one GPU, but Ray chooses them; use auto, cpu, cuda or all"
        )


def groups_of(
    nodes: Mapping[str, Mapping[str, Any]], device: str, sample: int | None = None
) -> list[WorkerGroup]:
    """The workers to ask Ray for: one for each GPU; in a cluster without GPUs, one for each node.

    Args:
        nodes: what `ray.nodes()` says of each, by a name that no other has.
        device: as `check_device` accepts it.
        sample: workers of each GPU model, or nodes, at most; None takes all.

    Raises:
        DeviceMissing: when the cluster has no such device.
    """
    with_gpus = [node["Resources"] for node in nodes.values() if node["Resources"].get("GPU")]
    if device == "cpu" or (device == "auto" and not with_gpus):
        return _cpu_groups(nodes, sample)
    if not with_gpus:
        raise DeviceMissing("the Ray cluster has no node with a GPU; see `ray status`")
    return _gpu_groups(with_gpus, sample)


def _gpu_groups(resources: Sequence[Mapping[str, float]], sample: int | None) -> list[WorkerGroup]:
    """A group for each model. They spread over the nodes: a sample of one node's GPUs would not
    show what differs between hosts."""
    counts: dict[str, int] = {}
    for own in resources:
        kind = next((name.removeprefix(_TYPE) for name in own if name.startswith(_TYPE)), "")
        counts[kind] = counts.get(kind, 0) + int(own["GPU"])
    options = {"num_gpus": 1, "num_cpus": 1, "scheduling_strategy": "SPREAD"}
    # With a single model any node will do, one that replaces a lost node as well.
    return [
        WorkerGroup(
            kind or "unknown GPU", "cuda:0", count if sample is None else min(sample, count),
            {**options, "accelerator_type": kind} if kind and len(counts) > 1 else options,
        )
        for kind, count in counts.items()
    ]  # fmt: skip


def _cpu_groups(nodes: Mapping[str, Mapping[str, Any]], sample: int | None) -> list[WorkerGroup]:
    """One worker a node: a CPU is one device, and a second worker would disturb the first."""
    cpus = {name: int(node["Resources"].get("CPU", 0)) for name, node in nodes.items()}
    fit = [name for name, count in cpus.items() if count]
    if not fit:
        raise DeviceMissing("no node of the Ray cluster offers a CPU; see `ray status`")
    return [
        WorkerGroup(
            name, "cpu", 1,
            {
                "num_gpus": 0, "num_cpus": cpus[name],
                "scheduling_strategy": NodeAffinitySchedulingStrategy(
                    nodes[name]["NodeID"], soft=False
                ),
            },
        )
        for name in fit[:sample]
    ]  # fmt: skip
