"""Names of devices, and which GPUs `all` stands for."""

from __future__ import annotations

import pytest

from nsa_tune._errors import DeviceMissing
from nsa_tune.autotune.bench.device_names import every_gpu
from nsa_tune.backend.hardware import nvml


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["cuda:0", "cuda:1", "cuda:2"]),
        ("2,0", ["cuda:0", "cuda:1"]),
        ("GPU-1f", ["cuda:0"]),
    ],
)
def test_all_means_each_gpu_that_is_visible(
    visible: str | None, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: ["NVIDIA H200"] * 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert every_gpu() == devices


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_are_no_gpus(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: ["NVIDIA H200"] * 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    with pytest.raises(DeviceMissing, match="CUDA_VISIBLE_DEVICES hides every GPU of this host"):
        every_gpu()


def test_where_the_driver_cannot_count_torch_is_asked_for_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml, "gpu_names", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert every_gpu() == ["cuda:0"]
