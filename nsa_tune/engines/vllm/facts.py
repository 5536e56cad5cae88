"""What the plug-in must know of a metadata builder, and when it has to leave one alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.profiles import PROFILES, ModelProfile
from nsa_tune.engines.edge import LeftAlone

_SHARD_TOKENS = 2 * 16384
"""Before 0.33 the limit is no option: this many rows for each of at least two ranks."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One builder, as a table is looked up for it."""

    profile: ModelProfile
    heads: int
    """Local heads."""
    layout: KVLayout
    layers: int
    """Attention layers that share what it builds."""
    decode_tokens: int
    """Most new tokens of a decode: 1 and the drafts. CUDA graphs hold such steps only."""
    most_tokens: int
    """Most new tokens of a step."""
    shard_tokens: int
    """New tokens from which on the ranks share the indexer's rows, and wait for each other."""
    workspace_tokens: int
    """Tokens of context that MHA expands at a time."""
    dense: bool
    """Whether the engine takes MHA at all."""

    @property
    def kv_dtype(self) -> str:
        """As `Dispatcher.open` takes it."""
        return "fp8" if self.layout is KVLayout.FP8_PACKED else "bf16"

    def __str__(self) -> str:
        return f"{self.profile.name}, {self.heads} local heads, {self.kv_dtype} KV"


def facts_of(builder: Any, layer_names: Sequence[str]) -> Facts:
    """The facts of an MLA builder that the engine has just made for these layers.

    Raises:
        LeftAlone: for a model, a pool or a mode of operation that nothing was measured for.
    """
    config = builder.vllm_config
    _check_mode(config)
    profile, layout = _profile(builder), _layout(config)
    attention = config.attention_config
    return Facts(
        profile,
        int(config.model_config.get_num_attention_heads(config.parallel_config)),
        layout,
        _layers(config, layer_names),
        _decode_tokens(config),
        config.scheduler_config.max_num_batched_tokens,
        getattr(attention, "indexer_tp_shard_min_rows", _SHARD_TOKENS),
        builder.chunked_prefill_workspace_size,
        dense=builder._prefill_backend is not None and not attention.sparse_mla_force_mqa,
    )


def _decode_tokens(config: Any) -> int:
    return int(import_module("vllm.v1.attention.backend").max_decode_query_len(config))


def _layers(config: Any, layer_names: Sequence[str]) -> int:
    """How many of the layers are the model's, and not a draft model's.

    Raises:
        LeftAlone: when there is none.
    """
    count: int = config.model_config.hf_text_config.num_hidden_layers
    numbers = [re.search(r"layers\.(\d+)\.", name) for name in layer_names]
    layers = sum(number is not None and int(number[1]) < count for number in numbers)
    if not layers:
        raise LeftAlone("nothing is measured for the layers of a draft model")
    return layers


def _check_mode(config: Any) -> None:
    """Whether the engine runs in a mode that batches were measured for.

    Raises:
        LeftAlone: when it does not.
    """
    for what, applies in _UNMEASURED.items():
        if applies(config):
            raise LeftAlone(f"nothing is measured for {what}")


def _batch_invariant(_: Any) -> bool:
    return bool(import_module("vllm.envs").VLLM_BATCH_INVARIANT)


def _speculation(config: Any, name: str) -> bool:
    return bool(getattr(config.speculative_config, name, False))


_UNMEASURED: dict[str, Callable[[Any], bool]] = {
    "decode context parallelism": lambda config: (
        config.parallel_config.decode_context_parallel_size > 1
    ),
    "prefill context parallelism": lambda config: (
        config.parallel_config.prefill_context_parallel_size > 1
    ),
    # A stage of other length shares its costs among other layers, and decides for itself.
    "pipeline parallelism": lambda config: config.parallel_config.pipeline_parallel_size > 1,
    "microbatches": lambda config: bool(config.parallel_config.use_ubatching),
    "HiSparse": lambda config: config.attention_config.hisparse_config is not None,
    "batch-invariant mode": _batch_invariant,
    # The host does not know the lengths that a pass really has.
    "adaptive verification": lambda config: _speculation(config, "enable_adaptive_verification"),
    # Such drafts are wider than one token and the drafts.
    "parallel drafting": lambda config: _speculation(config, "parallel_drafting"),
}
"""Modes of operation that change what a batch costs or which kernels may run; in words."""


def _profile(builder: Any) -> ModelProfile:
    text = builder.vllm_config.model_config.hf_text_config
    names = (
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads",
        "index_head_dim", "index_topk",
    )  # fmt: skip
    shape = {name: getattr(text, name, None) for name in names}
    # Kimi K2 differs from V3 in its heads only.
    heads = getattr(text, "num_attention_heads", None)
    for profile in sorted(PROFILES.values(), key=lambda profile: profile.heads != heads):
        indexer = (profile.index_heads, profile.index_dim, profile.index_topk)
        if tuple(shape.values()) == (
            profile.rank, profile.nope, profile.rope, profile.v,
            *(indexer if profile.has_indexer else (None, None, None)),
        ):  # fmt: skip
            return profile
    given = ", ".join(f"{name} {value}" for name, value in shape.items())
    raise LeftAlone(f"no model profile has {given}")


def _layout(config: Any) -> KVLayout:
    dtype = config.cache_config.cache_dtype
    if dtype == "fp8_ds_mla":
        return KVLayout.FP8_PACKED
    if dtype in ("auto", "bfloat16") and str(config.model_config.dtype) == "torch.bfloat16":
        return KVLayout.BF16
    raise LeftAlone(f"nothing is measured for a KV cache of {dtype}")
