"""Deployments of the tables and passes that ship, opened once for all tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from nsa_tune import Dispatcher

H200 = "NVIDIA H200"


@cache
def dispatcher(heads: int, kv_dtype: str, gpu: str = H200, layers: int | None = None) -> Dispatcher:
    return Dispatcher.open(
        None, gpu, model="deepseek-v3.2", heads=heads, kv_dtype=kv_dtype, layers=layers
    )


def write_trace(path: Path, requests: Iterable[tuple[float, int, int]]) -> Path:
    """A trace of (arrival in s, input tokens, output tokens)."""
    names = ("arrival_s", "input_tokens", "output_tokens")
    lines = [json.dumps(dict(zip(names, one, strict=True))) for one in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


SHORT_PROMPTS = [(i * 2.0, 500 + 300 * (i % 5), 8) for i in range(12)]
LONG_PROMPTS = [(i * 20.0, 9000 + 8000 * (i % 4), 4) for i in range(6)]
