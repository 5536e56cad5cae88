"""The sweeps of a run: a key's devices share one, however late they come or how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune import MachineUnfit
from nsa_tune.autotune.runner.arrivals import Arrivals
from nsa_tune.autotune.runner.device_pool import DevicePool
from nsa_tune.autotune.runner.sweeps import Sweeps
from nsa_tune.autotune.search.exhaustive import Exhaustive
from nsa_tune.autotune.worker.messages import Ready, Setup
from nsa_tune.backend.types.records import Key
from tests.autotune.runner.test_device_pool import BATCHES, Comes, Listener, stored
from tests.records import KEY

SETUP = Setup("auto", "tiny", None, "fp8", (), "tests.autotune.fake_point:MANY")
H200 = replace(KEY, gpu="NVIDIA H200")


class Keyed(Comes):
    """A device of some key, on some node."""

    key = KEY
    node = ""

    def ready(self) -> Ready:
        return replace(super().ready(), key=self.key, node=self.node)


def keyed(unit: str, key: Key, node: str = "", loses: tuple[int, ...] = ()) -> Keyed:
    device = Keyed(unit, loses=loses)
    device.key, device.node = key, node
    return device


@pytest.fixture
def told() -> Listener:
    return Listener()


@pytest.fixture
def sweeps(tmp_path: Path, told: Listener) -> Iterator[Sweeps]:
    with Sweeps(tmp_path / "t.db", SETUP, {"fresh": False}, Exhaustive, told) as sweeps:
        yield sweeps


def pool(sweeps: Sweeps, told: Listener, *devices: Keyed) -> DevicePool:
    arrivals = Arrivals(devices, sweeps.admit, told)
    return DevicePool(arrivals.gather(everyone=False), told, arrivals)


def test_each_key_has_a_sweep_of_its_own(sweeps: Sweeps, told: Listener) -> None:
    devices = (keyed("A", KEY), keyed("B", H200), keyed("C", KEY))

    assert pool(sweeps, told, *devices).measure(None) == "done"

    assert [(sweep.key, sweep.measured) for sweep in sweeps] == [
        (KEY, 2 * BATCHES), (H200, 2 * BATCHES)
    ]  # fmt: skip
    assert stored(sweeps.store, KEY) == stored(sweeps.store, H200)


def test_equal_names_are_told_apart_and_who_comes_back_keeps_its_own(
    sweeps: Sweeps, told: Listener
) -> None:
    one, two = keyed("cpu", KEY, loses=(3,)), keyed("cpu", KEY)

    pool(sweeps, told, one, two).measure(None)

    (sweep,) = sweeps
    assert [unit.unit for unit in sweep.device_reports()] == ["cpu", "cpu/1"]


def test_the_database_is_made_when_there_is_something_to_store(
    sweeps: Sweeps, tmp_path: Path
) -> None:
    assert not (tmp_path / "t.db").exists()

    sweeps.admit(keyed("A", KEY), keyed("A", KEY).ready())

    assert (tmp_path / "t.db").exists()


def test_other_keys_are_measured_before_a_run_ends_for_one_that_has_no_device(
    sweeps: Sweeps, told: Listener
) -> None:
    class Gone(Keyed):
        def arrival(self) -> Ready | None:
            if self.begun:
                raise MachineUnfit("no node has room")
            return super().arrival()

    with pytest.raises(MachineUnfit, match="no node has room"):
        pool(sweeps, told, Gone("A", loses=(4,)), keyed("B", H200)).measure(None)

    assert len(stored(sweeps.store, H200)) == 2 * BATCHES
    assert len(stored(sweeps.store, KEY)) == 6


def test_a_unit_knows_its_node(sweeps: Sweeps, told: Listener) -> None:
    devices = (keyed("A", KEY, "a"), keyed("B", KEY, "a"), keyed("C", KEY, "b", loses=(2,)))

    pool(sweeps, told, *devices).measure(None)

    (sweep,) = sweeps
    assert [unit.node for unit in sweep.device_reports()] == ["a", "a", "b"]
