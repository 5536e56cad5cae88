"""What this machine is: its device, driver and kernel libraries. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from nsa_tune.backend.hardware import nvml
from nsa_tune.backend.hardware.visible import visible_gpus
from nsa_tune.backend.types.records import Device

KNOWN: dict[str, Device] = {
    device.name: device
    for device in (
        Device("NVIDIA H100 80GB HBM3", "sm90", 132, 232448, 85017493504, 50 * 2**20),
        Device("NVIDIA H100 PCIe", "sm90", 114, 232448, 80 * 2**30, 50 * 2**20),
        Device("NVIDIA H100 NVL", "sm90", 132, 232448, 94 * 2**30, 50 * 2**20),
        Device("NVIDIA H800", "sm90", 132, 232448, 80 * 2**30, 50 * 2**20),
        Device("NVIDIA GH200 480GB", "sm90", 132, 232448, 96 * 2**30, 50 * 2**20),
        Device("NVIDIA H200", "sm90", 132, 232448, 150109880320, 60 * 2**20),
        Device("NVIDIA H200 NVL", "sm90", 132, 232448, 150109880320, 60 * 2**20),
        Device("NVIDIA H20", "sm90", 78, 232448, 96 * 2**30, 60 * 2**20),
        Device("NVIDIA B200", "sm100", 148, 232448, 180 * 10**9, 126 * 2**20),
    )
}
"""Facts of well-known GPUs: what limits are computed from, whatever a table says of them."""

_MOST_OPTIN = 232448
"""Bytes of shared memory that a block may opt in to on the GPUs that have most of it."""
_MOST_MEMORY = max(device.memory for device in KNOWN.values())

_DISTRIBUTIONS = (
    "torch",
    "triton",
    "sgl-flash-mla",
    "sglang-kernel",
    "sgl-kernel",
    "flash-mla",
    "sgl-deep-gemm",
    "deep-gemm",
    "flashinfer-python",
    "vllm",
    "sglang",
    "tilelang",
)


def cpu_name() -> str:
    """ "CPU " and the processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return f"CPU {value.strip()}"
    return "CPU"


def device_of(claimed: Device) -> Device:
    """The device that limits are computed for, where a table says that it is `claimed`.

    Of a known GPU the facts are those of the code. Of any other they are the table's, as far as
    NVML here does not tell, and never more than the largest known GPU has. Memory is the smaller.
    """
    name = claimed.name
    if name.startswith("CPU"):
        return claimed
    known = KNOWN.get(name)
    if known is not None:
        memory = min(claimed.memory or known.memory, known.memory)
        return replace(known, memory=memory)
    arch, here = nvml.facts_of(name)
    memories = [size for size in (claimed.memory, here, _MOST_MEMORY) if size]
    return replace(
        claimed,
        arch=arch or claimed.arch,
        shared_memory_optin=min(claimed.shared_memory_optin, _MOST_OPTIN),
        memory=min(memories),
    )


def local_device_name() -> str:
    """The name of the first GPU that CUDA may use, as the driver reports it, or the CPU's where
    there is none."""
    names = _visible_names()
    return names[0] if names else cpu_name()


def _visible_names() -> list[str]:
    """Names of the GPUs that CUDA may use, in its order; it counts them in the driver's own order
    where they are alike, and else if CUDA_DEVICE_ORDER is PCI_BUS_ID."""
    names = nvml.gpu_names()
    return [_name_of(gpu, names) for gpu in visible_gpus(len(names))] if names else []


def _name_of(gpu: int | str, names: Sequence[str]) -> str:
    """The name of the GPU with this number among `names`, or this UUID; else the first."""
    if isinstance(gpu, str):
        return nvml.gpu_name(gpu) or names[0]
    # A number of the host's while only some of its GPUs are in this container is none of these.
    return names[gpu] if gpu < len(names) else names[0]


def device_name(device: str) -> str:
    """The name of the device "cpu" or "cuda:N", where CUDA may use so many; of any other word,
    `local_device_name`."""
    if device == "cpu":
        return cpu_name()
    names, number = _visible_names(), device.partition(":")[2]
    if number.isdecimal() and int(number) < len(names):
        return names[int(number)]
    return local_device_name()


def driver_version() -> str:
    """The NVIDIA driver's version, or "" where there is none."""
    return nvml.driver_version()


def library_versions() -> tuple[tuple[str, str], ...]:
    """(distribution, version) of each library that a timing depends on, sorted, as installed."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return tuple(sorted(found.items()))
