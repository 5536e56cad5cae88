"""The device to measure on, with the facts that its guards need."""

from __future__ import annotations

import os

import torch

from nsa_tune._errors import DeviceMissing, LibraryMissing
from nsa_tune.autotune.bench.registry import check_device
from nsa_tune.autotune.bench.timing import Timer
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.hardware import detect, nvml
from nsa_tune.backend.types.point import Arm, Setting
from nsa_tune.backend.types.records import Device, Key

__all__ = [
    "check_libraries", "describe", "key_of", "key_with", "others_on", "pick_device", "unit_of",
]  # fmt: skip


def pick_device(name: str) -> torch.device:
    """The torch device for "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        UsageError: for any other word.
        DeviceMissing: when there is no such GPU, or torch cannot use it.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    check_device(name)
    kind, _, ordinal = name.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if int(ordinal or 0) >= count:
        raise DeviceMissing(
            f"there is no GPU {name!r} that torch {torch.__version__} can use, only {count}; "
            "use --device cpu, or install a CUDA build of torch"
        )
    return torch.device("cuda", int(ordinal or 0))


def describe(device: torch.device) -> Device:
    """The facts of `device`, asked from the driver."""
    if device.type == "cpu":
        return Device(detect.cpu_name(), "cpu")
    properties = torch.cuda.get_device_properties(device)
    return Device(
        name=properties.name,
        arch=f"sm{properties.major}{properties.minor}",
        sms=properties.multi_processor_count,
        shared_memory_optin=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        memory=properties.total_memory,
        l2=properties.L2_cache_size,
    )


def unit_of(device: torch.device) -> str:
    """What tells `device` from others of its model: a GPU's UUID, as NVML writes it."""
    if device.type == "cpu":
        return "cpu"
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def others_on(device: torch.device) -> tuple[int, ...]:
    """Ids of other processes that compute on `device`, as far as the driver tells."""
    state = None if device.type == "cpu" else nvml.gpu_state(unit_of(device))
    return tuple(pid for pid in state.processes if pid != os.getpid()) if state else ()


def key_of(setting: Setting, timer: Timer) -> Key:
    """The key that measurements of `setting` on this machine are stored under."""
    return key_with(setting, timer.protocol)


def key_with(setting: Setting, protocol: str) -> Key:
    """`key_of` for the timing protocol of that name."""
    on_gpu = setting.device.arch != "cpu"
    return Key(
        gpu=setting.device.name,
        driver=detect.driver_version() if on_gpu else "",
        libraries=tuple(sorted(setting.libraries.items())),
        model=setting.profile.name,
        heads=setting.heads,
        kv_layout=str(setting.layout),
        protocol=protocol,
    )


def check_libraries(arms: list[Arm]) -> None:
    """Refuse to start when an arm's kernel library is not installed.

    Raises:
        LibraryMissing: with the commands that install what is missing.
    """
    needed = sorted({arm.requires for arm in arms if arm.requires is not None})
    missing = [name for name in needed if providers.answering(name) is None]
    if missing:
        commands = "; ".join(providers.PROVIDERS[name].install for name in missing)
        raise LibraryMissing(f"this GPU's arms need {', '.join(missing)}: {commands}")
