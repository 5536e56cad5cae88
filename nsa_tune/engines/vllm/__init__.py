"""The plug-in for vLLM. `register` is its entry point in the group `vllm.general_plugins`."""

from __future__ import annotations

from nsa_tune.engines.vllm.edge import attempt

__all__ = ["register"]


def register() -> None:
    """Arrange the hooks. vLLM calls this once in each of its processes, and does not expect it to
    raise: it never does."""
    attempt("installing the plug-in", _install)


def _install() -> None:
    from nsa_tune.engines.plugin import install
    from nsa_tune.engines.vllm.plugin import PLUGIN

    install(PLUGIN)
