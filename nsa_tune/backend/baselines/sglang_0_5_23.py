"""SGLang 0.5.23's own choices for DeepSeek attention. Paths are relative to sglang/srt."""

from __future__ import annotations

from collections.abc import Callable

from nsa_tune.backend.baselines.baseline import (
    Baseline,
    Choose,
    Default,
    capability,
    kernel_here,
    unless_cpu,
)
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting

_SHARED_PREFIXES = 8192
"""SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD: prefix tokens of a batch from which dense MLA is
expanded."""
_GRAPH_TOKENS = 8192
"""Most new tokens of a prefill graph, if chunks are as large."""
V4_GRAPHS = (
    "Prefills of V4 Flash took 42% less by --cuda-graph-backend-prefill breakable (large ones up "
    "to 10% more; 43 layers, H200), which SGLang leaves off for its memory, there 7.1 GB"
)
"""What DeepSeek V4 gains by a flag alone (docs/gains.md)."""


def dense_eagerly(setting: Setting, threshold: int = _SHARED_PREFIXES) -> str | Choose:
    """The path of dense MLA without a graph: MHA without a prefix or with `threshold` cached
    tokens, whatever is new."""
    if capability(setting) >= 100:
        return "mha"
    return lambda batch: "mla" if 0 < batch.prefix_tokens < threshold else "mha"


def _dense_in(path: str) -> Callable[[Setting], str | Choose]:
    """`path` in a prefill graph, which holds the same for every batch, and eagerly beyond."""

    def of(setting: Setting) -> Choose:
        eager = dense_eagerly(setting)

        def choose(batch: Batch) -> str:
            if batch.captured or batch.q_tokens <= _GRAPH_TOKENS:
                return path
            return eager if isinstance(eager, str) else eager(batch)

        return choose

    return of


def _prefill_path(setting: Setting) -> str | Choose:
    if not setting.profile.has_indexer:
        return _dense_in("mla")(setting)
    sm = capability(setting)
    if sm != 90 and not 100 <= sm < 110:
        return "mla"
    topk, most = setting.profile.index_topk, setting.max_chunk_kv

    def choose(batch: Batch) -> str:
        short = batch.max_kv <= topk and batch.kv_tokens <= most
        return "mha" if short and batch.mode is Mode.EXTEND and not batch.captured else "mla"

    return choose


def _mha_kernel(setting: Setting) -> str | Choose:
    if not setting.profile.has_indexer and capability(setting) < 100:
        most, whole = setting.max_chunk_kv, "torch" if setting.device.arch == "cpu" else "sgl_fa3"
        return lambda batch: whole if batch.kv_tokens <= most else "sgl_fa3_merged"
    return "trtllm_ragged" if capability(setting) >= 100 else kernel_here("fa3", setting)


def _sparse_prefill(setting: Setting) -> str:
    if setting.layout is KVLayout.BF16:
        return kernel_here("flashmla_sparse", setting)
    return "trtllm" if capability(setting) >= 100 else kernel_here("flashmla_kv", setting)


def _v4_prefill(setting: Setting) -> str:
    # SGLANG_OPT_FLASHMLA_SPARSE_PREFILL is on by default, so that the number of rows, 11673,
    # which would decide otherwise, never does. SM120's kernels read the pools.
    if setting.device.arch == "cpu":
        return "torch_sparse"
    return "sparse_fwd" if capability(setting) < 120 else "with_kvcache"


def _indexer_layout(setting: Setting) -> str | Choose:
    if not 100 <= capability(setting) < 110:
        return "flatten"
    return _native_in_verify


def _native_in_verify(batch: Batch) -> str:
    return "native" if batch.mode is Mode.TARGET_VERIFY and batch.next_n >= 2 else "flatten"


def _absorbed(setting: Setting) -> str:
    return "trtllm" if capability(setting) >= 100 else kernel_here("fa3", setting)


def _decode(setting: Setting) -> str:
    if not setting.profile.has_indexer:
        return _absorbed(setting)
    if capability(setting) >= 100:
        return "trtllm"
    if setting.layout is KVLayout.FP8_PACKED:
        return kernel_here("flashmla_kv", setting)
    return "torch_sparse" if setting.device.arch == "cpu" else "fa3"


SGLANG_0_5_23 = Baseline(
    "SGLang 0.5.23",
    {
        "prefill_path": Default(
            _prefill_path,
            "layers/attention/dsa_backend.py:4049, "
            "models/deepseek_common/attention_backend_handler.py:108",
        ),
        "mha_kernel": Default(_mha_kernel, "layers/attention/dsa_backend.py:3373"),
        "sparse_prefill": Default(_sparse_prefill, "arg_groups/overrides.py:716"),
        "absorbed_prefill": Default(_absorbed, "arg_groups/model_override_base.py:338"),
        "v4_prefill_c4": Default(_v4_prefill, "layers/attention/deepseek_v4_backend.py:2917"),
        "v4_prefill_c128": Default(_v4_prefill, "layers/attention/deepseek_v4_backend.py:2917"),
        "indexer_layout": Default(_indexer_layout, "layers/attention/dsa_backend.py:938"),
        "decode": Default(_decode, "arg_groups/overrides.py:716"),
        "indexer_metadata": Default(unless_cpu("deep_gemm"), "layers/attention/dsa_backend.py:938"),
        # In chunks only where the logits pass 0.3 of the memory, or 0.2 of what is free; above a
        # quarter of the memory nothing else is allowed here.
        "indexer_prefill": Default(
            unless_cpu("ragged"),
            "layers/attention/dsa/dsa_indexer.py:1463, mqa_logits_utils.py:20",
        ),
        "indexer_topk": Default(
            unless_cpu("sglang"),
            "layers/attention/dsa/dsa_topk_backend.py:30, arg_groups/fields/exec_.py:386",
        ),
    },
)


def _dense_path(name: str, dense: Callable[[Setting], str | Choose]) -> Baseline:
    """The same engine with another path of dense MLA."""

    def path(setting: Setting) -> str | Choose:
        return _prefill_path(setting) if setting.profile.has_indexer else dense(setting)

    source = SGLANG_0_5_23.defaults["prefill_path"].source
    return Baseline(name, {**SGLANG_0_5_23.defaults, "prefill_path": Default(path, source)})


SGLANG_0_5_17 = _dense_path("SGLang 0.5.17", dense_eagerly)
"""Leaves dense MLA out of prefill graphs, as 0.5.23 does with --disable-prefill-cuda-graph."""
SGLANG_0_5_23_FULL = _dense_path("SGLang 0.5.23, full prefill graphs", _dense_in("mha"))
"""With --cuda-graph-backend-prefill full: MHA, by FlashAttention-3 as if no token were cached."""
