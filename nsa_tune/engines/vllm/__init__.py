"""The plug-in for vLLM. `register` is its entry point in the group `vllm.general_plugins`."""

from __future__ import annotations

from nsa_tune.engines.edge import Edge

__all__ = ["EDGE", "attempt", "register", "say_once"]

# vLLM sets up its own loggers only: lines of others below WARNING are lost (logger.py:75-105).
EDGE = Edge("vLLM", log="vllm.nsa_tune")
attempt = EDGE.attempt
say_once = EDGE.say_once


def register() -> None:
    """Arrange the hooks. vLLM calls this once in each of its processes, and does not expect it to
    raise: it never does."""
    attempt("installing the plug-in", _install)


def _install() -> None:
    from nsa_tune.engines.plugin import install
    from nsa_tune.engines.vllm.plugin import PLUGIN

    install(PLUGIN)
