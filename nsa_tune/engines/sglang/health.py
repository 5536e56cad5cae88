"""Whether the plug-in works in SGLang here."""

from __future__ import annotations

from pathlib import Path

from nsa_tune.engines.health import Health, Host
from nsa_tune.engines.health import health as health_of
from nsa_tune.engines.sglang import last_start
from nsa_tune.engines.sglang.eligible import SWITCHES, switch_is_on
from nsa_tune.engines.sglang.kernel_swap import KernelSwap
from nsa_tune.engines.sglang.kernels import SWAPS
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.summary import summary
from nsa_tune.engines.sglang.releases import checked, installed_version, release_of


def health(*, db: Path | None = None, probe: bool = True) -> list[Health]:
    """Everything that must be right for the plug-in to steer SGLang on this machine.

    With `probe` a process imports the engine's attention backend and looks at its hooks.
    """
    version = installed_version()
    release = None if version is None else release_of(version)
    host = Host(
        engine="SGLang",
        distribution="sglang",
        group="sglang.srt.plugins",
        allow_list="SGLANG_PLUGINS",
        version=version,
        checked=checked(),
        symbols=None if release is None else release.symbols,
        probe=f"{__package__}.probe",
    )
    found = health_of(host, db=db, probe=probe)
    if any(symbol.name == "forward" for symbol in host.symbols or ()):
        found += _pass_times()
        found += [_kernel(swap) for swap in SWAPS]
    return found


def _pass_times() -> list[Health]:
    """What was measured of whole passes at earlier starts; nothing need be there."""
    kept = [Health("pass times", True, summary(times)) for times in remembered.remembered()]
    none = "none are remembered yet: SGLang measures them when it starts"
    return kept or [Health("pass times", True, none)]


def _kernel(swap: KernelSwap) -> Health:
    """Whose kernel runs where both were timed at the last start; either is right."""
    if not switch_is_on(swap.part):
        return Health(swap.name, True, f"{SWITCHES[swap.part]} is set to 0: SGLang's kernel runs")
    none = "nothing is known yet: SGLang times nsa-tune's kernel when it starts"
    return Health(swap.name, True, last_start.kept(swap.name) or none)
