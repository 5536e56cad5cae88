"""A directory that looks like an environment with vLLM and nsa-tune in it.

The wheel's own `plugins` package is real; the builders are modules of a dozen lines with the same
names and signatures.
"""

from __future__ import annotations

from pathlib import Path

from nsa_tune.engines.symbols import Symbol
from nsa_tune.engines.vllm.releases import RELEASES
from tests.engines.site import EngineSite
from tests.engines.wheels import Wheel

_ENVS = """
import os
names = os.environ.get("VLLM_PLUGINS")
VLLM_PLUGINS = None if names is None else names.split(",")
"""
_OPTIONAL = {"fast_build": "fast_build=False"}


class Site(EngineSite):
    """The directory, and programs run with it."""

    def __init__(self, folder: Path, wheel: Wheel, *, version: str | None = None) -> None:
        version = version or wheel.version
        super().__init__(folder, engine="vllm", version=version, group="vllm.general_plugins")
        self.write("vllm/__init__.py", "")
        self.write("vllm/plugins/__init__.py", wheel.text("vllm/plugins/__init__.py"))
        self.write("vllm/envs.py", _ENVS)
        symbols = RELEASES[-1].symbols
        for module in dict.fromkeys(symbol.module for symbol in symbols):
            self.module(module, _source([one for one in symbols if one.module == module]))
        self.packages("vllm")

    def module(self, name: str, text: str) -> None:
        """Make `text` the module called `name`."""
        self.write(name.replace(".", "/") + ".py", text)


def _source(symbols: list[Symbol]) -> str:
    lines = []
    for kind in dict.fromkeys(symbol.path.partition(".")[0] for symbol in symbols):
        lines.append(f"class {kind}:")
        for symbol in symbols:
            owner, _, method = symbol.path.partition(".")
            if owner == kind:
                named = [_OPTIONAL.get(one, one) for one in symbol.arguments]
                lines += [f"    def {method}({', '.join(named)}):", "        return None", ""]
    return "\n".join([*lines, ""])
