"""Whether a model fits on its GPUs, and how large the KV pool then is."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import CHECKPOINTS

_GIB = 2**30
_INDEX_KEY_BYTES = 132  # of a token in the indexer's cache: 128 e4m3 values and their scale
STATIC_FRACTION = 0.88
"""Share of a GPU that weights and KV pool may take where --mem-fraction-static is not given. The
rest is for activations and CUDA graphs, those of the plug-in (up to 3.5 GiB) among them."""


@dataclass(frozen=True, slots=True)
class Memory:
    """One GPU's memory, in GiB."""

    device_gib: float
    weights_gib: float
    static_fraction: float
    token_bytes: int  # what a token takes in all layers, in the KV pool and in the indexer's cache

    @property
    def pool_gib(self) -> float:
        """What is left for the KV pool; below 0 the weights do not fit."""
        return self.static_fraction * self.device_gib - self.weights_gib

    @property
    def pool_tokens(self) -> int:
        """Tokens of that pool."""
        return max(int(self.pool_gib * _GIB / self.token_bytes), 0)

    @property
    def fits(self) -> bool:
        """Whether the weights fit, with a pool for at least one request of 32,768 tokens."""
        return self.pool_tokens >= 2**15


def memory_of(
    setting: Setting, model: str, *, tp: int, dp: int = 1, static_fraction: float | None = None
) -> Memory | None:
    """The memory of one of `tp` GPUs that share `model`'s weights, with `dp` ranks of data-parallel
    attention; None where the GPU's memory or the checkpoint is unknown."""
    profile = setting.profile
    checkpoint = CHECKPOINTS.get(model)
    if checkpoint is None or not setting.device.memory:
        return None
    replicated = checkpoint.attention_gb * (1 - 1 / tp) if dp > 1 else 0.0
    weights = (checkpoint.weights_gb / tp + replicated) * 1e9 / _GIB
    token = setting.layout.token_bytes(profile.rank, profile.rope) + _INDEX_KEY_BYTES
    return Memory(
        setting.device.memory / _GIB, weights, static_fraction or STATIC_FRACTION,
        profile.layers * token,
    )  # fmt: skip
