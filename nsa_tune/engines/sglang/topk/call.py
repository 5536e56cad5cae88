"""One call of SGLang's `DSATopKBackend.topk_transform`, and whether nsa-tune's kernel can answer.

Read in SGLang 0.5.17, 0.5.18 and 0.5.23, layers/attention/dsa/dsa_indexer.py (`_get_topk_ragged`)
and dsa_indexer_metadata.py. Only prefills pass `row_starts`: their rows' keys lie one sequence
behind the other. Where the logits of all rows would take too much memory, SGLang computes them in
chunks of rows, and calls once a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A prefill's call, or that of a chunk of its rows."""

    method: str
    """What becomes of the selected places: "PAGED" or "RAGGED"."""
    logits: Any
    """[rows, keys of all sequences] fp32; beyond a row's own keys anything."""
    lengths: Any
    """[rows] int32."""
    topk: int
    row_starts: Any
    """[rows] int32: where a row's own keys begin."""
    max_kv: int
    """Keys of the longest sequence."""
    transform: Any
    """A `Transform`."""


def call_of(named: Mapping[str, Any]) -> Call | None:
    """The call with these keyword arguments; None for one that the kernel cannot answer."""
    logits, lengths, metadata = named["logits"], named["lengths"], named["attn_metadata"]
    starts: Any = named.get("row_starts")
    if starts is None or named.get("force_unfused_topk"):
        return None
    rows = logits.shape[0]
    method = named["topk_transform_method"].name
    transform = _transform(method, metadata, rows, named)
    if transform is None or not (
        _scores(logits) and _whole(lengths, rows) and _whole(starts, rows)
    ):
        return None
    max_kv = int(metadata.max_seq_len_k)
    return Call(method, logits, lengths, named["topk"], starts, max_kv, transform)


def selection_of(call: Call) -> Any:
    """The `Selection` by nsa-tune's kernel that answers `call`, and the same with other logits."""
    from nsa_tune.backend.kernels.sampled_topk import Selection, shape_of

    shape = shape_of(call.logits.shape[0], call.max_kv)
    return Selection(call.logits, call.lengths, call.topk, call.row_starts, shape, call.transform)


def _transform(method: str, metadata: Any, rows: int, named: Mapping[str, Any]) -> Any:
    kind, transform = _kernels()
    if method == "RAGGED":
        offsets: Any = named.get("topk_indices_offset")
        return transform(kind.OFFSET, offsets) if _whole(offsets, rows) else None
    # The same slots as by `page_table_1`, from a table that stays in the nearest cache.
    table, page_size = metadata.real_page_table, metadata.page_size
    if method != "PAGED" or not _pages(table, page_size):
        return None
    starts: Any = named.get("cu_seqlens_q_topk")
    sequences = named.get("batch_idx_list")
    if sequences is not None:
        fits = _whole(sequences, rows)
        return transform(kind.TABLE_BY_ROW, sequences, table, page_size) if fits else None
    if not _whole(starts, table.shape[0] + 1):
        return None
    return transform(kind.TABLE_BY_START, starts, table, page_size)


def _whole(tensor: Any, count: int) -> bool:
    """Whether it is `count` int32 numbers, one behind the other."""
    return (
        getattr(tensor, "shape", None) == (count,)
        and tensor.dtype is _types()[0]
        and tensor.is_contiguous()
    )


def _scores(logits: Any) -> bool:
    return logits.ndim == 2 and logits.dtype is _types()[1] and logits.stride(1) == 1


def _pages(table: Any, page_size: int) -> bool:
    return (
        table.ndim == 2
        and table.dtype is _types()[0]
        and table.stride(1) == 1
        and page_size > 0
        and page_size & (page_size - 1) == 0
    )


@cache
def _types() -> tuple[Any, Any]:
    import torch

    return torch.int32, torch.float32


@cache
def _kernels() -> tuple[Any, Any]:
    from nsa_tune.backend.kernels.topk_transform import Kind, Transform

    return Kind, Transform
