"""What of vLLM the plug-in touches, by release. All else here is the same for every release.

Each symbol, signature and name was read from the wheels of 0.31.0, 0.32.0 and 0.33.0, and the tests
read them again. vLLM moves such code often: a release that is not in the table is left alone.
"""

from __future__ import annotations

from nsa_tune.engines.releases import KnownReleases, Release
from nsa_tune.engines.symbols import Symbol

_BACKENDS = "vllm.v1.attention.backends.mla"
_BUILDER = ("self", "kv_cache_spec", "layer_names", "vllm_config", "device")
_BUILD = ("self", "common_prefix_len", "common_attn_metadata", "fast_build")

_SYMBOLS = (
    Symbol(
        "flashmla", f"{_BACKENDS}.flashmla_sparse", "FlashMLASparseMetadataBuilder.__init__",
        _BUILDER, True,
    ),
    Symbol(
        "flashmla_build", f"{_BACKENDS}.flashmla_sparse", "FlashMLASparseMetadataBuilder.build",
        _BUILD, True,
    ),
    Symbol(
        "fa3", f"{_BACKENDS}.flashattn_mla_sparse", "FlashAttnMLASparseMetadataBuilder.__init__",
        _BUILDER, True,
    ),
    Symbol(
        "common_build", "vllm.model_executor.layers.attention.sparse_mla_attention",
        "SparseMLACommonMetadataBuilder.build", _BUILD, True,
    ),
    Symbol(
        "dense", f"{_BACKENDS}.flashattn_mla", "FlashAttnMLAMetadataBuilder.__init__", _BUILDER,
        True,
    ),
    Symbol(
        "dense_build", "vllm.model_executor.layers.attention.mla_attention",
        "MLACommonMetadataBuilder.build", _BUILD, True,
    ),
    Symbol(
        "capture", "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build_for_cudagraph_capture", ("self", "common_attn_metadata"),
        True,
    ),
)  # fmt: skip

RELEASES = (Release((0, 31), (0, 33), _SYMBOLS),)

KNOWN = KnownReleases("vllm", RELEASES)
release_of = KNOWN.release_of
checked = KNOWN.checked
