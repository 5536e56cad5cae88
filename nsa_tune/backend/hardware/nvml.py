"""The driver's own view of the GPUs, read through NVML with ctypes: no package, no CUDA context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

# nvml.h: clock types, throttle ("clocks event") reasons and the sensor.
_CLOCK_SM = 1
_CLOCK_MEM = 2
_SENSOR_GPU = 0
_REASONS = {
    0x0000000000000002: "application clocks",
    0x0000000000000004: "software power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "software thermal slowdown",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "power brake",
}
# A capped clock is a GPU's normal state under full load; the others mean that time is not steady.
_UNSTEADY = 0x08 | 0x20 | 0x40 | 0x80


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@dataclass(frozen=True, slots=True)
class Clock:
    """How fast one GPU runs at one moment: what a timer asks after every round."""

    sm_mhz: int
    sm_max_mhz: int
    unsteady: bool
    """True while a slowdown or power brake holds, so that a sample taken now is worthless."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU at one moment."""

    sm_clock_mhz: int
    sm_clock_max_mhz: int
    memory_clock_mhz: int
    temperature_c: int
    throttle_reasons: tuple[str, ...]
    unsteady: bool
    """True while a slowdown or power brake holds, so that a sample taken now is worthless."""
    processes: tuple[int, ...]
    """Process ids that compute on this GPU."""


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _ask(call: str, *arguments: object) -> bool:
    """Whether NVML is here and answered `call`: what it found is in the last arguments."""
    library = _library()
    return library is not None and library[call](*arguments) == 0


def _text(call: str, *arguments: object) -> str:
    buffer = ctypes.create_string_buffer(96)
    known = _ask(call, *arguments, buffer, ctypes.c_uint(96))
    return buffer.value.decode(errors="replace") if known else ""


def _number(call: str, *arguments: object) -> int:
    value = ctypes.c_uint()
    return value.value if _ask(call, *arguments, ctypes.byref(value)) else 0


def driver_version() -> str:
    """The NVIDIA driver's version, or "" where there is none."""
    return _text("nvmlSystemGetDriverVersion")


def _handles() -> list[ctypes.c_void_p]:
    handles = []
    for i in range(_number("nvmlDeviceGetCount_v2")):
        handle = ctypes.c_void_p()
        if _ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(i), ctypes.byref(handle)):
            handles.append(handle)
    return handles


def _handle(gpu: int | str) -> ctypes.c_void_p | None:
    if isinstance(gpu, int):
        return dict(enumerate(_handles())).get(gpu)
    handle = ctypes.c_void_p()
    if _ask("nvmlDeviceGetHandleByUUID", gpu.encode(), ctypes.byref(handle)):
        return handle
    # CUDA_VISIBLE_DEVICES may have only a UUID's first characters.
    same = [device for device in _handles() if _text("nvmlDeviceGetUUID", device).startswith(gpu)]
    return same[0] if gpu and len(same) == 1 else None


def gpu_names() -> list[str]:
    """Names of the GPUs that the driver reports, in its order; [] where there is no driver."""
    return [_text("nvmlDeviceGetName", handle) for handle in _handles()]


def gpu_name(uuid: str) -> str:
    """The name of the GPU with this UUID, or with one that begins so; "" where there is none."""
    handle = _handle(uuid)
    return "" if handle is None else _text("nvmlDeviceGetName", handle)


def facts_of(name: str) -> tuple[str, int]:
    """Architecture ("sm90") and bytes of memory of the first GPU here with this name; "" and 0
    where there is none."""
    for handle in _handles():
        if _text("nvmlDeviceGetName", handle) == name:
            major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
            capability = "nvmlDeviceGetCudaComputeCapability"
            known = _ask(capability, handle, ctypes.byref(major), ctypes.byref(minor))
            arch = f"sm{major.value}{minor.value}" if known else ""
            found = _ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            return arch, memory.total if found else 0
    return "", 0


def _processes(handle: ctypes.c_void_p) -> tuple[int, ...]:
    count, found = ctypes.c_uint(64), (_Process * 64)()
    call = "nvmlDeviceGetComputeRunningProcesses_v3"
    if not _ask(call, handle, ctypes.byref(count), found):
        return ()
    return tuple(process.pid for process in found[: count.value])


def _reasons_mask(handle: ctypes.c_void_p) -> int:
    mask, call = ctypes.c_ulonglong(), "nvmlDeviceGetCurrentClocksThrottleReasons"
    return mask.value if _ask(call, handle, ctypes.byref(mask)) else 0


@cache
def _named(uuid: str) -> tuple[ctypes.c_void_p, int] | None:
    """The handle and the highest SM clock of the GPU with this UUID."""
    handle = _handle(uuid)
    if handle is None:
        return None
    return handle, _number("nvmlDeviceGetMaxClockInfo", handle, ctypes.c_uint(_CLOCK_SM))


def clock(uuid: str) -> Clock | None:
    """The clock of the GPU with this UUID, in some tens of microseconds; None without NVML."""
    known = _named(uuid)
    if known is None:
        return None
    handle, highest = known
    now = _number("nvmlDeviceGetClockInfo", handle, ctypes.c_uint(_CLOCK_SM))
    return Clock(now, highest, bool(_reasons_mask(handle) & _UNSTEADY))


def gpu_state(gpu: int | str) -> GpuState | None:
    """The state of the GPU with NVML's ordinal or UUID `gpu`, or None where NVML has none.

    NVML counts all GPUs of the host, CUDA the visible ones: only the UUID is the same in both.
    """
    handle = _handle(gpu)
    if handle is None:
        return None
    mask = _reasons_mask(handle)
    return GpuState(
        sm_clock_mhz=_number("nvmlDeviceGetClockInfo", handle, ctypes.c_uint(_CLOCK_SM)),
        sm_clock_max_mhz=_number("nvmlDeviceGetMaxClockInfo", handle, ctypes.c_uint(_CLOCK_SM)),
        memory_clock_mhz=_number("nvmlDeviceGetClockInfo", handle, ctypes.c_uint(_CLOCK_MEM)),
        temperature_c=_number("nvmlDeviceGetTemperature", handle, ctypes.c_uint(_SENSOR_GPU)),
        throttle_reasons=tuple(text for bit, text in _REASONS.items() if mask & bit),
        unsteady=bool(mask & _UNSTEADY),
        processes=_processes(handle),
    )
