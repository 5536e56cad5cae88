"""Whether the plug-in works in SGLang here."""

from __future__ import annotations

from pathlib import Path

from nsa_tune.engines import health
from nsa_tune.engines.health import Health
from nsa_tune.engines.sglang import last_start
from nsa_tune.engines.sglang.kernels import SWAPS
from nsa_tune.engines.sglang.kernels.swap import KernelSwap
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.plugin import PLUGIN
from nsa_tune.engines.sglang.switch import SWITCHES, switch_is_on

_NEW, _PREFIX = 256, 16384
"""The example: a short turn behind a long history."""


def of_sglang(db: Path | None = None) -> list[Health]:
    """Everything that must be right for the plug-in to steer SGLang, and what it chose before."""
    findings = health.health(PLUGIN, db=db)
    if PLUGIN.symbols():
        findings += [*_pass_times(), _start(), *map(_kernel, SWAPS)]
    return findings


def _pass_times() -> list[Health]:
    """What was measured of whole passes at earlier starts; nothing need be there."""
    kept = [Health("pass times", True, summary(times)) for times in remembered.remembered()]
    none = "none are remembered yet: SGLang measures them when it starts"
    return kept or [Health("pass times", True, none)]


def _start() -> Health:
    """What the seconds of the last start went to."""
    none = "nothing is known yet: SGLang has not started with the plug-in"
    return Health("start", True, last_start.kept("start") or none)


def _kernel(swap: KernelSwap) -> Health:
    """Whose kernel runs where both were timed at the last start; either is right."""
    if not switch_is_on(swap.part):
        return Health(swap.name, True, f"{SWITCHES[swap.part]} is set to 0: SGLang's kernel runs")
    none = "nothing is known yet: SGLang times nsa-tune's kernel when it starts"
    return Health(swap.name, True, last_start.kept(swap.name) or none)


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
