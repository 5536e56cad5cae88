"""Whether the plug-in works in SGLang here."""

from __future__ import annotations

from pathlib import Path

from nsa_tune.engines.health import Health, Host
from nsa_tune.engines.health import health as health_of
from nsa_tune.engines.sglang import last_start
from nsa_tune.engines.sglang.copies import eligible as copies
from nsa_tune.engines.sglang.decode import eligible as decode
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.summary import summary
from nsa_tune.engines.sglang.releases import checked, installed_version, release_of
from nsa_tune.engines.sglang.topk import eligible as topk


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
    hooked = {symbol.name for symbol in host.symbols or ()}
    if "topk" in hooked:
        found.append(_kernel("topk", "top-k", topk.TOPK_SWITCH, on=topk.allowed()))
    if "fa3" in hooked:
        found.append(_kernel("decode", "decode", decode.DECODE_SWITCH, on=decode.allowed()))
    if "sparse" in hooked:
        found.append(_kernel("copies", "copies", copies.COPIES_SWITCH, on=copies.allowed()))
    return found


def _pass_times() -> list[Health]:
    """What was measured of whole passes at earlier starts; nothing need be there."""
    kept = [Health("pass times", True, summary(times)) for times in remembered.remembered()]
    none = "none are remembered yet: SGLang measures them when it starts"
    return kept or [Health("pass times", True, none)]


def _kernel(what: str, name: str, switch: str, *, on: bool) -> Health:
    """Whose kernel runs where both were timed at the last start; either is right."""
    if not on:
        return Health(name, True, f"{switch} is set to 0: SGLang's own kernel runs")
    none = "nothing is known yet: SGLang times nsa-tune's kernel when it starts"
    return Health(name, True, last_start.kept(what) or none)
