"""Expanded MHA for dense MLA where SGLang absorbs: in a prefill graph, or behind a short prefix.

Read in SGLang 0.5.17 and 0.5.23, models/deepseek_common/attention_backend_handler.py: a prefill
graph is absorbed up to 8192 new tokens, and an eager pass where 1 to 8191 tokens are cached.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nsa_tune.engines.sglang.releases import DENSE_PATHS

USE_MHA = "use_mha"
"""Attribute of a backend while attention is expanded. DSA's has it, and SGLang reads it there."""


@contextmanager
def expanding(backend: Any) -> Iterator[None]:
    """Within it attention is expanded in what is captured."""
    setattr(backend, USE_MHA, True)
    try:
        yield
    finally:
        setattr(backend, USE_MHA, False)


def around_path(
    original: Callable[..., Any], attn: Any, forward_batch: Any, backend_name: str
) -> Any:
    """The hook around `_handle_attention_backend`, which each layer asks for its path.

    Only where it says MLA: beyond 131072 tokens SGLang expands the prefix in chunks. A later
    release, in which the backend is not found there, keeps its own path.
    """
    method = original(attn, forward_batch, backend_name)
    find = getattr(sys.modules[DENSE_PATHS], "get_attn_backend", None)
    expands = find is not None and getattr(find(), USE_MHA, False) and method is type(method).MLA
    return type(method).MHA_ONE_SHOT if expands else method
