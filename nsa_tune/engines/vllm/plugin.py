"""How vLLM loads the plug-in.

vLLM has no registry of hooks. A builder's class could be replaced by registering another backend,
but only for the models that look theirs up, and an error while that is imported would make vLLM
take the next backend, with another KV layout. So the methods are wrapped in place.
"""

from __future__ import annotations

from nsa_tune.engines.plugin import Plugin
from nsa_tune.engines.vllm import EDGE
from nsa_tune.engines.vllm.releases import KNOWN

PLUGIN = Plugin(
    edge=EDGE,
    group="vllm.general_plugins",
    allow_list="VLLM_PLUGINS",
    loader="vllm.plugins:load_general_plugins",
    hook_table="nsa_tune.engines.vllm.hook_table:HOOKS",
    releases=KNOWN,
)
