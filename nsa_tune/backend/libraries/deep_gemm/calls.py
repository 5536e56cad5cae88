"""DeepGEMM's MQA logits, paged and ragged: the scores of the sparse-attention indexer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_tune._errors import LibraryMissing
from nsa_tune.backend import libraries as providers

if TYPE_CHECKING:
    import torch

    from nsa_tune.backend.kernels.mqa_schedule import Split


@cache
def _module() -> Any:
    return providers.load("deep_gemm")


def sms() -> int:
    """SMs that the logits kernel runs on, for which a schedule is made."""
    return int(_module().get_num_sms())


@cache
def schedule_split(arch: str) -> Split:
    """How this build deals a schedule on `arch`, read in the sources that it compiles.

    Raises:
        LibraryMissing: when it has no sources of a schedule that is known.
    """
    from nsa_tune.backend.kernels.mqa_schedule import Split

    sources = Path(_module().__file__).parent / "include" / "deep_gemm" / "scheduler"
    if arch != "sm90" and (sources / "sm100_paged_mqa_logits.cuh").is_file():
        return Split.WHOLE_ROWS
    for name in ("sm90_paged_mqa_logits.cuh", "paged_mqa_logits.cuh"):
        if (sources / name).is_file():
            # The word that the deal by which the last SMs get more is written with.
            newer = "pivot" in (sources / name).read_text(encoding="utf-8")
            return Split.LAST_MORE if newer else Split.FIRST_MORE
    raise LibraryMissing(f"{sources} has no schedule that is known: pip install sgl-deep-gemm")


def schedule(context_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """The schedule of one paged-logits call; compiled anew for every 32 rows of batch (1-3 s).

    Args:
        context_lens: [rows, next_n] int32, contiguous.
        page_size: tokens a page: 64 on SM90.

    Returns:
        [SMs + 1, 2] int32.
    """
    module = _module()
    metadata: torch.Tensor = module.get_paged_mqa_logits_metadata(
        context_lens, page_size, module.get_num_sms()
    )
    return metadata


def paged_mqa_logits(
    q: torch.Tensor,
    pool: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    metadata: torch.Tensor,
    max_context: int,
) -> torch.Tensor:
    """fp8_paged_mqa_logits.

    Args:
        q: [rows, next_n, heads, dim] e4m3, contiguous.
        pool: [pages, page size, 1, dim + 4] uint8: a page's keys, then its fp32 scales.
        weights: [rows * next_n, heads] fp32.
        context_lens: [rows, next_n] int32: keys that each query sees.
        block_table: [rows, pages] int32.
        metadata: what `schedule` returned for these context_lens.
        max_context: at least the longest context; shorter writes out of bounds.

    Returns:
        [rows * next_n, max_context] fp32; beyond a query's context it holds nothing.
    """
    logits: torch.Tensor = _module().fp8_paged_mqa_logits(
        q, pool, weights, context_lens, block_table, metadata, max_context, clean_logits=False
    )
    return logits


def ragged_mqa_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
) -> torch.Tensor:
    """fp8_mqa_logits, as SGLang calls it in prefill (dsa_indexer.py) and vLLM (utils/deep_gemm.py).

    Args:
        q: [rows, heads, dim] e4m3, contiguous.
        keys: [keys, dim] e4m3, contiguous: of all sequences, one behind the other.
        scales: [keys] fp32, contiguous.
        weights: [rows, heads] fp32.
        first: [rows] int32: the first key that each query sees.
        end: [rows] int32: where the keys end that it sees.

    Returns:
        [rows, keys] fp32; outside of a query's keys it holds nothing. Rows lie 256 to 511 values
        further apart than they are long.
    """
    logits: torch.Tensor = _module().fp8_mqa_logits(
        q, (keys, scales), weights, first, end, clean_logits=False
    )
    return logits[: len(q), : len(keys)]
