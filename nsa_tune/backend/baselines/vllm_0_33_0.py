"""vLLM 0.33.0's own choices for DeepSeek attention. Paths are relative to vllm.

vLLM looks at each sequence's new tokens: up to a threshold an extend counts as a decode, and goes
to the decode kernel. Of a ragged batch, the mean decides here.
"""

from __future__ import annotations

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

_HOPPER_THRESHOLDS = {16: 128, 32: 128, 64: 256, 128: 256}
_BLACKWELL_THRESHOLDS = {8: 128, 16: 128, 32: 128, 64: 256, 128: 1024}
_FEWEST_HEADS = 32
"""Local heads from which on an fp8 prefill is widened for the bf16 kernel."""


def _most_decoded(setting: Setting) -> int:
    """New tokens of a sequence up to which an extend counts as a decode."""
    if 100 <= capability(setting) < 110:
        return _BLACKWELL_THRESHOLDS.get(setting.heads, 1024)
    return _HOPPER_THRESHOLDS.get(setting.heads, 256)


_DENSE_DECODED = 512
"""New tokens of a sequence up to which FLASH_ATTN_MLA, the default over bf16 on Hopper, absorbs;
FLASHMLA has 128, and Blackwell's backends 1."""


def dense_path(most: int) -> Choose:
    """MHA where a sequence has more than `most` new tokens on average."""
    return lambda batch: "mla" if batch.q_tokens <= most * batch.batch_size else "mha"


def _prefill_path(setting: Setting) -> str | Choose:
    if not setting.profile.has_indexer:
        return dense_path(_DENSE_DECODED if capability(setting) < 100 else 1)
    sm = capability(setting)
    if sm != 90 and not 100 <= sm < 110:
        return "mla"
    topk, most = setting.profile.index_topk, _most_decoded(setting)

    def choose(batch: Batch) -> str:
        is_decode = batch.q_tokens <= most * batch.batch_size
        extends = batch.mode is Mode.EXTEND and not batch.captured and not is_decode
        return "mha" if extends and batch.max_kv <= topk else "mla"

    return choose


def _mha_kernel(setting: Setting) -> str | Choose:
    if not setting.profile.has_indexer and setting.device.arch == "sm90":
        return lambda batch: "sgl_fa3_merged" if batch.prefix_tokens else "sgl_fa3"
    if capability(setting) < 100:
        return kernel_here("fa3", setting)
    profile = setting.profile
    wide = (profile.nope, profile.rope, profile.v) == (192, 64, 256)
    return "trtllm_ragged" if wide and capability(setting) < 110 else "fa4"


def _sparse_prefill(setting: Setting) -> str | Choose:
    if setting.layout is KVLayout.FP8_PACKED:
        if capability(setting) >= 100:
            return "trtllm"
        mixed = kernel_here("flashmla_kv", setting)
        if setting.heads < _FEWEST_HEADS:
            return mixed
        widened, most = kernel_here("flashmla_sparse", setting), _most_decoded(setting)
        return lambda batch: mixed if batch.q_tokens <= most * batch.batch_size else widened
    return _over_bf16(setting)


def _absorbed(setting: Setting) -> str:
    if capability(setting) >= 100:
        return "trtllm"
    return "torch" if setting.device.arch == "cpu" else "fa3_paged"


def _decode(setting: Setting) -> str:
    if not setting.profile.has_indexer:
        return _absorbed(setting)
    if setting.layout is KVLayout.FP8_PACKED:
        return "trtllm" if capability(setting) >= 100 else kernel_here("flashmla_kv", setting)
    return _over_bf16(setting)


def _over_bf16(setting: Setting) -> str:
    # One backend is picked for prefill and decode alike.
    if capability(setting) >= 100:
        return "fa4" if setting.heads <= 16 else "flashmla_sparse"
    return "fa3" if setting.device.arch != "cpu" else "torch_sparse"


def _indexer_layout(setting: Setting) -> str | Choose:
    # vLLM brings a DeepGEMM of its own, which takes 4 on SM90 as well.
    if 100 <= capability(setting) < 110:
        return "native"
    return lambda batch: "native" if batch.next_n in (1, 2, 4) else "flatten"


def _indexer_prefill(setting: Setting) -> str | Choose:
    # 512 MiB of logits at a time: VLLM_SPARSE_INDEXER_MAX_LOGITS_MB.
    if setting.device.arch == "cpu":
        return "torch"
    most = 2**29 // 4
    return lambda batch: "chunked" if batch.q_tokens * batch.kv_tokens > most else "ragged"


_V4_PREFILL = Default(
    unless_cpu("sparse_fwd", "torch_sparse"), "models/deepseek_v4/nvidia/flashmla.py:390"
)

VLLM_0_33_0 = Baseline(
    "vLLM 0.33.0",
    {
        "prefill_path": Default(
            _prefill_path,
            "model_executor/layers/attention/sparse_mla_attention.py:136, "
            "v1/attention/backends/mla/flashmla_sparse.py:367, flashattn_mla.py:129",
        ),
        "mha_kernel": Default(_mha_kernel, "platforms/interface.py:461"),
        "sparse_prefill": Default(
            _sparse_prefill,
            "platforms/cuda.py:97, v1/attention/backends/mla/flashmla_sparse.py:442",
        ),
        "absorbed_prefill": Default(_absorbed, "platforms/cuda.py:97"),
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
