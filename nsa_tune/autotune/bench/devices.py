"""Torch devices: which one to measure on, and the facts that guards and keys need of it."""

from __future__ import annotations

import os

import torch

from nsa_tune._errors import DeviceMissing, LibraryMissing, UsageError
from nsa_tune.autotune.bench.device_names import check_device
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.hardware import detect, nvml
from nsa_tune.backend.types.point import Arm, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import OVERLAP, Device, Key


def pick_device(name: str) -> torch.device:
    """The torch device for "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        UsageError: for any other name.
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
            f"there is no GPU {name!r}: torch {torch.__version__} can use {count or 'none'}; "
            "use --device cpu, or install a CUDA build of torch"
        )
    return torch.device("cuda", int(ordinal or 0))


def describe(device: torch.device) -> Device:
    """The facts of `device`, as torch and the driver report them."""
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
    """What identifies the device among equal ones: a GPU's UUID as NVML writes it, or "cpu"."""
    if device.type == "cpu":
        return "cpu"
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def others_on(device: torch.device) -> tuple[int, ...]:
    """Ids of other processes that compute on `device`; empty where the driver does not say."""
    state = None if device.type == "cpu" else nvml.gpu_state(unit_of(device))
    return tuple(pid for pid in state.processes if pid != os.getpid()) if state else ()


def setting_of(
    device: torch.device, model: str, heads: int | None, kv_dtype: str,
    lossy: frozenset[str] = frozenset(), overlap: float | None = None,
) -> Setting:  # fmt: skip
    """What is measured on `device` of this machine.

    Args:
        heads: local heads; None takes all of the model's.
        kv_dtype: "bf16" or "fp8".
        lossy: lossy arms that are measured too.
        overlap: of neighbouring selections, from 0 to 1; None draws them one by one.

    Raises:
        UsageError: for a model, heads or a dtype that do not exist, or such an overlap.
    """
    if overlap is not None and not 0 <= overlap <= 1:
        raise UsageError(f"an overlap of selections is from 0 to 1, not {overlap}")
    profile = profile_of(model)
    return Setting(
        profile=profile,
        heads=profile.heads if heads is None else profile.check_heads(heads),
        layout=profile.layout(kv_dtype),
        device=describe(device),
        libraries=dict(detect.library_versions()),
        missing=providers.missing(),
        lossy=lossy,
        overlap=overlap,
    )


def key_of(setting: Setting, protocol: str) -> Key:
    """The key that measurements of `setting` on this machine are stored under.

    `protocol` is the name of a timing protocol, as `timing.protocol_of` gives it. What selections
    share is a part of the protocol: times with and without it do not mix.
    """
    if setting.overlap is not None:
        protocol = f"{protocol}{OVERLAP}{setting.overlap:g}"
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
    """Make sure that the kernel libraries of `arms` are installed.

    Raises:
        LibraryMissing: when one is not; it gives the commands that install what is missing.
    """
    needed = sorted({arm.requires for arm in arms if arm.requires is not None})
    missing = [name for name in needed if providers.answering(name) is None]
    if missing:
        commands = "; ".join(providers.PROVIDERS[name].install for name in missing)
        raise LibraryMissing(f"this GPU's arms need {', '.join(missing)}: {commands}")
