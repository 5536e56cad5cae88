"""What the plug-in must know of an attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nsa_tune.backend.libraries.flash_mla.limits import padded_heads
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.profiles import ALL_TOKENS, PROFILES, ModelProfile
from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.sglang.ranks import parallel

TRITON = "triton_sparse_mla"
"""SGLang's kernel for few heads. In an arm's name its flag --dsa-triton-union follows, if not 0."""
PAGE = 64
"""Tokens of a page of the KV pool."""
_HIDDEN = 7168
"""Width of V3, R1 and Kimi K2. V2 and others share the shape of their attention, and never ran."""
_CHUNK = 8192
"""SGLang's own chunk on an 80 GB GPU, where no size was asked for."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One backend, as a table is looked up for it."""

    profile: ModelProfile
    heads: int
    """Local heads."""
    layout: KVLayout
    impl: str
    """The prefill implementation that it was started with."""
    scratch_bytes: int
    """What flashmla_kv takes for a full chunk: the engine has kept that much memory free."""
    scratch_bytes_a_query: int
    """What flashmla_kv takes for each new token: one fp32 row of the latent's rank a head."""

    layers: int | None
    """Attention layers that this process runs; None where the engine does not say."""

    @property
    def kv_dtype(self) -> str:
        """As `Dispatcher.open` takes it."""
        return "fp8" if self.layout is KVLayout.FP8_PACKED else "bf16"

    def __str__(self) -> str:
        return f"{self.profile.name}, {self.heads} local heads, {self.kv_dtype} KV"


def is_dense_mla(backend: Any) -> bool:
    """Whether a backend is SGLang's FlashAttention-3 for MLA without an indexer."""
    names = {kind.__name__ for kind in type(backend).__mro__}
    return (
        "FlashAttentionBackend" in names
        and bool(getattr(backend, "use_mla", False))
        and getattr(backend, "fa_impl_ver", None) == 3
    )


def index_topk_of(backend: Any) -> int:
    """Tokens that a query attends to at most: ALL_TOKENS without an indexer."""
    return int(getattr(backend, "dsa_index_topk", ALL_TOKENS))


def heads_of(backend: Any, model_config: Any) -> int:
    """Local heads."""
    heads = getattr(backend, "num_q_heads", None)
    return int(heads or model_config.num_attention_heads // parallel().attn_tp_size)


def mha_bytes(model_runner: Any) -> int:
    """What a token's query, key and value of all local heads take by MHA, in bf16."""
    backend, config = model_runner.attn_backend, model_runner.model_config
    # Only DSA's backend has them itself.
    shape = config if is_dense_mla(backend) else backend
    head_dim = 2 * (shape.qk_nope_head_dim + shape.qk_rope_head_dim) + config.v_head_dim
    return 2 * int(heads_of(backend, config) * head_dim)


def _dense_facts(backend: Any, model_runner: Any) -> Facts:
    config, layers = model_runner.model_config, _layers(model_runner)
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    shape = tuple(getattr(config, name, None) for name in names)
    alike = [
        profile
        for profile in PROFILES.values()
        if not profile.has_indexer
        and config.hidden_size == _HIDDEN
        and shape == (profile.rank, profile.nope, profile.rope, profile.v)
    ]
    # Kimi K2 differs from V3 in its heads only.
    alike.sort(key=lambda profile: profile.heads != config.num_attention_heads)
    if not alike:
        given = ", ".join(f"{name} {value}" for name, value in zip(names, shape, strict=True))
        given = f"hidden_size {config.hidden_size}, {given}"
        raise LeftAlone(f"no model profile has {given} and no indexer")
    dtype = str(getattr(model_runner, "kv_cache_dtype", None))
    if dtype != "torch.bfloat16":
        raise LeftAlone(f"nothing is measured for a KV pool of {dtype}")
    return Facts(
        alike[0], heads_of(backend, config), KVLayout.BF16, "fa3", scratch_bytes=0,
        scratch_bytes_a_query=0, layers=layers,
    )  # fmt: skip


def facts_of(backend: Any, model_runner: Any) -> Facts:
    """The facts of a DSA or dense MLA backend that the engine has just built.

    Raises:
        LeftAlone: for a model or a pool that nothing was measured for.
    """
    if is_dense_mla(backend):
        return _dense_facts(backend, model_runner)
    profile = _profile(backend, model_runner.model_config)
    chunk = model_runner.server_args.chunked_prefill_size or 0
    padded = padded_heads(backend.num_q_heads) or backend.num_q_heads
    each = padded * profile.rank * 4
    return Facts(
        profile,
        backend.num_q_heads,
        _layout(backend, profile),
        kernel_of(backend),
        scratch_bytes=(chunk if chunk > 0 else _CHUNK) * each,
        scratch_bytes_a_query=each,
        layers=_layers(model_runner),
    )


def kernel_of(backend: Any) -> str:
    """A DSA backend's kernel for MLA in prefill, by its arm's name."""
    impl, union = str(backend.dsa_prefill_impl), getattr(backend, "dsa_triton_union", 0)
    return f"{impl}_union{union}" if impl == TRITON and union else impl


def _layers(model_runner: Any) -> int | None:
    count = getattr(getattr(model_runner, "layer_info", None), "num_effective_layers", None)
    return count if type(count) is int and count > 0 else None


def _profile(backend: Any, model_config: Any) -> ModelProfile:
    text_config = getattr(model_config, "hf_text_config", None)
    shape = {
        "kv_lora_rank": backend.kv_lora_rank,
        "qk_nope_head_dim": backend.qk_nope_head_dim,
        "qk_rope_head_dim": backend.qk_rope_head_dim,
        "v_head_dim": getattr(model_config, "v_head_dim", None),
        "index_n_heads": getattr(text_config, "index_n_heads", None),
        "index_head_dim": getattr(model_config, "index_head_dim", None),
        "index_topk": backend.dsa_index_topk,
    }
    for profile in PROFILES.values():
        if tuple(shape.values()) == (
            profile.rank, profile.nope, profile.rope, profile.v, profile.index_heads,
            profile.index_dim, profile.index_topk,
        ):  # fmt: skip
            return profile
    given = ", ".join(f"{name} {value}" for name, value in shape.items())
    raise LeftAlone(f"no model profile has {given}")


def _layout(backend: Any, profile: ModelProfile) -> KVLayout:
    pool = backend.token_to_kv_pool
    if backend.dsa_kv_cache_store_fp8:
        packed = KVLayout.FP8_PACKED
        if backend.kv_cache_dim == packed.token_bytes(profile.rank, profile.rope):
            return packed
    elif str(pool.dtype) == "torch.bfloat16" and backend.kv_cache_dim == profile.latent:
        return KVLayout.BF16
    raise LeftAlone(
        f"nothing is measured for a KV pool of {pool.dtype} with rows of {backend.kv_cache_dim}"
    )
