"""SGLang 0.5.23's own choices for DeepSeek sparse attention. Paths are relative to sglang/srt."""

from __future__ import annotations

from nsa_tune.backend.baselines.baseline import Default, Rule, capability, kernel_here
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting

__all__ = ["SGLANG_0_5_23"]


def _prefill_path(batch: Batch, setting: Setting) -> str:
    sm = capability(setting)
    dense = (
        batch.mode is Mode.EXTEND
        and not batch.captured
        and (sm == 90 or 100 <= sm < 110)
        and batch.max_kv <= setting.profile.index_topk
        and batch.kv_tokens <= setting.max_chunk_kv
    )
    return "mha" if dense else "mla"


def _mha_kernel(batch: Batch, setting: Setting) -> str:
    del batch
    return "trtllm_ragged" if capability(setting) >= 100 else kernel_here("fa3", setting)


def _sparse_prefill(batch: Batch, setting: Setting) -> str:
    del batch
    if setting.layout is KVLayout.BF16:
        return kernel_here("flashmla_sparse", setting)
    return "trtllm" if capability(setting) >= 100 else kernel_here("flashmla_kv", setting)


def _v4_prefill(batch: Batch, setting: Setting) -> str:
    # SGLANG_OPT_FLASHMLA_SPARSE_PREFILL is on by default, so that the number of rows, 11673,
    # which would decide otherwise, never does. SM120's kernels read the pools.
    del batch
    if setting.device.arch == "cpu":
        return "torch_sparse"
    return "sparse_fwd" if capability(setting) < 120 else "with_kvcache"


def _indexer_layout(batch: Batch, setting: Setting) -> str:
    native = (
        batch.mode is Mode.TARGET_VERIFY and batch.next_n >= 2 and 100 <= capability(setting) < 110
    )
    return "native" if native else "flatten"


def _decode(batch: Batch, setting: Setting) -> str:
    del batch
    if capability(setting) >= 100:
        return "trtllm"
    if setting.layout is KVLayout.FP8_PACKED:
        return kernel_here("flashmla_kv", setting)
    return "torch_sparse" if setting.device.arch == "cpu" else "fa3"


def _indexer_metadata(batch: Batch, setting: Setting) -> str:
    del batch
    return "torch" if setting.device.arch == "cpu" else "deep_gemm"


SGLANG_0_5_23 = Rule(
    "SGLang 0.5.23",
    {
        "prefill_path": Default(_prefill_path, "layers/attention/dsa_backend.py:4049"),
        "mha_kernel": Default(_mha_kernel, "layers/attention/dsa_backend.py:3373"),
        "sparse_prefill": Default(_sparse_prefill, "arg_groups/overrides.py:716"),
        "v4_prefill_c4": Default(_v4_prefill, "layers/attention/deepseek_v4_backend.py:2917"),
        "v4_prefill_c128": Default(_v4_prefill, "layers/attention/deepseek_v4_backend.py:2917"),
        "indexer_layout": Default(_indexer_layout, "layers/attention/dsa_backend.py:938"),
        "decode": Default(_decode, "arg_groups/overrides.py:716"),
        "indexer_metadata": Default(_indexer_metadata, "layers/attention/dsa_backend.py:938"),
    },
)
