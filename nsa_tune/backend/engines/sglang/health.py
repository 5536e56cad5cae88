"""Whether the plug-in works in SGLang here."""

from __future__ import annotations

from pathlib import Path

from nsa_tune.backend.engines.health import Health, Host
from nsa_tune.backend.engines.health import health as health_of
from nsa_tune.backend.engines.sglang.pass_mode import remembered
from nsa_tune.backend.engines.sglang.pass_mode.summary import summary
from nsa_tune.backend.engines.sglang.releases import checked, installed_version, release_of
from nsa_tune.backend.engines.sglang.topk import last_start
from nsa_tune.backend.engines.sglang.topk.eligible import TOPK_SWITCH, allowed

__all__ = ["health"]


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
    if any(symbol.name == "topk" for symbol in host.symbols or ()):
        found.append(_topk())
    return found


def _pass_times() -> list[Health]:
    """What was measured of whole passes at earlier starts; nothing need be there."""
    kept = [Health("pass times", True, summary(times)) for times in remembered.remembered()]
    none = "none are remembered yet: SGLang measures them when it starts"
    return kept or [Health("pass times", True, none)]


def _topk() -> Health:
    """Who selects keys; it is right either way."""
    if not allowed():
        return Health("top-k", True, f"{TOPK_SWITCH} is set to 0: SGLang selects keys by itself")
    none = "nothing is known yet: SGLang times nsa-tune's kernel when it starts"
    return Health("top-k", True, last_start.kept() or none)
