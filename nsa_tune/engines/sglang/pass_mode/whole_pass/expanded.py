"""Dense MLA inside of a dense graph: expanded, where SGLang absorbs in every prefill graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from nsa_tune.engines.sglang.releases import DENSE_PATHS


def around_path(
    original: Callable[..., Any], attn: Any, forward_batch: Any, backend_name: str
) -> Any:
    """The hook around `_handle_attention_backend`: MHA while a dense graph of it is captured.

    DSA's backend has `use_mha` and reads it by itself; the others get it while one is captured.
    """
    method = original(attn, forward_batch, backend_name)
    backend = sys.modules[DENSE_PATHS].get_attn_backend()
    return type(method).MHA_ONE_SHOT if getattr(backend, "use_mha", False) else method
