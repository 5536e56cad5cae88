"""The ranks of vLLM's tensor-parallel group compare what they decide by.

They talk through the key-value store that vLLM's own process group was made with.
"""

from __future__ import annotations

import logging
from importlib import import_module
from itertools import count

from nsa_tune.engines.agreement import agree
from nsa_tune.engines.vllm import say_once

_asked = count()
"""How often this process has compared: a model may have several backends."""


def agreed(decides_by: str) -> bool:
    """Whether all ranks decide by `decides_by`; a line says so where they do not."""
    group = import_module("vllm.distributed.parallel_state").get_tp_group()
    alike = group.world_size == 1 or agree(
        group.cpu_group.get_group_store(), f"decides_by/{next(_asked)}", decides_by,
        rank=group.rank_in_group, ranks=group.world_size,
    )  # fmt: skip
    if not alike:
        text = "the ranks' tables differ, or their versions do, or one has no plug-in"
        say_once(logging.WARNING, f"vLLM decides by itself: {text}")
    return alike
