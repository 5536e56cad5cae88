"""FlashInfer's dense and TRT-LLM kernels, and the one workspace a device that they share."""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from nsa_tune.backend import libraries as providers
from nsa_tune.backend.libraries.flashinfer.limits import WORKSPACE_BYTES, WORKSPACE_BYTES_TRTLLM

if TYPE_CHECKING:
    import torch

_workspaces: dict[str, torch.Tensor] = {}
_making = Lock()


@cache
def _module(name: str) -> Any:
    import importlib

    providers.load("flashinfer")
    return importlib.import_module(name)


def workspace(device: torch.device) -> torch.Tensor:
    """The float workspace of `device`, made once; kernels on one stream may share it.

    Zeroed, as TRT-LLM's kernels need it before their first use and leave it after each.
    """
    import torch

    with _making:
        made = _workspaces.get(str(device))
        if made is None:
            major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
            size = WORKSPACE_BYTES_TRTLLM if major == 10 else WORKSPACE_BYTES
            made = torch.zeros(size, dtype=torch.uint8, device=device)
            _workspaces[str(device)] = made
        return made


def ragged_wrapper(device: torch.device, backend: str) -> Any:
    """A BatchPrefillWithRaggedKVCacheWrapper for `backend`: "fa2" or "fa3"; plan it, then run."""
    make = _module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper
    return make(workspace(device), "NHD", backend=backend)


def mla_wrapper(device: torch.device, backend: str) -> Any:
    """A BatchMLAPagedAttentionWrapper for `backend`: "fa2" or "fa3"; plan it, then run."""
    return _module("flashinfer.mla").BatchMLAPagedAttentionWrapper(
        workspace(device), backend=backend
    )


def trtllm_ragged(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts_q: torch.Tensor,
    starts_kv: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    """trtllm_ragged_attention_deepseek, causal.

    Args:
        q: [q tokens, heads, nope + rope] bf16.
        keys: [kv tokens, heads, nope + rope] bf16.
        values: [kv tokens, heads, v] bf16.
        starts_q: [sequences + 1] int32: first query of each sequence.
        starts_kv: [sequences + 1] int32: first kv token of each sequence.
        longest: most new tokens and most kv tokens of a sequence.
        scale: softmax scale.

    Returns:
        [q tokens, heads, v] bf16.
    """
    out: torch.Tensor = _module("flashinfer.prefill").trtllm_ragged_attention_deepseek(
        query=q,
        key=keys,
        value=values,
        workspace_buffer=workspace(q.device),
        seq_lens=starts_kv.diff(),
        max_q_len=longest[0],
        max_kv_len=longest[1],
        bmm1_scale=scale,
        bmm2_scale=1.0,
        o_sf_scale=1.0,
        batch_size=starts_q.numel() - 1,
        window_left=-1,
        cum_seq_lens_q=starts_q,
        cum_seq_lens_kv=starts_kv,
        enable_pdl=False,
        is_causal=True,
        return_lse=False,
    )
    return out


def trtllm_sparse_decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    indices: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    nope: int,
    scale: float,
) -> torch.Tensor:
    """trtllm_batch_decode_with_kv_cache_mla over a selection, one row a query.

    Args:
        q: [rows, 1, heads, 576] bf16.
        pool: [pages, 1, page size, 576] bf16 or e4m3.
        indices: [rows, 1, topk] int32 slots, -1 where empty; topk a multiple of 4.
        seq_lens: [rows] int32 keys that each row sees, whether selected or not.
        max_seq_len: at least the largest of them.
        nope: width of a head's part without rope, 128.
        scale: softmax scale.

    Returns:
        [rows, 1, heads, 512] bf16.
    """
    out: torch.Tensor = _module("flashinfer.decode").trtllm_batch_decode_with_kv_cache_mla(
        query=q,
        kv_cache=pool,
        workspace_buffer=workspace(q.device),
        qk_nope_head_dim=nope,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=indices,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        sparse_mla_top_k=indices.shape[-1],
        bmm1_scale=scale,
        backend="trtllm-gen",
    )
    return out


def topk(
    scores: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, count: int
) -> torch.Tensor:
    """top_k_ragged_transform: the `count` largest scores of each row, exact.

    Graph-safe, as SGLang calls it (`dsa/dsa_topk_backend.py`). The other way takes a third less
    time; but where rows are few and long, its blocks wait for one another in one buffer that a
    device has, which two streams must not share.

    Args:
        scores: [rows, columns] fp32, contiguous. SGLang copies logits whose rows lie further apart.
        lengths: [rows] int32: how many scores of a row count.
        offsets: [rows] int32: what is added to a row's places.
        count: how many are wanted, 2048 at most.

    Returns:
        [rows, count] int32, in no order; -1 beyond a row's length.
    """
    out: torch.Tensor = _module("flashinfer").top_k_ragged_transform(
        scores, offsets, lengths, count, dsa_graph_safe=True
    )
    return out
