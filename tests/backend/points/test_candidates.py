"""Which arms are timed where: kernels on the GPUs that have them, plain torch elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import ANY_GPU, Arm, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Device

GPUS = {"sm80": Device("NVIDIA A100", "sm80"), "sm90": KNOWN["NVIDIA H200"],
        "sm100": KNOWN["NVIDIA B200"]}  # fmt: skip
LAYOUTS = [KVLayout.BF16, KVLayout.FP8_PACKED]


def _candidates(point: str, device: Device, layout: KVLayout, model: str) -> list[Arm]:
    profile = profile_of(model)
    return list(POINTS[point].candidates(Setting(profile, profile.heads, layout, device)))


@pytest.mark.parametrize("point", ["prefill", "decode"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", GPUS)
def test_a_gpu_times_kernels_that_exist_for_it_over_the_pool(
    point: str, layout: KVLayout, arch: str
) -> None:
    arms = _candidates(point, GPUS[arch], layout, "deepseek-v3.2")

    assert arms
    assert not any(arm.reference or arm.loss for arm in arms)
    assert all(layout in arm.layouts and arch in (arm.archs or ()) for arm in arms)


@pytest.mark.parametrize("point", ["prefill", "decode"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cpu_times_plain_torch(point: str, layout: KVLayout) -> None:
    arms = _candidates(point, Device("CPU", "cpu"), layout, "tiny")

    assert arms
    assert all(arm.is_reference_on("cpu") for arm in arms)
    assert all(arm.requires is None and not arm.loss for arm in arms)


def test_an_arm_for_every_gpu_can_be_its_own_reference() -> None:
    """Declared once: a kernel on GPUs, plain torch where there are none."""
    point = POINTS["prefill"]
    arm = replace(point.arm("mha/sdpa"), name="mha/portable", archs=ANY_GPU, portable=True)
    setting = Setting(profile_of("tiny"), 4, KVLayout.BF16, Device("CPU", "cpu"))
    both = replace(point, arms=(*point.arms, arm))

    assert arm in list(both.candidates(setting))
    assert arm in list(both.candidates(replace(setting, device=GPUS["sm90"])))
    assert arm.is_reference_on("cpu")
    assert not arm.is_reference_on("sm90")
