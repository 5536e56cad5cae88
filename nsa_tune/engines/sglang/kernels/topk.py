"""Selecting the keys of prefills by nsa-tune's own kernel, where it is faster than SGLang's.

Read in SGLang 0.5.17, 0.5.18 and 0.5.23, layers/attention/dsa/dsa_indexer.py (`_get_topk_ragged`)
and dsa_indexer_metadata.py. Only prefills pass `row_starts`: their rows' keys lie one sequence
behind the other. Where the logits of all rows would take too much memory, SGLang computes them in
chunks of rows, and calls once a chunk.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from operator import is_
from types import SimpleNamespace
from typing import Any

from nsa_tune.engines.sglang import say_once
from nsa_tune.engines.sglang.eligible import Engine, reads_back
from nsa_tune.engines.sglang.facts import PAGE
from nsa_tune.engines.sglang.kernels.swap import Call, KernelSwap, current_device, is_captured
from nsa_tune.engines.sglang.releases import TOPK_MODULE
from nsa_tune.engines.sglang.switch import Part

_SAME = (
    "lengths", "topk_transform_method", "cu_seqlens_q_topk", "topk_indices_offset", "row_starts",
    "batch_idx_list", "force_unfused_topk",
)  # fmt: skip
"""Arguments that are the same objects in all layers of a pass, or of a chunk in none."""
_ROWS = (64, 256, 1024, 2048)
"""More rows take as much longer in both kernels."""
_KEYS = (3072, 12288, 49152, 98304)
_SEQUENCES = 2
_MEMORY_SHARE = 4
"""The scores of a measurement take at most this part of the free memory."""
_CHECKED_KEYS = 9000


@dataclass(frozen=True, slots=True)
class TopkCall:
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


def call_of(named: Mapping[str, Any]) -> TopkCall | None:
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
    return TopkCall(method, logits, lengths, named["topk"], starts, max_kv, transform)


def selection_of(call: TopkCall) -> Any:
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


class Selector:
    """Answers SGLang's calls by nsa-tune's kernel: what all layers of a pass share is made once."""

    def __init__(self) -> None:
        self._last: tuple[object, ...] = ()
        self._shared: list[object] = []
        self._metadata: Callable[[], object] = object
        self._selection: Callable[[Any], Any] | None = None

    def select(self, named: Mapping[str, Any]) -> Any:
        """[rows, topk] int32 for a call with these arguments; None where SGLang has to answer."""
        logits, metadata = named["logits"], named["attn_metadata"]
        # What the engine may exchange within the metadata, or refresh.
        layout = (
            logits.shape, logits.stride(), logits.dtype, named["topk"], metadata.max_seq_len_k,
            id(metadata.real_page_table),
        )  # fmt: skip
        shared = [named.get(name) for name in _SAME]
        if not (
            self._metadata() is metadata
            and layout == self._last
            and all(map(is_, shared, self._shared))
        ):
            self._selection = self._prepared(named)
            # The engine's metadata is not kept from going; the kernel's own tensors are.
            self._metadata, self._last, self._shared = weakref.ref(metadata), layout, shared
        if self._selection is None or is_captured():
            return None
        return self._selection(logits)

    def _prepared(self, named: Mapping[str, Any]) -> Callable[[Any], Any] | None:
        call = call_of(named)
        if call is None:
            say_once(
                logging.INFO,
                "SGLang selects keys itself: nsa-tune's kernel cannot take this prefill's tensors",
            )
            return None
        wins = SWAPS[call.method].wins
        size = (call.logits.shape[0], call.max_kv)
        if call.max_kv <= call.topk or wins is None or size not in wins:
            return None
        selection: Callable[[Any], Any] = selection_of(call)
        return selection


_SELECTOR = Selector()
"""Of this process, whose layers and model runners share one `DSATopKBackend`."""


def around_topk(original: Callable[..., Any], backend: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `DSATopKBackend.topk_transform`, which SGLang calls by keywords."""
    prefill = named.get("row_starts") is not None and not rest
    swap = SWAPS.get(named["topk_transform_method"].name) if prefill else None
    if swap is None or not swap.is_on(backend):
        return original(backend, *rest, **named)
    selected = swap.run(_SELECTOR.select, named)
    return original(backend, **named) if selected is None else selected


def check(topk: int, device: Any) -> None:
    """Compile every variant of nsa-tune's kernel, and compare what it selects with torch.

    Raises:
        RuntimeError: when one selects anything but the largest scores, transformed.
    """
    import torch

    from nsa_tune.backend.kernels import sampled_topk as kernels
    from nsa_tune.backend.kernels.topk_transform import Kind, Transform, transform_reference

    kernels.compile_all(topk)

    def whole(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lens = (0, 1, topk - 1, topk, topk + 1, 2 * topk, _CHECKED_KEYS - 7, _CHECKED_KEYS)
    rows = len(lens)
    lengths, starts = whole(lens), whole([(_CHECKED_KEYS - count) // 2 for count in lens])
    # Whole numbers, none twice, so that there is one right answer.
    scores = torch.rand(rows, _CHECKED_KEYS, device=device).argsort(1).float()
    pages = torch.randperm(3 * (_CHECKED_KEYS // PAGE + 1), device=device).int().view(3, -1)
    transforms = (
        Transform(Kind.OFFSET, whole(range(0, 100 * rows, 100))),
        Transform(Kind.TABLE_BY_ROW, whole([i % 3 for i in range(rows)]), pages, PAGE),
        Transform(Kind.TABLE_BY_START, whole([0, 3, 3, rows]), pages, PAGE),
    )
    places = kernels.sampled_topk_reference(scores, lengths, topk, starts)
    for shape in kernels.shapes():
        for transform in transforms:
            chosen = kernels.sampled_topk(scores, lengths, topk, starts, shape, transform)
            wanted = transform_reference(places, transform)
            if not torch.equal(chosen.sort(1).values, wanted.sort(1).values):
                raise RuntimeError(
                    f"nsa-tune's top-k selects wrongly with {shape}, {transform.kind.name}"
                )


def selections(method: str, engine: Engine) -> Iterator[Call]:
    """Selecting from made-up scores of some sizes; `method` is what becomes of selected places.

    Raises:
        RuntimeError: when the kernel selects wrongly, or does not understand a call.
    """
    import torch

    backend, topk = engine.backend.dsa_topk_backend, engine.backend.dsa_index_topk
    original = type(backend).topk_transform.__wrapped__
    kind = getattr(import_module(TOPK_MODULE).TopkTransformMethod, method)
    device = current_device()
    check(topk, device)
    for rows in _ROWS:
        for keys in _KEYS:
            if rows * keys * 4 * _MEMORY_SHARE > torch.cuda.mem_get_info(device)[0]:
                continue
            given = made_up(rows, keys, topk, kind, device)
            call = call_of(given)
            if call is None:
                raise RuntimeError(f"nsa-tune's top-k cannot take a call of {method}")
            yield Call(
                (rows, keys), partial(original, backend, **given),
                partial(selection_of(call), call.logits),
            )  # fmt: skip


def made_up(rows: int, keys: int, topk: int, method: Any, device: Any) -> dict[str, Any]:
    """What SGLang passes for two sequences of `keys` keys and half of `rows` new tokens each.

    Each row has all keys of its sequence.
    """
    import torch

    half = rows // _SEQUENCES
    sequence = torch.arange(_SEQUENCES, dtype=torch.int32, device=device).repeat_interleave(half)
    pages = torch.randperm(_SEQUENCES * (keys // PAGE), device=device).int().view(_SEQUENCES, -1)
    slots = (pages[:, :, None] * PAGE + torch.arange(PAGE, device=device)).flatten(1).int()
    metadata = SimpleNamespace(
        max_seq_len_k=keys,
        page_size=PAGE,
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


def _most_keys() -> int:
    from nsa_tune.backend.kernels.sampled_topk import MOST

    return MOST


def _swap(name: str, method: str, applies: Callable[[Engine], bool]) -> KernelSwap:
    # Random scores have equal ones, of which either may be selected: `check` compares.
    return KernelSwap(
        name, Part.TOPK, f"selects keys ({method.lower()})", ("rows", "keys"),
        partial(selections, method), tolerance=None, owner_of=lambda e: e.backend.dsa_topk_backend,
        applies=lambda e: e.backend.dsa_index_topk <= _most_keys() and applies(e),
    )  # fmt: skip


PAGED = _swap("topk", "PAGED", lambda engine: True)
RAGGED = _swap("topk_ragged", "RAGGED", lambda engine: reads_back(engine.backend))
SWAPS = {"PAGED": PAGED, "RAGGED": RAGGED}
"""By what SGLang makes of selected places: in a prefill over a bf16 pool always slots."""
