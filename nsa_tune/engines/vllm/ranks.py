"""The ranks of vLLM's tensor-parallel group compare what they decide by.

They talk through the key-value store that vLLM's own process group was made with.
"""

from __future__ import annotations

from importlib import import_module
from itertools import count

from nsa_tune.engines.agreement import agree

_asked = count()
"""How often this process has compared: a model may have several backends."""


def differing(decides_by: str) -> str | None:
    """What is wrong where the ranks do not all decide by `decides_by`; None where they do."""
    group = import_module("vllm.distributed.parallel_state").get_tp_group()
    if group.world_size == 1:
        return None
    alike = agree(
        group.cpu_group.get_group_store(), f"decides_by/{next(_asked)}", decides_by,
        rank=group.rank_in_group, ranks=group.world_size,
    )  # fmt: skip
    return None if alike else "the ranks differ in their tables or versions, or one has no plug-in"
