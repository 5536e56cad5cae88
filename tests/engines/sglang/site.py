"""A directory that looks like an environment with SGLang and nsa-tune in it.

The wheel's own `plugins` package and environment variables are real; the attention backends are
modules of two dozen lines with the same names.
"""

from __future__ import annotations

from pathlib import Path

from tests.engines.sglang.wheels import Wheel
from tests.engines.site import EngineSite

_BACKEND = """
class DeepseekSparseAttnBackend:
    def __init__(self, model_runner, skip_prefill=False):
        self.runner = model_runner

    def set_dsa_prefill_impl(self, forward_batch=None):
        self.use_mha = False

    def _build_paged_mqa_schedule_2d_ctx_lens(
        self, forward_mode, cache_seqlens_int32, seqlens_expanded, batch_size
    ):
        return seqlens_expanded

    def forward_extend(
        self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None
    ):
        return q

    def _forward_fa3(
        self, q_rope, kv_cache, v_head_dim, q_nope, page_table, cache_seqlens, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, sm_scale, logit_cap, page_size,
    ):
        return q_nope

    def _forward_flashmla_sparse(
        self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None
    ):
        return q_all
"""
_READ_BACK = """
def dequantize_k_cache_paged(quant_k_cache, page_table_1_flattened, group_size=128):
    return quant_k_cache


def dequantize_k_cache_paged_dsa(quant_k_cache, page_table_1_flattened, group_size=128):
    return quant_k_cache
"""
_INDEXER = """
class Indexer:
    def _forward_cuda_k_only(self, x, positions, forward_batch, layer_id, return_indices=True):
        return None
"""
_DENSE_PATHS = """
def _handle_attention_backend(attn, forward_batch, backend_name):
    return None
"""
_TOPK = """
from enum import Enum


class DSATopKBackend(Enum):
    SGL_KERNEL = "sgl-kernel"

    def topk_transform(
        self, logits, lengths, topk, topk_transform_method, attn_metadata, cu_seqlens_q_topk=None,
        topk_indices_offset=None, row_starts=None, batch_idx_list=None, force_unfused_topk=False,
    ):
        return logits
"""
_RUNNER = """
class ModelRunner:
    def init_cuda_graphs(self, capture_decode_cuda_graph=True):
        pass

    def _forward_raw(
        self, forward_batch, pp_proxy_tensors, reinit_attn_backend=False, split_forward_count=1
    ):
        return forward_batch
"""
_PREFILL_GRAPHS = """
class PrefillCudaGraphRunner:
    def can_run_graph(self, forward_batch):
        return True

    def _capture_one_stream(self):
        pass

    def _prepare_forward_metadata_for_replay(
        self, forward_batch, static_forward_batch, num_tokens
    ):
        pass
"""
_DECODE_GRAPHS = """
class DecodeCudaGraphRunner:
    def _capture_one_stream(self, stream_idx=None):
        pass
"""
_BREAKABLE = """
class BreakableCudaGraphBackend:
    def replay(self, shape_key, static_forward_batch, **kwargs):
        return shape_key
"""
_EXECUTOR = "sglang/srt/model_executor"
_REAL = (
    "sglang/srt/environ.py", "sglang/srt/debug_utils/cuda_coredump.py", "sglang/srt/plugins/",
)  # fmt: skip


class Site(EngineSite):
    """The directory, and programs run with it."""

    def __init__(self, folder: Path, wheel: Wheel, *, version: str | None = None) -> None:
        version = version or wheel.version
        super().__init__(folder, engine="sglang", version=version, group="sglang.srt.plugins")
        for name in wheel.names():
            if name.startswith(_REAL) and name.endswith(".py"):
                self.write(name, wheel.text(name))
        self.backend(_BACKEND)
        self.write("sglang/srt/layers/attention/dsa/dsa_indexer.py", _INDEXER)
        self.write("sglang/srt/layers/attention/dsa/dsa_topk_backend.py", _TOPK)
        self.write("sglang/srt/models/deepseek_common/attention_backend_handler.py", _DENSE_PATHS)
        self.write("sglang/kernels/ops/attention/dsa/dequant_k_cache.py", _READ_BACK)
        self.write(f"{_EXECUTOR}/model_runner.py", _RUNNER)
        self.write(f"{_EXECUTOR}/runner/prefill_cuda_graph_runner.py", _PREFILL_GRAPHS)
        self.write(f"{_EXECUTOR}/runner/decode_cuda_graph_runner.py", _DECODE_GRAPHS)
        self.write(f"{_EXECUTOR}/runner_backend/breakable_cuda_graph_backend.py", _BREAKABLE)
        self.packages("sglang")

    def backend(self, text: str) -> None:
        """Make `text` the module of the attention backend."""
        self.write("sglang/srt/layers/attention/dsa_backend.py", text)
