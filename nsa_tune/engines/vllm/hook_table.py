"""The hook around each symbol of vLLM that the plug-in touches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsa_tune.engines.vllm.backend import around_init
from nsa_tune.engines.vllm.prefill import around_build, around_capture
from nsa_tune.engines.vllm.v4 import around_v4_build, around_window_build
from nsa_tune.engines.vllm.v4_backend import around_v4_init

HOOKS: Mapping[str, Callable[..., Any]] = {
    "flashmla": around_init,
    "flashmla_build": around_build,
    "fa3": around_init,
    "common_build": around_build,
    "capture": around_capture,
    "v4_window": around_v4_init,
    "v4_window_build": around_window_build,
    "v4": around_v4_init,
    "v4_build": around_v4_build,
}
"""By the name of the symbol."""
