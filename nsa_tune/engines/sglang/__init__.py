"""The plug-in for SGLang. `register` is its entry point in the group `sglang.srt.plugins`."""

from __future__ import annotations

from nsa_tune.engines.edge import Edge

__all__ = ["EDGE", "attempt", "register", "say_once"]

EDGE = Edge("SGLang", log="nsa_tune.sglang")
attempt = EDGE.attempt
say_once = EDGE.say_once


def register() -> None:
    """Arrange the hooks. SGLang calls this once in each of its processes; it never raises."""
    attempt("installing the plug-in", _install)


def _install() -> None:
    from nsa_tune.engines.plugin import install
    from nsa_tune.engines.sglang.plugin import PLUGIN

    install(PLUGIN)
