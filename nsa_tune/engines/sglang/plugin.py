"""How SGLang loads the plug-in.

SGLang's registry would import a hook's target at once, and applies what is registered for a target
anew when it is entered while it applies hooks: importing a module is such a moment, for another
plug-in may have a hook in the same module. So the methods are wrapped without it.
"""

from __future__ import annotations

from nsa_tune.engines.plugin import Plugin
from nsa_tune.engines.sglang import EDGE
from nsa_tune.engines.sglang.releases import KNOWN

PLUGIN = Plugin(
    edge=EDGE,
    group="sglang.srt.plugins",
    allow_list="SGLANG_PLUGINS",
    loader="sglang.srt.plugins:load_plugins",
    hook_table="nsa_tune.engines.sglang.hook_table:HOOKS",
    releases=KNOWN,
)
