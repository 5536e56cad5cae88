"""The ranks of vLLM's tensor-parallel group compare what they decide by.

They talk through the key-value store that vLLM's own process group was made with.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from nsa_tune.backend.engines.agreement import Exchange

__all__ = ["differing"]


def differing(decides_by: str) -> str | None:
    """How this rank differs from the others of its group, in words; None where all are alike."""
    exchange = _exchange()
    return None if exchange is None else exchange.differing(decides_by)


@cache
def _exchange() -> Exchange | None:
    group = import_module("vllm.distributed.parallel_state").get_tp_group()
    if group.world_size == 1:
        return None
    store = group.cpu_group.get_group_store()
    return Exchange(store, group.rank_in_group, group.world_size)
