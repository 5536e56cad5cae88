"""In which engines nsa-tune's kernel may select keys; in the others, why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsa_tune.engines.sglang.facts import parallel, variable_set
from nsa_tune.engines.symbols import hooks_on
from nsa_tune.engines.variables import switched_on

TOPK_SWITCH = "NSA_TUNE_TOPK"
"""Environment variable: 0 leaves the selection of keys to SGLang."""

_LEFT_ALONE: Mapping[str, Callable[[Any], bool]] = {
    "its hook is not in place": lambda backend: (
        not hooks_on(type(backend.dsa_topk_backend).topk_transform)
    ),
    "SGLang was told another kernel (--dsa-topk-backend)": lambda backend: (
        not backend.dsa_topk_backend.is_sgl_kernel()
    ),
    "SGLang does not fuse it with the page table's look-up": lambda backend: (
        not backend.use_fused_topk
    ),
    "inference is deterministic": lambda backend: backend.num_splits != 0,
    "keys are selected for HiSparse": lambda backend: backend.hisparse_coordinator is not None,
    "the indexer's keys are pooled": lambda backend: getattr(backend, "dsa_index_kpool", 1) > 1,
    "the KV pool is sharded": lambda backend: getattr(backend, "_kv_shard_pool", None) is not None,
    "one rank selects for all": lambda _: variable_set("SGLANG_DSA_TOPK_BROADCAST"),
    "with context parallelism": lambda _: parallel().attn_cp_size > 1,
    "with decode context parallelism": lambda backend: getattr(backend, "dcp_size", 1) > 1,
}


def allowed() -> bool:
    """Whether the environment leaves it on, as it is by default."""
    return switched_on(TOPK_SWITCH)


def why_not(backend: Any, most: int) -> str | None:
    """Why SGLang selects keys for `backend` by itself; None where it need not.

    `most` is how many keys nsa-tune's kernel can select.
    """
    if not allowed():
        return f"{TOPK_SWITCH} is set to 0"
    if not hasattr(backend, "dsa_topk_backend"):
        return "this model's attention is not DSA"
    if backend.dsa_index_topk > most:
        return f"nsa-tune's kernel selects up to {most} keys, not {backend.dsa_index_topk}"
    return next((why for why, applies in _LEFT_ALONE.items() if applies(backend)), None)
