"""Which workers Ray is asked for."""

from __future__ import annotations

import pytest

from nsa_tune import DeviceMissing, UsageError
from nsa_tune.autotune.cluster.placement import Node, WorkerGroup, check_device, groups_of
from nsa_tune.autotune.cluster.survey import NodeFacts, facts_of_this_node

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def gpus(name: str, model: str, count: int = 8, driver: str = "580.1") -> Node:
    return Node(name, name, count, 64, NodeFacts("0.1.0", (model,) * count, driver, "CPU Xeon"))


def cpus(name: str, count: int = 8, model: str = "CPU Xeon") -> Node:
    return Node(name, name, 0, count, NodeFacts("0.1.0", (), "", model))


def test_each_gpu_gets_a_worker_wherever_ray_has_room() -> None:
    assert groups_of([gpus("a", H100), cpus("b"), gpus("c", H100, 4)], "auto") == [
        WorkerGroup(f"{H100}, driver 580.1", "cuda:0", 12, gpus=1, cpus=1)
    ]


def test_gpus_of_different_types_stay_on_their_nodes() -> None:
    nodes = [gpus("a", H100), gpus("b", H200), gpus("c", H100, driver="570.2"), gpus("d", H100)]

    found = groups_of(nodes, "cuda")

    assert [(group.type, group.workers, group.nodes) for group in found] == [
        (f"{H100}, driver 580.1", 16, ("a", "d")),
        (f"{H200}, driver 580.1", 8, ("b",)),
        (f"{H100}, driver 570.2", 8, ("c",)),
    ]


def test_a_sample_takes_so_many_of_each_type() -> None:
    nodes = [gpus("a", H100), gpus("b", H200, 2), gpus("c", H100)]

    assert [group.workers for group in groups_of(nodes, "all", sample=3)] == [3, 2]


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_gpus_each_node_is_one_device(device: str) -> None:
    nodes = [cpus("a", 4), cpus("b"), cpus("idle", 0), cpus("c", model="CPU EPYC")]

    found = groups_of(nodes, device)

    assert [(group.device, group.cpus, group.nodes) for group in found] == [
        ("cpu", 4, ("a",)), ("cpu", 8, ("b",)), ("cpu", 8, ("c",))
    ]  # fmt: skip
    assert [group.nodes for group in groups_of(nodes, device, sample=1)] == [("a",), ("c",)]


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cuda", "no node with a GPU"),
        ("all", "no node with a GPU"),
        ("auto", "no node of the Ray cluster offers a CPU"),
    ],
)
def test_a_cluster_without_such_a_device_is_one_sentence(device: str, text: str) -> None:
    with pytest.raises(DeviceMissing, match=text):
        groups_of([cpus("a", 0)], device)


def test_a_device_that_names_one_gpu_is_refused() -> None:
    for device in ("auto", "cpu", "cuda", "all"):
        check_device(device)
    with pytest.raises(UsageError, match="--device cuda:1 names one GPU, but Ray chooses them"):
        check_device("cuda:1")


def test_a_node_says_what_it_has() -> None:
    facts = facts_of_this_node()

    assert facts.version
    assert facts.cpu.startswith("CPU")
