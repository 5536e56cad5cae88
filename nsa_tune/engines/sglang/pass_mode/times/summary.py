"""Remembered pass times in one line: where they were measured, and an example of what they say."""

from __future__ import annotations

from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes

_NEW, _PREFIX = 256, 16384
"""The example: a short turn behind a long history."""


def summary(times: PassTimes) -> str:
    """One line for one engine's times. What its key does not say is shown as unknown."""
    gpu, version, model, layers, heads, kv = (
        times.key.get(name, "unknown")
        for name in ("gpu", "sglang", "model", "layers", "heads", "kv_dtype")
    )
    return (
        f"{gpu}, SGLang {version}, {model}, {layers} layers, {heads} local heads, {kv} KV: "
        f"{len(times.times)} times; {_NEW} new tokens behind {_PREFIX} take "
        f"{_shown(times, PassMode.ENGINE)} in SGLang's own graph and "
        f"{_shown(times, PassMode.DECODE_GRAPH)} by decode graphs{_memory(times)}{_verdicts(times)}"
    )


def _memory(times: PassTimes) -> str:
    """What was taken outside --mem-fraction-static, where it was measured."""
    parts = [f"{what} {mib} MiB" for what, mib in times.memory_mib.items()]
    return f"; memory: {', '.join(parts)}" if parts else ""


def _verdicts(times: PassTimes) -> str:
    """What the last start has found of each way. Control characters of a file are not shown."""
    text = "; ".join(f"{way} {why}" for way, why in times.verdicts.items())
    return f"; at the last start: {text}" if text and text.isprintable() else ""


def _shown(times: PassTimes, mode: PassMode) -> str:
    selects = mode is not PassMode.DECODE_GRAPH
    pass_us = times.pass_us(mode, _NEW, _PREFIX + (_NEW + 1) / 2, selects=selects)
    return "an unmeasured time" if pass_us is None else f"{pass_us / 1e3:.1f} ms"
