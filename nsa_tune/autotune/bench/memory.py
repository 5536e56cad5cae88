"""Memory that ran out: whether an arm needs too much, or somebody else holds it."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["give_back", "held_by_others"]

_CONTEXT_BYTES = 2 * 2**30
"""What CUDA, the kernels' code and the libraries take beside torch's own memory, at most."""
_PAGES = "/proc/self/statm"


def held_by_others(device: torch.device) -> tuple[int, int]:
    """Bytes that other processes hold of `device`'s memory, about, and all of its bytes.

    A host of which half is free was not short of memory: then it is a limit of this process.
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
    resident = int(Path(_PAGES).read_text(encoding="ascii").split()[1]) * 4096
    return max(total - available - resident, 0), total


def give_back(device: torch.device) -> None:
    """Return what torch keeps for later to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _memory_facts() -> dict[str, int]:
    """Bytes by name, of /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    parts = [line.split() for line in lines]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in parts}
