"""What a device reaches, measured on the CPU, as the roofline of a report reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_tune.autotune import ceilings
from nsa_tune.autotune.ceilings import measure_ceilings
from nsa_tune.autotune.timing import CpuTimer
from nsa_tune.backend.layouts import KVLayout
from nsa_tune.backend.point import Setting
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.profiles import PROFILES
from nsa_tune.backend.records import Device, Measurement, Status
from nsa_tune.reports import roofline

if TYPE_CHECKING:
    import pytest

CPU = torch.device("cpu")


def measured(arch: str = "cpu") -> list[Measurement]:
    """The ceilings of a CPU that calls itself `arch`."""
    setting = Setting(PROFILES["tiny"], 4, KVLayout.BF16, Device("a CPU", arch))
    return measure_ceilings(setting, CPU, CpuTimer())


def test_a_cpu_gets_a_roof_of_its_own() -> None:
    rows = measured()
    found = roofline.ceilings_of(rows)

    assert {row.status for row in rows} == {Status.OK}
    assert all(row.low_us and row.high_us and row.samples for row in rows)
    assert found is not None
    assert found.bytes_per_s > 1e8
    assert set(found.flops_per_s) == {"bf16"}


def test_a_product_that_the_device_has_not_is_a_failure_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no such\nmatrix unit")

    monkeypatch.setattr(torch, "_scaled_mm", refused)

    (failed,) = (row for row in measured("sm90") if row.arm == "matmul_fp8")

    assert failed.status is Status.FAILED
    assert failed.reason == "RuntimeError: no such matrix unit"


def test_ceilings_are_no_decision_point() -> None:
    assert ceilings.POINT == roofline.POINT
    assert ceilings.POINT not in POINTS
