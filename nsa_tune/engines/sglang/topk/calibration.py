"""Measuring both selections when the engine starts: whether nsa-tune's is right, and is faster.

It compiles the kernel too, which must not happen while a request waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from nsa_tune.engines.sglang.timing import more_launched_us, timed_us
from nsa_tune.engines.sglang.topk.call import call_of, selection_of
from nsa_tune.engines.sglang.topk.times import TopkTime

_ROWS = (64, 128, 256, 512, 1024, 2048)
"""More rows take as much longer in both kernels."""
_KEYS = (3072, 6144, 12288, 24576, 49152, 98304)
_SEQUENCES, _PAGE = 2, 64
_MEMORY_SHARE = 4
"""The scores of a measurement take at most this part of the free memory."""
_CHECKED_KEYS = 9000

Method = Callable[..., Any]


def check(topk: int, device: Any) -> None:
    """Compile every variant of nsa-tune's kernel, and compare what it selects with torch.

    Raises:
        RuntimeError: when one selects anything but the largest scores, transformed.
    """
    import torch

    from nsa_tune.backend.kernels.sampled_topk import sampled_topk, sampled_topk_reference, shapes
    from nsa_tune.backend.kernels.topk_transform import Kind, Transform, transform_reference

    def whole(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lens = (0, 1, topk - 1, topk, topk + 1, 2 * topk, _CHECKED_KEYS - 7, _CHECKED_KEYS)
    rows = len(lens)
    lengths, starts = whole(lens), whole([(_CHECKED_KEYS - one) // 2 for one in lens])
    # Whole numbers, none twice, so that there is one right answer.
    scores = torch.rand(rows, _CHECKED_KEYS, device=device).argsort(1).float()
    pages = torch.randperm(3 * (_CHECKED_KEYS // _PAGE + 1), device=device).int().view(3, -1)
    transforms = (
        Transform(Kind.OFFSET, whole(range(0, 100 * rows, 100))),
        Transform(Kind.TABLE_BY_ROW, whole([i % 3 for i in range(rows)]), pages, _PAGE),
        Transform(Kind.TABLE_BY_START, whole([0, 3, 3, rows]), pages, _PAGE),
    )
    places = sampled_topk_reference(scores, lengths, topk, starts)
    for shape in shapes():
        for transform in transforms:
            chosen = sampled_topk(scores, lengths, topk, starts, shape, transform)
            wanted = transform_reference(places, transform)
            if not torch.equal(chosen.sort(1).values, wanted.sort(1).values):
                raise RuntimeError(
                    f"nsa-tune's top-k selects wrongly with {shape}, {transform.kind.name}"
                )


def measure(
    original: Method, backend: Any, topk: int, method: Any, device: Any
) -> Iterator[TopkTime]:
    """Time both on made-up scores of some sizes, in turns.

    `original` is SGLang's own method of `backend`, and `method` what becomes of selected places.

    Raises:
        RuntimeError: when the plug-in does not understand a call of this engine.
    """
    import torch

    for rows in _ROWS:
        for keys in _KEYS:
            if rows * keys * 4 * _MEMORY_SHARE > torch.cuda.mem_get_info(device)[0]:
                continue
            given = made_up(rows, keys, topk, method, device)
            call = call_of(given)
            if call is None:
                raise RuntimeError(f"nsa-tune's top-k cannot take a call of {method.name}")
            own = partial(selection_of(call), call.logits)
            ways = (partial(original, backend, **given), own)
            engine_us, own_us = timed_us(ways)
            more_us = more_launched_us(*ways)
            yield TopkTime(method.name, rows, keys, engine_us, own_us, more_us)


def made_up(rows: int, keys: int, topk: int, method: Any, device: Any) -> dict[str, Any]:
    """What SGLang passes for two sequences of `keys` keys and half of `rows` new tokens each.

    Each row has all keys of its sequence.
    """
    import torch

    half = rows // _SEQUENCES
    sequence = torch.arange(_SEQUENCES, dtype=torch.int32, device=device).repeat_interleave(half)
    pages = torch.randperm(_SEQUENCES * (keys // _PAGE), device=device).int().view(_SEQUENCES, -1)
    slots = (pages[:, :, None] * _PAGE + torch.arange(_PAGE, device=device)).flatten(1).int()
    metadata = SimpleNamespace(
        max_seq_len_k=keys,
        page_size=_PAGE,
        page_table_1=slots,
        real_page_table=pages,
        token_to_batch_idx=sequence,
    )
    # Both sequences' keys begin in the first column, which halves the memory.
    return {
        "logits": torch.randn(rows, keys, device=device),
        "lengths": torch.full((rows,), keys, dtype=torch.int32, device=device),
        "topk": topk,
        "topk_transform_method": method,
        "attn_metadata": metadata,
        "cu_seqlens_q_topk": torch.arange(_SEQUENCES + 1, dtype=torch.int32, device=device) * half,
        "topk_indices_offset": sequence * keys,
        "row_starts": torch.zeros(rows, dtype=torch.int32, device=device),
        "batch_idx_list": None,
        "force_unfused_topk": False,
    }
