"""Results as `benchmarks.engine.run` writes them, made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.engine.run import SCHEMA

Times = Mapping[str, Mapping[str, float]]
"""Milliseconds by row and configuration."""


def _sweeps(value: float) -> dict[str, float]:
    return {str(i): value * (1 + 0.001 * (i % 3)) for i in range(1, 7)}


def result(
    label: str,
    prefill: Times,
    *,
    decode: Times | None = None,
    trace: Times | None = None,
    kv_dtype: str = "bf16",
    started_as: str = "plugin",
) -> dict[str, Any]:
    """A document in which each sweep of a configuration takes the time given, give or take 0.2 %.

    The rows of `decode` are numbers of sequences.
    """  # fmt: skip
    names = dict.fromkeys(name for row in prefill.values() for name in row)
    extend = [{"case": case, **_row(row, "gpu_ms", "wall_ms")} for case, row in prefill.items()]
    steps = [
        {"sequences": int(count), "context": 4096, **_row(row, "gpu_ms", "step_ms")}
        for count, row in (decode or {}).items()
    ]
    traces = [{"trace": name, **_trace_row(row)} for name, row in (trace or {}).items()]
    skipped = {"case": "0+99999 x1", "skipped": "out of time"}
    tests = {"prefill": [*extend, skipped], "decode": steps, "trace": traces}
    return {
        "schema": SCHEMA, "label": label, "kv_dtype": kv_dtype, "started_as": started_as,
        "configurations": [{"name": name, "plugin": name.startswith("plugin")} for name in names],
        "gpu": {"name": "H200", "driver_version": "570"}, "versions": {"sglang": "0.5.17"},
        "nsa_tune": {"commit": "0123456789abcdef", "sources": ""}, "start_s": 50.0,
        "tests": tests, "errors": {},
    }  # fmt: skip


def _row(times: Mapping[str, float], *metrics: str) -> dict[str, Any]:
    return {
        "configurations": {
            name: {"sweeps": {metric: _sweeps(value) for metric in metrics}, "ran": [f"{name} ran"]}
            for name, value in times.items()
        }
    }


def _trace_row(times: Mapping[str, float]) -> dict[str, Any]:
    row = _row(times, "seconds", "ttft_ms")
    for name, value in times.items():
        row["configurations"][name] |= {
            "seconds": value, "ttft_ms": {"median": value, "mean": value, "p90": value},
            "tokens_per_s": 1e5 / value, "prefill_gpu_ms": value, "peak_mib": 9, "rounds": 6,
        }  # fmt: skip
    return row | {"requests": 4, "prompt_tokens": 99, "concurrency": 2}
