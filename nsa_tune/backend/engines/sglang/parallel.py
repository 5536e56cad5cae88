"""Which ranks SGLang runs on, as it says itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["parallel"]


def parallel() -> Any:
    """SGLang's own record of its ranks and groups, the same in all known releases."""
    return import_module("sglang.srt.runtime_context").get_parallel()
