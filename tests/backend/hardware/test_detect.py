"""What this machine is, from the driver and the package metadata alone."""

from __future__ import annotations

import ctypes
from importlib import metadata

import pytest

from nsa_tune.backend.hardware import detect, nvml


@pytest.fixture(autouse=True)
def every_gpu_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_installed_libraries_are_listed_with_their_versions_sorted() -> None:
    found = detect.library_versions()

    assert dict(found)["torch"] == metadata.version("torch")
    assert list(found) == sorted(found)
    assert "typer" not in dict(found), "no timing depends on it"


def test_a_machine_without_a_gpu_is_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "gpu_names", list)

    assert detect.local_device_name() == detect.cpu_name()
    assert detect.cpu_name().startswith("CPU")


def test_the_first_gpu_names_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: ["NVIDIA H200", "NVIDIA H200"])

    assert detect.local_device_name() == "NVIDIA H200"


@pytest.mark.parametrize(
    ("device", "name"),
    [("auto", "NVIDIA H200"), ("cuda", "NVIDIA H200"), ("cuda:1", "NVIDIA B200"),
     ("cuda:7", "NVIDIA H200")],
)  # fmt: skip
def test_a_device_has_the_name_of_its_gpu(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: ["NVIDIA H200", "NVIDIA B200"])

    assert detect.device_name(device) == name
    assert detect.device_name("cpu") == detect.cpu_name()


@pytest.mark.parametrize(
    ("visible", "first", "second"),
    [
        ("1", "GPU 101", "GPU 101"),
        ("1,0", "GPU 101", "GPU 100"),
        ("GPU-second,GPU-first", "GPU 101", "GPU 100"),
        ("GPU-sec", "GPU 101", "GPU 101"),
        # Nothing here has that number or UUID.
        ("7", "GPU 100", "GPU 100"),
        ("GPU-third", "GPU 100", "GPU 100"),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_cuda_does_not_see_do_not_name_the_machine(
    visible: str, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert detect.local_device_name() == detect.device_name("cuda:0") == first
    assert detect.device_name("cuda:1") == second


@pytest.mark.parametrize("visible", ["", "-1", "-1,0"])
@pytest.mark.usefixtures("two_gpus")
def test_a_machine_whose_gpus_are_hidden_is_its_processor(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert detect.local_device_name() == detect.cpu_name()


def test_known_gpus_are_hopper_and_later_with_227_kib_a_block() -> None:
    assert detect.KNOWN["NVIDIA H100 80GB HBM3"].arch == "sm90"
    assert {device.shared_memory_optin for device in detect.KNOWN.values()} == {232448}
    assert all(name == device.name for name, device in detect.KNOWN.items())


class FakeNvml:
    """Two GPUs; the second one is hot and throttled."""

    def __getitem__(self, name: str) -> object:
        return getattr(self, name)

    def nvmlSystemGetDriverVersion(self, buffer: object, length: object) -> int:
        buffer.value = b"580.1"  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetCount_v2(self, count: object) -> int:
        count._obj.value = 2  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: object) -> int:
        handle._obj.value = 100 + index.value  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: object) -> int:
        handle._obj.value = 101  # type: ignore[attr-defined]
        return 0 if uuid == b"GPU-second" else 6

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, buffer: object, length: object) -> int:
        buffer.value = b"GPU-first" if handle.value == 100 else b"GPU-second"  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, buffer: object, length: object) -> int:
        buffer.value = f"GPU {handle.value}".encode()  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(
        self, handle: ctypes.c_void_p, mask: object
    ) -> int:
        mask._obj.value = 0x44 if handle.value == 101 else 0x4  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetClockInfo(self, handle: object, kind: ctypes.c_uint, value: object) -> int:
        value._obj.value = 1500 + kind.value  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetMaxClockInfo(self, handle: object, kind: object, value: object) -> int:
        value._obj.value = 1980  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetTemperature(self, handle: object, sensor: object, value: object) -> int:
        value._obj.value = 91  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(
        self, handle: object, count: object, found: object
    ) -> int:
        count._obj.value = 1  # type: ignore[attr-defined]
        found[0].pid = 4711  # type: ignore[index]
        return 0


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", FakeNvml)


@pytest.mark.usefixtures("two_gpus")
def test_a_throttled_gpu_is_unsteady_and_says_why() -> None:
    state = nvml.gpu_state("GPU-second")

    assert state is not None
    assert state.unsteady
    assert state.throttle_reasons == ("software power cap", "hardware thermal slowdown")
    assert (state.sm_clock_mhz, state.sm_clock_max_mhz, state.temperature_c) == (1501, 1980, 91)
    assert state.processes == (4711,)


@pytest.mark.usefixtures("two_gpus")
def test_a_power_capped_gpu_is_steady_that_is_how_full_load_looks() -> None:
    state = nvml.gpu_state(0)

    assert state is not None
    assert not state.unsteady
    assert state.throttle_reasons == ("software power cap",)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_named_in_the_drivers_order_and_unknown_ones_have_no_state() -> None:
    assert nvml.gpu_names() == ["GPU 100", "GPU 101"]
    assert nvml.driver_version() == "580.1"
    assert nvml.gpu_state(2) is None
    assert nvml.gpu_state("GPU-third") is None


def test_without_a_driver_there_is_nothing_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: None)

    assert nvml.gpu_names() == []
    assert nvml.driver_version() == ""
    assert nvml.gpu_state(0) is None
    assert nvml.gpu_state("GPU-second") is None
