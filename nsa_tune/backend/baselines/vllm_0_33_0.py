"""vLLM 0.33.0's own choices for DeepSeek sparse attention. Paths are relative to vllm.

vLLM looks at each sequence's new tokens: up to a threshold an extend counts as a decode, and goes
to the decode kernel. Of a ragged batch, the mean decides here.
"""

from __future__ import annotations

from nsa_tune.backend.baselines.baseline import Default, Rule, capability, kernel_here
from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting

__all__ = ["VLLM_0_33_0"]

_HOPPER_THRESHOLDS = {16: 128, 32: 128, 64: 256, 128: 256}
_BLACKWELL_THRESHOLDS = {8: 128, 16: 128, 32: 128, 64: 256, 128: 1024}
_FEWEST_HEADS = 32
"""Local heads from which on an fp8 prefill is widened for the bf16 kernel."""


def _short(batch: Batch, setting: Setting) -> bool:
    """Whether the new tokens of a sequence are few enough to count as a decode."""
    if 100 <= capability(setting) < 110:
        threshold = _BLACKWELL_THRESHOLDS.get(setting.heads, 1024)
    else:
        threshold = _HOPPER_THRESHOLDS.get(setting.heads, 256)
    return batch.q_tokens <= threshold * batch.sequences


def _prefill_path(batch: Batch, setting: Setting) -> str:
    sm = capability(setting)
    dense = (
        batch.mode is Mode.EXTEND
        and not batch.captured
        and (sm == 90 or 100 <= sm < 110)
        and batch.max_kv <= setting.profile.index_topk
        and not _short(batch, setting)
    )
    return "mha" if dense else "mla"


def _mha_kernel(batch: Batch, setting: Setting) -> str:
    del batch
    if capability(setting) < 100:
        return kernel_here("fa3", setting)
    profile = setting.profile
    wide = (profile.nope, profile.rope, profile.v) == (192, 64, 256)
    return "trtllm_ragged" if wide and capability(setting) < 110 else "fa4"


def _sparse_prefill(batch: Batch, setting: Setting) -> str:
    sm = capability(setting)
    if setting.layout is KVLayout.FP8_PACKED:
        if sm >= 100:
            return "trtllm"
        mixed = setting.heads < _FEWEST_HEADS or _short(batch, setting)
        return kernel_here("flashmla_kv" if mixed else "flashmla_sparse", setting)
    if sm >= 100:
        return "fa4" if setting.heads <= 16 else "flashmla_sparse"
    return "fa3" if setting.device.arch != "cpu" else "torch_sparse"


def _decode(batch: Batch, setting: Setting) -> str:
    # One backend is picked for prefill and decode alike.
    del batch
    sm = capability(setting)
    if setting.layout is KVLayout.FP8_PACKED:
        return "trtllm" if sm >= 100 else kernel_here("flashmla_kv", setting)
    if sm >= 100:
        return "fa4" if setting.heads <= 16 else "flashmla_sparse"
    return "fa3" if setting.device.arch != "cpu" else "torch_sparse"


def _indexer_layout(batch: Batch, setting: Setting) -> str:
    # vLLM brings a DeepGEMM of its own, which takes 4 on SM90 as well.
    native = batch.next_n in (1, 2, 4) or 100 <= capability(setting) < 110
    return "native" if native else "flatten"


def _indexer_metadata(batch: Batch, setting: Setting) -> str:
    del batch
    return "torch" if setting.device.arch == "cpu" else "deep_gemm"


def _v4_prefill(batch: Batch, setting: Setting) -> str:
    del batch
    return "torch_sparse" if setting.device.arch == "cpu" else "sparse_fwd"


VLLM_0_33_0 = Rule(
    "vLLM 0.33.0",
    {
        "prefill_path": Default(
            _prefill_path,
            "model_executor/layers/attention/sparse_mla_attention.py:136, "
            "v1/attention/backends/mla/flashmla_sparse.py:367",
        ),
        "mha_kernel": Default(_mha_kernel, "platforms/interface.py:461"),
        "sparse_prefill": Default(
            _sparse_prefill,
            "platforms/cuda.py:97, v1/attention/backends/mla/flashmla_sparse.py:442",
        ),
        "decode": Default(_decode, "platforms/cuda.py:97"),
        "indexer_layout": Default(
            _indexer_layout, "v1/attention/backends/mla/indexer.py:958, utils/deep_gemm.py:684"
        ),
        "indexer_metadata": Default(_indexer_metadata, "v1/attention/backends/mla/indexer.py:1747"),
        "v4_prefill_c4": Default(_v4_prefill, "models/deepseek_v4/nvidia/flashmla.py:390"),
        "v4_prefill_c128": Default(_v4_prefill, "models/deepseek_v4/nvidia/flashmla.py:390"),
    },
)
