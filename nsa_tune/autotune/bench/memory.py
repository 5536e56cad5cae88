"""Memory of a device: what other processes hold of it, and what torch can give back."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CONTEXT_BYTES = 2 * 2**30
"""The most that CUDA, loaded kernels and libraries take beside torch's own memory."""
_PAGES = "/proc/self/statm"


def held_by_others(device: torch.device) -> tuple[int, int]:
    """Estimated bytes of `device`'s memory that other processes hold, and its size in bytes.

    On a CPU it is 0 while half of the host's memory is free: what ran out then is a limit of this
    process, such as RLIMIT_AS.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        ours = torch.cuda.memory_reserved(device) + _CONTEXT_BYTES
        return max(total - free - ours, 0), total
    facts = _memory_facts()
    total = facts.get("MemTotal", 0)
    available = facts.get("MemAvailable", 0)
    if 2 * available > total:
        return 0, total
    pages = int(Path(_PAGES).read_text(encoding="ascii").split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return max(total - available - resident, 0), total


def release_cached(device: torch.device) -> None:
    """Return the memory that torch caches on a GPU to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _memory_facts() -> dict[str, int]:
    """The fields of /proc/meminfo, in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    parts = [line.split() for line in lines]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in parts}
