"""What of SGLang the plug-in touches, by release. All else here is the same for every release.

Each symbol, signature and name was read from the wheels of 0.5.17 to 0.5.23, and the tests read
the first two and the last of them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.releases import KnownReleases, Release, Version
from nsa_tune.engines.symbols import Symbol, changed

AUTO = "flashmla_auto"
"""The value of `dsa_prefill_impl` with which the engine chooses anew in each pass."""


@dataclass(frozen=True, slots=True)
class SGLangRelease(Release):
    """One of SGLang. Of its symbols "backend" comes first: the others of its class do nothing for a
    backend that it has not seen."""

    prefill_impls: Mapping[KVLayout, frozenset[str]]
    """Values of `dsa_prefill_impl` that read one pool layout: a batch may have any of these."""
    prefill_auto: Mapping[KVLayout, frozenset[str]]
    """What the engine may make of AUTO."""
    graph_tokens: int
    """New tokens up to which a prefill runs as a CUDA graph by default, for MLA models."""
    known: bool = True
    """Whether its sources were read. Of another one only what an engine's start proves is taken."""


_MODULE = "sglang.srt.layers.attention.dsa_backend"
_CLASS = "DeepseekSparseAttnBackend"
_RUNNER = "sglang.srt.model_executor.model_runner"
_GRAPHS = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
_DECODE_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
_BREAKABLE = "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend"
DENSE_PATHS = "sglang.srt.models.deepseek_common.attention_backend_handler"
"""Where dense MLA chooses between MHA and MLA, in each layer."""
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
"""Where the indexer is."""
TOPK_MODULE = "sglang.srt.layers.attention.dsa.dsa_topk_backend"
"""Where it selects keys."""
_DEQUANTIZE = "sglang.kernels.ops.attention.dsa.dequant_k_cache"
_DEQUANTIZE_ARGUMENTS = ("quant_k_cache", "page_table_1_flattened", "group_size")

_SYMBOLS = (
    Symbol("backend", _MODULE, f"{_CLASS}.__init__", ("self", "model_runner"), False),
    Symbol(
        "prefill", _MODULE, f"{_CLASS}.set_dsa_prefill_impl", ("self", "forward_batch"), True
    ),
    Symbol(
        "indexer", _MODULE, f"{_CLASS}._build_paged_mqa_schedule_2d_ctx_lens",
        ("self", "forward_mode", "cache_seqlens_int32", "seqlens_expanded", "batch_size"),
        True,
    ),
    Symbol(
        "init_graphs", _RUNNER, "ModelRunner.init_cuda_graphs",
        ("self", "capture_decode_cuda_graph"), False,
    ),
    Symbol(
        "forward", _RUNNER, "ModelRunner._forward_raw",
        ("self", "forward_batch", "pp_proxy_tensors"), False,
    ),
    Symbol(
        "can_run", _GRAPHS, "PrefillCudaGraphRunner.can_run_graph", ("self", "forward_batch"), True
    ),
    Symbol("capture", _GRAPHS, "PrefillCudaGraphRunner._capture_one_stream", ("self",), True),
    Symbol(
        "capture_decode", _DECODE_GRAPHS, "DecodeCudaGraphRunner._capture_one_stream",
        ("self", "stream_idx"), True,
    ),
    Symbol(
        "prepare_metadata", _GRAPHS,
        "PrefillCudaGraphRunner._prepare_forward_metadata_for_replay",
        ("self", "forward_batch", "static_forward_batch"), False,
    ),
    Symbol(
        "extend", _MODULE, f"{_CLASS}.forward_extend",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "q_rope", "k_rope"),
        False,
    ),
    Symbol(
        "dense_path", DENSE_PATHS, "_handle_attention_backend",
        ("attn", "forward_batch", "backend_name"), True,
    ),
    Symbol("k_only", INDEXER, "Indexer._forward_cuda_k_only", ("self",), False),
    Symbol(
        "replay", _BREAKABLE, "BreakableCudaGraphBackend.replay",
        ("self", "shape_key", "static_forward_batch"), False,
    ),
    Symbol(
        "topk", TOPK_MODULE, "DSATopKBackend.topk_transform",
        ("self", "logits", "lengths", "topk", "topk_transform_method", "attn_metadata",
         "cu_seqlens_q_topk", "topk_indices_offset", "row_starts", "batch_idx_list",
         "force_unfused_topk"),
        True,
    ),
    Symbol(
        "fa3", _MODULE, f"{_CLASS}._forward_fa3",
        ("self", "q_rope", "kv_cache", "v_head_dim", "q_nope", "page_table", "cache_seqlens",
         "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "sm_scale", "logit_cap", "page_size"),
        True,
    ),
    Symbol(
        "sparse", _MODULE, f"{_CLASS}._forward_flashmla_sparse",
        ("self", "q_all", "kv_cache", "v_head_dim", "page_table_1", "sm_scale", "topk_length"),
        False,
    ),
    Symbol("read_back", _DEQUANTIZE, "dequantize_k_cache_paged", _DEQUANTIZE_ARGUMENTS, True),
)  # fmt: skip
"""Measured in 0.5.17 and 0.5.23; of the others the sources were read. From 0.5.23 on
`prepare_metadata` says where the pass stops reading what is shared with the scheduler. The hook
does not say so: SGLang then waits for the whole pass, as it does wherever it does not know."""

_SINCE_0_5_17 = SGLangRelease(
    first=(0, 5, 17),
    last=(0, 5, 21),
    symbols=_SYMBOLS,
    prefill_impls={
        KVLayout.FP8_PACKED: frozenset({"flashmla_kv", "flashmla_sparse"}),
        # tilelang reads it too, but compiles for many seconds at its first call.
        KVLayout.BF16: frozenset({"flashmla_sparse", "fa3"}),
    },
    prefill_auto={
        KVLayout.FP8_PACKED: frozenset({"flashmla_kv", "flashmla_sparse"}),
        KVLayout.BF16: frozenset({"flashmla_sparse"}),
    },
    graph_tokens=2048,
)  # fmt: skip
_TRITON = frozenset({"triton_sparse_mla", "triton_sparse_mla_union4"})
_SINCE_0_5_22 = replace(
    _SINCE_0_5_17, first=(0, 5, 22), last=(0, 5, 22),
    prefill_impls={of: impls | _TRITON for of, impls in _SINCE_0_5_17.prefill_impls.items()},
)  # fmt: skip
_SINCE_0_5_23 = replace(
    _SINCE_0_5_22, first=(0, 5, 23), last=(0, 5, 23),
    symbols=changed(
        _SYMBOLS,
        Symbol(
            "read_back", _DEQUANTIZE, "dequantize_k_cache_paged_dsa", _DEQUANTIZE_ARGUMENTS, True
        ),
    ),
    graph_tokens=8192,
)  # fmt: skip

RELEASES = (
    _SINCE_0_5_17,
    _SINCE_0_5_22,
    _SINCE_0_5_23,
)


def _newer(last: SGLangRelease, version: Version) -> SGLangRelease:
    return replace(last, first=version, last=version, known=False)


KNOWN = KnownReleases("sglang", RELEASES, _newer)
release_of = KNOWN.release_of
installed_version = KNOWN.installed_version
installed_release = KNOWN.installed
checked = KNOWN.checked
