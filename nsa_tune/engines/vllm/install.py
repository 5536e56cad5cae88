"""Hooking vLLM.

vLLM has no registry of hooks. A builder's class could be replaced by registering another backend,
but only for the models that look theirs up, and an error while that is imported would make vLLM
take the next backend, with another KV layout. So the methods are wrapped in place.
"""

from __future__ import annotations

from nsa_tune.engines.hooking import Hooking
from nsa_tune.engines.vllm.backend import around_init
from nsa_tune.engines.vllm.edge import EDGE
from nsa_tune.engines.vllm.prefill import around_build, around_capture
from nsa_tune.engines.vllm.releases import checked, installed_version, release_of
from nsa_tune.engines.vllm.v4 import around_v4_build, around_window_build
from nsa_tune.engines.vllm.v4_backend import around_v4_init

_HOOKING = Hooking(
    EDGE,
    {
        "flashmla": around_init,
        "flashmla_build": around_build,
        "fa3": around_init,
        "common_build": around_build,
        "capture": around_capture,
        "v4_window": around_v4_init,
        "v4_window_build": around_window_build,
        "v4": around_v4_init,
        "v4_build": around_v4_build,
    },
)


def install() -> None:
    """Arrange the hooks for the installed vLLM, or say in one line why there are none."""
    version = installed_version()
    release = None if version is None else release_of(version)
    symbols = None if release is None else release.symbols
    _HOOKING.install(version, symbols, checked=checked())
