"""Whether the plug-in works in SGLang here."""

from __future__ import annotations

from pathlib import Path

from nsa_tune.engines import health
from nsa_tune.engines.health import Health
from nsa_tune.engines.sglang import last_start
from nsa_tune.engines.sglang.kernels import SWAPS
from nsa_tune.engines.sglang.kernels.swap import KernelSwap
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.summary import summary
from nsa_tune.engines.sglang.plugin import PLUGIN
from nsa_tune.engines.sglang.switch import SWITCHES, switch_is_on


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
