"""What a launcher says of addresses, without a cluster."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import ray

from nsa_tune import MachineUnfit, UsageError
from nsa_tune.autotune.cluster.launcher import RayLauncher
from nsa_tune.autotune.worker.messages import Setup

SETUP = Setup("auto", "tiny", None, "fp8", (), "nsa_tune.backend.points:POINTS")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that Ray is asked to connect to; it finds no cluster at any."""
    addresses: list[str] = []

    def init(address: str, **options: Any) -> None:
        addresses.append(address)
        raise ConnectionError("there is no cluster")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return addresses


def refused(address: str | None, device: str = "auto") -> str:
    launcher, stdout = RayLauncher(address, device), sys.stdout
    with pytest.raises((MachineUnfit, UsageError)) as error:
        launcher.launch(SETUP)
    launcher.close()
    assert sys.stdout is stdout
    return str(error.value)


def test_where_nothing_listens_there_is_no_cluster(asked: list[str]) -> None:
    assert refused("127.0.0.1:1").startswith("there is no Ray cluster at 127.0.0.1:1; start one")
    assert asked == []


def test_without_an_address_a_cluster_of_this_host_comes_before_a_new_one(
    asked: list[str],
) -> None:
    refused(None)

    assert asked == ["auto", "local"]


def test_the_environment_may_name_the_address(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")

    assert refused(None).startswith("there is no Ray cluster at auto")
    assert asked == ["auto"]


def test_rays_client_and_single_gpus_are_refused_before_anything_starts(asked: list[str]) -> None:
    assert "is for Ray's client" in refused("ray://head:10001")
    assert "names one GPU" in refused("local", "cuda:1")
    assert asked == []
