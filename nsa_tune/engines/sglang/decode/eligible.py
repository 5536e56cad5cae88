"""In which engines nsa-tune's kernel may attend in decode graphs; in the others, why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsa_tune.engines.symbols import hooks_on
from nsa_tune.engines.variables import switched_on

DECODE_SWITCH = "NSA_TUNE_DECODE"
"""Environment variable: 0 leaves decoding to SGLang's kernels."""

_LEFT_ALONE: Mapping[str, Callable[[Any], bool]] = {
    "its hook is not in place": lambda backend: not hooks_on(type(backend)._forward_fa3),
    "they are not fa3, the default over a bf16 pool": lambda backend: (
        str(backend.dsa_decode_impl) != "fa3"
    ),
    "inference is deterministic": lambda backend: backend.num_splits != 0,
    "keys are selected for HiSparse": lambda backend: backend.hisparse_coordinator is not None,
    "with decode context parallelism": lambda backend: getattr(backend, "dcp_size", 1) > 1,
}


def allowed() -> bool:
    """Whether the environment leaves it on, as it is by default."""
    return switched_on(DECODE_SWITCH)


def why_not(runner: Any) -> str | None:
    """Why SGLang's kernels decode in `runner`, its ModelRunner; None where they need not."""
    import torch

    backend = runner.attn_backend
    if not allowed():
        return f"{DECODE_SWITCH} is set to 0"
    if not hasattr(backend, "dsa_decode_impl"):
        return "this model's attention is not DSA"
    if torch.version.cuda is None or torch.cuda.get_device_capability()[0] != 9:
        return "nsa-tune's was measured on Hopper only"
    return next((why for why, applies in _LEFT_ALONE.items() if applies(backend)), None)
