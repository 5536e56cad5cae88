"""Configurations of one engine between which the probe switches from pass to pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["DEFAULT", "FORCED", "Configuration", "configurations_for", "dumped", "parsed"]

DEFAULT = "default"
"""The name of the configuration that all others are compared with: SGLang by itself."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What one engine can do otherwise without a new start."""

    name: str
    plugin: bool = False
    """Whether nsa-tune's plug-in decides."""
    prefill_impl: str | None = None
    """The prefill kernel of MLA, as of `--dsa-prefill-backend`; None: as the engine was started."""
    chunk: int | None = None
    """The most new tokens of a prefill (`--chunked-prefill-size`); None: as at the start."""
    prefill_graph: bool = True
    """False: prefill never replays a CUDA graph, whatever was captured."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that SGLang reads in each pass, such as the threshold for dense attention."""
    pass_mode: str | None = None
    """With the plug-in: how every prefill runs that can run so, whatever was measured; a
    `PassMode`. Others run as `engine`."""

    @property
    def static(self) -> bool:
        """Whether an operator could have it by flags alone."""
        return not self.plugin


_PLUGIN = Configuration("plugin", plugin=True)
_EAGER = Configuration("eager", prefill_graph=False)
_WAYS = (
    "engine", "table_kernel", "eager", "dense_graph", "dense_mla_graph", "prefix_graph",
    "sparse_graph", "decode_graph",
)  # fmt: skip
FORCED = (
    *(Configuration(f"way:{mode}", plugin=True, pass_mode=mode) for mode in _WAYS),
    Configuration("triton_sparse_mla", prefill_impl="triton_sparse_mla"),
)
"""Built in, but only used where they are named: what each way takes, and a kernel of SGLang 0.5.22
and later for up to 32 heads."""
_STATIC = {
    "bf16": (
        _EAGER,
        Configuration("fa3", prefill_impl="fa3"),
    ),
    "fp8": (
        Configuration("flashmla_sparse", prefill_impl="flashmla_sparse"),
        _EAGER,
        Configuration("eager+flashmla_sparse", prefill_impl="flashmla_sparse", prefill_graph=False),
    ),
}


def configurations_for(kv_dtype: str, *, plugin: bool = True) -> tuple[Configuration, ...]:
    """SGLang's default, the plug-in, and the static configurations worth having for `kv_dtype`."""
    ours = (_PLUGIN,) if plugin else ()
    return (Configuration(DEFAULT), *ours, *_STATIC[kv_dtype])


def parsed(text: str) -> tuple[Configuration, ...]:
    """Configurations from a JSON list of objects; ValueError when a field is unknown, a name is
    missing or used twice, or none is given."""
    found = tuple(_one(item) for item in json.loads(text))
    names = [one.name for one in found]
    if not found or len(set(names)) < len(names):
        raise ValueError(f"give each configuration a name of its own: {names}")
    return found


def _one(item: dict[str, Any]) -> Configuration:
    if "name" not in item:
        raise ValueError(f"a configuration has no name: {item}")
    unknown = set(item) - set(Configuration.__dataclass_fields__)
    if unknown:
        raise ValueError(f"unknown in configuration {item['name']}: {', '.join(sorted(unknown))}")
    mode = item.get("pass_mode")
    if mode is not None and (mode not in _WAYS or not item.get("plugin")):
        raise ValueError(
            f"pass_mode of configuration {item['name']} needs the plug-in and one of "
            f"{', '.join(_WAYS)}, not {mode!r}"
        )
    return Configuration(**item)


def dumped(configurations: Sequence[Configuration]) -> list[dict[str, Any]]:
    """The configurations as JSON objects."""
    return [asdict(one) for one in configurations]
