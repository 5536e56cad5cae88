"""In which engines nsa-tune's copies may replace SGLang's; in the others, why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsa_tune.engines.symbols import hooks_on
from nsa_tune.engines.variables import switched_on

COPIES_SWITCH = "NSA_TUNE_COPIES"
"""Environment variable: 0 leaves the copies to SGLang."""
PADDED_HEADS = 64
"""Heads that FlashMLA's sparse kernel takes on Hopper, or a multiple."""

_LEFT_ALONE: Mapping[str, Callable[[Any], bool]] = {
    "its hook is not in place": lambda backend: (
        not hooks_on(type(backend)._forward_flashmla_sparse)
    ),
    "inference is deterministic": lambda backend: backend.num_splits != 0,
    "keys are selected for HiSparse": lambda backend: backend.hisparse_coordinator is not None,
    "the KV pool is sharded": lambda backend: getattr(backend, "_kv_shard_pool", None) is not None,
}


def allowed() -> bool:
    """Whether the environment leaves it on, as it is by default."""
    return switched_on(COPIES_SWITCH)


def why_not(backend: Any) -> str | None:
    """Why SGLang copies by itself for an attention backend; None where it need not."""
    import torch

    if not allowed():
        return f"{COPIES_SWITCH} is set to 0"
    if not hasattr(backend, "dsa_prefill_impl"):
        return "this model's attention is not DSA"
    if torch.version.cuda is None or torch.cuda.get_device_capability()[0] != 9:
        return "nsa-tune's copies were measured on Hopper only"
    reason = next((why for why, applies in _LEFT_ALONE.items() if applies(backend)), None)
    if reason is None and not (reads_back(backend) or pads(backend)):
        return "the pool is bf16 and no query is padded, so that there is nothing to copy"
    return reason


def reads_back(backend: Any) -> bool:
    """Whether prefixes are read back: the pool is packed fp8."""
    return bool(backend.dsa_kv_cache_store_fp8)


def pads(backend: Any) -> bool:
    """Whether queries are padded."""
    heads = int(backend.num_q_heads)
    return heads < PADDED_HEADS and PADDED_HEADS % heads == 0
