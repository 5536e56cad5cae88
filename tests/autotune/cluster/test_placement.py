"""Which workers Ray is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from nsa_tune import DeviceMissing, UsageError
from nsa_tune.autotune.cluster.placement import check_device, groups_of


def node(**resources: float) -> dict[str, Any]:
    return {"NodeID": "ab" * 28, "Resources": {**resources}}


def gpus(model: str, count: float = 8.0) -> dict[str, Any]:
    return node(CPU=64.0, GPU=count, **{f"accelerator_type:{model}": 1.0})


def test_each_gpu_gets_a_worker_wherever_ray_has_room() -> None:
    (group,) = groups_of({"a": gpus("H100"), "b": node(CPU=8.0), "c": gpus("H100", 4)}, "auto")

    assert (group.name, group.device, group.workers) == ("H100", "cuda:0", 12)
    assert group.options == {"num_gpus": 1, "num_cpus": 1, "scheduling_strategy": "SPREAD"}


def test_gpus_of_several_models_are_asked_for_by_model() -> None:
    found = groups_of({"a": gpus("H100"), "b": gpus("H200"), "d": gpus("H100")}, "cuda")

    assert [(group.workers, group.options["accelerator_type"]) for group in found] == [
        (16, "H100"), (8, "H200")
    ]  # fmt: skip


def test_gpus_that_ray_does_not_know_are_taken() -> None:
    (group,) = groups_of({"a": node(GPU=2.0)}, "all")

    assert (group.name, group.workers) == ("unknown GPU", 2)


def test_a_sample_takes_so_many_of_each_model() -> None:
    nodes = {"a": gpus("H100"), "b": gpus("H200", 2), "c": gpus("H100")}

    assert [group.workers for group in groups_of(nodes, "all", sample=3)] == [3, 2]


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_gpus_each_node_is_one_device(device: str) -> None:
    nodes = {"a": node(CPU=4.0), "idle": node(), "c": node(CPU=8.0)}

    found = groups_of(nodes, device)

    assert [(group.name, group.device, group.options["num_cpus"]) for group in found] == [
        ("a", "cpu", 4), ("c", "cpu", 8)
    ]  # fmt: skip
    assert found[0].options["scheduling_strategy"].node_id == "ab" * 28
    assert [group.name for group in groups_of(nodes, device, sample=1)] == ["a"]


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
        groups_of({"a": node()}, device)


def test_a_device_that_names_one_gpu_is_refused() -> None:
    for device in ("auto", "cpu", "cuda", "all"):
        check_device(device)
    with pytest.raises(UsageError, match="--device cuda:1 names one GPU, but Ray chooses them"):
        check_device("cuda:1")
