"""Whether the plug-in works in vLLM here."""

from __future__ import annotations

from pathlib import Path

from nsa_tune.engines.health import Health, Host
from nsa_tune.engines.health import health as health_of
from nsa_tune.engines.vllm.releases import checked, installed_version, release_of


def health(*, db: Path | None = None, probe: bool = True) -> list[Health]:
    """Everything that must be right for the plug-in to steer vLLM on this machine.

    With `probe` a process imports the engine's attention backends and looks at its hooks.
    """
    version = installed_version()
    release = None if version is None else release_of(version)
    host = Host(
        engine="vLLM",
        distribution="vllm",
        group="vllm.general_plugins",
        allow_list="VLLM_PLUGINS",
        version=version,
        checked=checked(),
        symbols=None if release is None else release.symbols,
        probe=f"{__package__}.probe",
    )
    return health_of(host, db=db, probe=probe)
