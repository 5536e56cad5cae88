"""SGLang's sparse attention that is compiled where it runs, as its DSA backend calls it.

Read in SGLang 0.5.17 and 0.5.23 (`sglang/kernels/ops/attention/`, `sglang/srt/layers/attention/
dsa_backend.py`). Each compiles at its first call, with nvcc but for Triton's: many seconds, which
must not be in a capture.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from nsa_tune._errors import LibraryMissing
from nsa_tune.backend import libraries as providers

if TYPE_CHECKING:
    import torch

_CASTS = (
    "sglang.kernels.ops.attention.mla_qk_prep",
    "sglang.kernels.ops.kvcache.cache_ops",
)
"""Where the kernel is that rounds q: in 0.5.23, and in 0.5.17."""


@cache
def _module(library: str) -> Any:
    return providers.load(library)


@cache
def _cast() -> Any:
    for name in _CASTS:
        try:
            return importlib.import_module(name).concat_and_cast_q_fp8_pad
        except (ImportError, AttributeError):
            continue
    raise LibraryMissing("this sglang has no concat_and_cast_q_fp8_pad: pip install sglang==0.5.17")


def triton_sparse(
    q: torch.Tensor, latents: torch.Tensor, indices: torch.Tensor, scale: float, rank: int,
    lengths: torch.Tensor, union: int,
) -> torch.Tensor:  # fmt: skip
    """Sparse prefill in Triton for few heads, SGLang's backend "triton_sparse_mla" since 0.5.22.

    `dsa_backend.py:3245` (`_forward_triton_sparse_mla`) calls
    `dsa/triton_sparse_mla_prefill.py` (`sparse_mla_prefill`). A program has 16 or 32 rows: a
    query's heads, or those of `union` neighbouring queries over all keys that any of them selects.

    Args:
        q: [rows, heads, 576] bf16, contiguous.
        latents: [tokens, 576] bf16, contiguous.
        indices: [rows, topk] int32 into `latents`, none twice in a row; -1 is left out, others are
            read unchecked.
        scale: softmax scale.
        rank: width of the output.
        lengths: [rows] int32, how many leading indices count; not read with a `union`.
        union: 0, 2 or 4: its flag --dsa-triton-union. SGLang captures no graph with 2 or 4.

    Returns:
        [rows, heads, rank] bf16.
    """
    call = _module("sglang_triton").sparse_mla_prefill
    out: torch.Tensor = call(q, latents, indices, scale, rank, topk_length=lengths, union=union)
    return out


def triton_splits(lengths: torch.Tensor, heads: int, most: int, sms: int) -> torch.Tensor:
    """Into how many parts SGLang's Triton decode splits each sequence, as it computes them once a
    pass: `triton_backend.py` (`get_num_kv_splits`).

    Args:
        lengths: [sequences] int32: kv tokens of each.
        heads: query heads of the one kv head.
        most: parts of a sequence at most (`--triton-attention-num-kv-splits`).
        sms: multiprocessors of the device.

    Returns:
        [sequences] int32.
    """
    kernel = importlib.import_module("sglang.kernels.ops.attention.metadata")
    splits, count = lengths.new_empty(len(lengths)), len(lengths)
    kernel.get_num_kv_splits_triton[(1,)](
        splits, lengths, count, 1, heads, 1, most, sms,
        MAX_NUM_SEQ=max(256, 1 << (count - 1).bit_length()),
    )  # fmt: skip
    return splits


def triton_decode(
    q: torch.Tensor, pool: torch.Tensor, out: torch.Tensor, starts: torch.Tensor,
    slots: torch.Tensor, scratch: tuple[torch.Tensor, torch.Tensor], splits: torch.Tensor,
    scale: float,
) -> None:  # fmt: skip
    """Absorbed decode in Triton, SGLang's backend "triton": `decode_attention_fwd`.

    Args:
        q: [sequences, heads, 576] bf16, contiguous.
        pool: [slots, 1, 576] bf16.
        out: [sequences, heads, 512] bf16; written.
        starts: [sequences + 1] int32: first kv token of each sequence.
        slots: [kv tokens] int32: their slots of the pool.
        scratch: partial outputs [sequences, heads, most parts, 512] fp32 and [sequences, heads,
            most parts] fp32 for the logarithms of their sums.
        splits: of `triton_splits`.
        scale: softmax scale.
    """
    partial, lse = scratch
    _module("sglang_triton_decode").decode_attention_fwd(
        q, pool, pool[..., : out.shape[-1]], out, starts, slots, partial, lse, splits,
        partial.shape[2], scale, 1.0, 1.0, has_mla=True,
    )  # fmt: skip


def cast_q(out: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
    """Round absorbed queries to e4m3 into the first heads of `out`, nope before rope.

    `dsa_backend.py:2639` calls `concat_and_cast_q_fp8_pad`.

    Args:
        out: [rows, at least heads, 576] e4m3; written.
        nope: [rows, heads, 512] bf16, last dimension contiguous; heads a power of two.
        rope: [rows, heads, 64] bf16, last dimension contiguous.
    """
    _cast()(out, nope, rope, nope.shape[1])


def q8_prefill(
    q: torch.Tensor, latents: torch.Tensor, indices: torch.Tensor, scale: float, unit: torch.Tensor
) -> torch.Tensor:
    """Sparse prefill in fp8, SGLang's backend "flashmla_sparse_q8" since 0.5.16. SM90 only.

    `dsa_backend.py:2543` (`_forward_flashmla_sparse_q8kv8`) calls
    `sparse_mla_q8kv8_prefill_sm90.py` (`sparse_mla_q8kv8_prefill_fwd`). Queries, keys, values and
    softmax weights are e4m3; sums are fp32. SGLang 0.5.15 has the kernel and no backend for it.

    Args:
        q: [rows, 64 or 128, 576] e4m3.
        latents: [kv tokens + topk, 576] e4m3; the last topk rows are zeros, read for indices of -1.
        indices: [rows, topk] int32 into `latents`, or -1.
        scale: softmax scale.
        unit: [1] fp32, 1: the scale of q and of latents.

    Returns:
        [rows, 64 or 128, 512] bf16.
    """
    call = _module("sglang_q8").sparse_mla_q8kv8_prefill_fwd
    out: torch.Tensor = call(
        q=q, kv=latents[:, None], indices=indices[:, None], sm_scale=scale, q_scale=unit,
        kv_scale=unit, d_v=512,
    )[0]  # fmt: skip
    return out


def topk_v2(
    scores: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, topk: int
) -> torch.Tensor:
    """topk_transform_ragged_v2, SGLang's selection in ragged prefills since 0.5.19.

    `dsa/dsa_topk_backend.py:431` (`_topk_transform_v2_ragged`) calls `dsv4/topk.py`; the kernel is
    `jit/csrc/deepseek_v4/topk_v2.cuh`. Its packed form is compiled for AMD's GPUs only.

    Args:
        scores: [rows, columns] fp32; rows begin at multiples of 16 bytes.
        lengths: [rows] int32: how many scores of a row count.
        offsets: [rows] int32, added to each place.
        topk: at most 2048.

    Returns:
        [rows, topk] int32 places, in no order; -1 beyond a row's length.
    """
    import torch

    out = torch.empty(len(scores), topk, dtype=torch.int32, device=scores.device)
    try:
        call = _module("sglang_topk_v2").topk_transform_ragged_v2
    except AttributeError:
        raise LibraryMissing("this sglang has no topk_v2: pip install 'sglang>=0.5.19'") from None
    call(scores, lengths, out_offsets=offsets, out_indices=out)
    return out
