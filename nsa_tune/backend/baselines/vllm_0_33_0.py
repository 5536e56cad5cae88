"""vLLM 0.33.0's own choices for DeepSeek sparse attention. Paths are relative to vllm.

vLLM looks at each sequence's new tokens: up to a threshold an extend counts as a decode, and goes
to the decode kernel. Of a ragged batch, the mean decides here.
"""

from __future__ import annotations

from nsa_tune.backend.baselines.baseline import (
    Baseline,
    Default,
    capability,
    kernel_here,
    unless_cpu,
)
from nsa_tune.backend.types.formula import Switch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting

_HOPPER_THRESHOLDS = {16: 128, 32: 128, 64: 256, 128: 256}
_BLACKWELL_THRESHOLDS = {8: 128, 16: 128, 32: 128, 64: 256, 128: 1024}
_FEWEST_HEADS = 32
"""Local heads from which on an fp8 prefill is widened for the bf16 kernel."""


def _short(setting: Setting) -> str:
    """Whether the new tokens of a sequence are few enough to count as a decode."""
    if 100 <= capability(setting) < 110:
        threshold = _BLACKWELL_THRESHOLDS.get(setting.heads, 1024)
    else:
        threshold = _HOPPER_THRESHOLDS.get(setting.heads, 256)
    return f"q_tokens <= {threshold} * batch_size"


def _prefill_path(setting: Setting) -> str | Switch:
    sm = capability(setting)
    if sm != 90 and not 100 <= sm < 110:
        return "mla"
    within = f"max_kv <= {setting.profile.index_topk}"
    dense = f"is_extend and not captured and {within} and not {_short(setting)}"
    return Switch(dense, "mha", "mla")


def _mha_kernel(setting: Setting) -> str:
    if capability(setting) < 100:
        return kernel_here("fa3", setting)
    profile = setting.profile
    wide = (profile.nope, profile.rope, profile.v) == (192, 64, 256)
    return "trtllm_ragged" if wide and capability(setting) < 110 else "fa4"


def _sparse_prefill(setting: Setting) -> str | Switch:
    if setting.layout is KVLayout.FP8_PACKED:
        if capability(setting) >= 100:
            return "trtllm"
        mixed = kernel_here("flashmla_kv", setting)
        if setting.heads < _FEWEST_HEADS:
            return mixed
        return Switch(_short(setting), mixed, kernel_here("flashmla_sparse", setting))
    return _over_bf16(setting)


def _decode(setting: Setting) -> str:
    if setting.layout is KVLayout.FP8_PACKED:
        return "trtllm" if capability(setting) >= 100 else kernel_here("flashmla_kv", setting)
    return _over_bf16(setting)


def _over_bf16(setting: Setting) -> str:
    # One backend is picked for prefill and decode alike.
    if capability(setting) >= 100:
        return "fa4" if setting.heads <= 16 else "flashmla_sparse"
    return "fa3" if setting.device.arch != "cpu" else "torch_sparse"


def _indexer_layout(setting: Setting) -> str | Switch:
    # vLLM brings a DeepGEMM of its own, which takes 4 on SM90 as well.
    if 100 <= capability(setting) < 110:
        return "native"
    return Switch("next_n == 1 or next_n == 2 or next_n == 4", "native", "flatten")


def _indexer_prefill(setting: Setting) -> str | Switch:
    # 512 MiB of logits at a time: VLLM_SPARSE_INDEXER_MAX_LOGITS_MB.
    if setting.device.arch == "cpu":
        return "torch"
    return Switch(f"q_tokens * kv_tokens * 4 > {2**29}", "chunked", "ragged")


_V4_PREFILL = Default(
    unless_cpu("sparse_fwd", "torch_sparse"), "models/deepseek_v4/nvidia/flashmla.py:390"
)

VLLM_0_33_0 = Baseline(
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
        "indexer_metadata": Default(
            unless_cpu("deep_gemm"), "v1/attention/backends/mla/indexer.py:1747"
        ),
        "indexer_prefill": Default(_indexer_prefill, "v1/attention/backends/mla/indexer.py:1506"),
        # Kernels of its own: per_row in prefill; in decode cooperative up to 64 rows, and
        # persistent.
        "indexer_topk": Default(unless_cpu("vllm"), "indexer_topk.py:22"),
        "v4_prefill_c4": _V4_PREFILL,
        "v4_prefill_c128": _V4_PREFILL,
    },
)
