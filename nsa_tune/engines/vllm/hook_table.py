"""The hook around each symbol of vLLM that the plug-in touches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsa_tune.engines.vllm.backend import around_init
from nsa_tune.engines.vllm.prefill import around_build, around_capture

HOOKS: Mapping[str, Callable[..., Any]] = {
    "flashmla": around_init,
    "flashmla_build": around_build,
    "fa3": around_init,
    "common_build": around_build,
    "dense": around_init,
    "dense_build": around_build,
    "capture": around_capture,
}
"""By the name of the symbol."""
