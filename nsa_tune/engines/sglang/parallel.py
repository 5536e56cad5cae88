"""SGLang's own record of its ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def parallel() -> Any:
    """SGLang's own record of its ranks and groups, the same in all known releases."""
    return import_module("sglang.srt.runtime_context").get_parallel()
