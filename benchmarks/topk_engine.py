"""SGLang's fused top-k against nsa-tune's, as a prefill's indexer calls them.

    python -m benchmarks.topk_engine [--json]

Run it in the repository's root where SGLang and sglang-kernel are installed, on a GPU from SM80.
Each row is one layer's call: SGLang's own method with what it passes, and the plug-in's. GPU time
is the least of some rounds by turns; "host" is what a call takes until it returns. "differ" says in
how many of the rows that were looked at both selected other scores; any of equal ones is right.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from nsa_tune.backend.kernels.topk_transform import transform_reference
from nsa_tune.engines.sglang.releases import TOPK_MODULE
from nsa_tune.engines.sglang.timing import timed_us
from nsa_tune.engines.sglang.topk.calibration import check, measure
from nsa_tune.engines.sglang.topk.call import call_of
from nsa_tune.engines.sglang.topk.selector import Selector
from nsa_tune.engines.sglang.topk.times import TopkTime, TopkTimes

TOPK, PAGE = 2048, 64
_HOST_CALLS = 20
_COMPARED = 50
"""Rows of a shape that are compared score by score, where both selections are not the same."""


@dataclass(frozen=True)
class Shape:
    """A prefill of equal sequences, or its last rows."""

    prefix: int
    new: int
    sequences: int = 1
    method: str = "PAGED"
    chunk: int = 0
    """The last so many rows alone, as a chunk; 0 for all."""

    def __str__(self) -> str:
        chunk = f", last {self.chunk} rows" if self.chunk else ""
        return f"{self.prefix}+{self.new} x{self.sequences} {self.method.lower()}{chunk}"


SHAPES = (
    Shape(0, 4096),
    Shape(0, 8192),
    Shape(3072, 1024),
    Shape(4096, 256),
    Shape(6144, 64),
    Shape(30720, 8192),
    Shape(63488, 2048),
    Shape(8192, 1024),
    Shape(30720, 512),
    Shape(30720, 64),
    Shape(122880, 1024),
    Shape(8192, 256, 16),
    Shape(2048, 1024, 4),
    Shape(30720, 8192, chunk=2048),
    Shape(114688, 8192, chunk=1024),
    Shape(30720, 8192, method="RAGGED"),
    Shape(8192, 1024, method="RAGGED"),
    Shape(8192, 256, 16, method="RAGGED"),
)


@dataclass(frozen=True)
class Timed:
    """One shape, timed."""

    shape: str
    rows: int
    keys: int
    engine_us: float
    own_us: float
    engine_host_us: float
    own_host_us: float
    differing_rows: int
    """Rows whose selected scores differ between both."""


class Metadata(SimpleNamespace):
    """SGLang's DSAMetadata: unlike its base it can be referred to weakly."""


class Method(IntEnum):
    """SGLang's TopkTransformMethod."""

    PAGED = 1
    RAGGED = 2


class Kernels:
    """SGLang's method where only sglang-kernel is installed: what 0.5.17 comes down to."""

    def topk_transform(self, **given: Any) -> Any:
        """[rows, topk] int32."""
        import sgl_kernel

        shared = {name: given[name] for name in ("lengths", "topk", "row_starts")}
        if given["topk_transform_method"] is Method.RAGGED:
            return sgl_kernel.fast_topk_transform_ragged_fused(
                score=given["logits"], topk_indices_offset=given["topk_indices_offset"], **shared
            )
        table, sequences = given["attn_metadata"].page_table_1, given["batch_idx_list"]
        return sgl_kernel.fast_topk_transform_fused(
            score=given["logits"],
            page_table_size_1=table if sequences is None else table[sequences],
            cu_seqlens_q=given["cu_seqlens_q_topk"],
            **shared,
        )


def _engine() -> tuple[Callable[..., torch.Tensor], Any, Any]:
    """SGLang's method, its object, and what it may make of places."""
    try:
        module = importlib.import_module(TOPK_MODULE)
    except ImportError as error:
        print(f"SGLang cannot be imported ({error}): its kernels alone", file=sys.stderr)
        kernels = Kernels()
        return lambda _, **given: kernels.topk_transform(**given), None, Method
    kind = module.DSATopKBackend
    method = getattr(kind.topk_transform, "__wrapped__", kind.topk_transform)
    return method, kind.SGL_KERNEL, module.TopkTransformMethod


def given_for(shape: Shape, methods: Any, device: torch.device) -> dict[str, Any]:
    """What SGLang passes for a prefill of `shape`."""
    kv_len, count = shape.prefix + shape.new, shape.sequences

    def arange(end: int) -> torch.Tensor:
        return torch.arange(end, dtype=torch.int32, device=device)

    rows = shape.chunk or count * shape.new
    at = arange(count * shape.new)[-rows:]
    sequence, width = at // shape.new, -(-kv_len // PAGE)
    pages = torch.randperm(count * width, device=device).int().view(count, width)
    slots = (pages[:, :, None] * PAGE + torch.arange(PAGE, device=device)).flatten(1).int()
    metadata = Metadata(
        max_seq_len_k=kv_len,
        page_size=PAGE,
        page_table_1=slots[:, :kv_len].contiguous(),
        real_page_table=pages,
        token_to_batch_idx=sequence,
    )
    ragged = shape.method == "RAGGED"
    starts = arange(count + 1) * shape.new
    return {
        "logits": torch.randn(rows, -(-count * kv_len // 256) * 256, device=device)[
            :, : count * kv_len
        ],
        "lengths": shape.prefix + at % shape.new + 1,
        "topk": TOPK,
        "topk_transform_method": methods[shape.method],
        "attn_metadata": metadata,
        "cu_seqlens_q_topk": arange(rows + 1) if shape.chunk else starts,
        "topk_indices_offset": sequence * kv_len if ragged else None,
        "row_starts": sequence * kv_len,
        "batch_idx_list": sequence if shape.chunk and not ragged else None,
        "force_unfused_topk": False,
    }


def differing(given: dict[str, Any], first: torch.Tensor, second: torch.Tensor) -> int:
    """Rows in which the scores selected by both differ; some of the unequal ones are looked at."""
    call = call_of(given)
    assert call is not None
    unequal = (first.sort(1).values != second.sort(1).values).any(1).nonzero().flatten()
    sequence, count = given["attn_metadata"].token_to_batch_idx, 0
    for row in unequal[:_COMPARED].tolist():
        kind = call.transform.kind
        of_row = call.transform.map[row : row + 1]
        if call.transform.table is not None:
            kind, of_row = kind.TABLE_BY_ROW, sequence[row : row + 1]
        alone = type(call.transform)(kind, of_row, call.transform.table, call.transform.page_size)
        length, start = int(call.lengths[row]), int(call.row_starts[row])
        places = torch.arange(length, dtype=torch.int32, device=first.device)[None]
        slots = transform_reference(places, alone)[0]
        scores = call.logits[row, start : start + length]
        taken = [scores[torch.isin(slots, chosen[row])].sort().values for chosen in (first, second)]
        count += not torch.equal(*taken)
    return count


def _host_us(way: Callable[[], Any]) -> float:
    """What a call takes until it returns, with room in the device's queue."""
    found = []
    for _ in range(_HOST_CALLS):
        begin = time.perf_counter()
        way()
        found.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    return sorted(found)[_HOST_CALLS // 2] * 1e6


def timed(shape: Shape, engine: tuple[Any, Any, Any], device: torch.device) -> Timed:
    """Both selections of one shape."""
    method, backend, methods = engine
    given = given_for(shape, methods, device)
    call = call_of(given)
    assert call is not None

    always = TopkTimes([TopkTime(shape.method, 1, 1, 2.0, 1.0)])
    selector = Selector(always, torch.cuda.is_current_stream_capturing)
    its, own = partial(method, backend, **given), partial(selector.select, given)
    unequal = differing(given, its(), own())
    engine_us, own_us = timed_us((its, own), launches=5, rounds=4)
    rows, keys = call.logits.shape
    return Timed(str(shape), rows, keys, engine_us, own_us, _host_us(its), _host_us(own), unequal)


def main() -> None:
    """Check and time, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    engine = _engine()
    begin = time.monotonic()
    check(TOPK, device)
    compiled_s = time.monotonic() - begin
    times: list[TopkTime] = []
    begin = time.monotonic()
    for name in ("PAGED", "RAGGED"):
        times += measure(engine[0], engine[1], TOPK, engine[2][name], device)
    measured_s = time.monotonic() - begin
    torch.cuda.empty_cache()
    found = [timed(shape, engine, device) for shape in SHAPES]
    wins = TopkTimes(times)
    taken = [
        wins.is_win(shape.method, one.rows, shape.prefix + shape.new)
        for shape, one in zip(SHAPES, found, strict=True)
    ]
    if asked.json:
        rows = [asdict(one) | {"taken": take} for one, take in zip(found, taken, strict=True)]
        start = {"check_s": compiled_s, "measure_s": measured_s, "sizes": [*map(asdict, times)]}
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "shapes": rows, "start": start}))
        return
    print(f"{torch.cuda.get_device_name()}: compiled and checked in {compiled_s:.1f} s")
    print(f"measured as at an engine's start in {measured_s:.1f} s:")
    for time_ in times:
        print(
            f"  {time_.method:6} {time_.rows:5} x {time_.keys:6}: "
            f"{time_.engine_us:7.1f} -> {time_.own_us:7.1f} us{' *' if time_.is_win else ''}"
        )
    head = ("prefill", "rows", "keys", "SGLang us", "own us", "ratio", "host us", "own", "differ")
    print("{:36} {:>5} {:>7} {:>9} {:>8} {:>5} {:>8} {:>6} {:>6} taken".format(*head))
    for one, take in zip(found, taken, strict=True):
        print(
            f"{one.shape:36} {one.rows:5} {one.keys:7} {one.engine_us:9.1f} {one.own_us:8.1f} "
            f"{one.engine_us / one.own_us:5.2f} {one.engine_host_us:8.1f} {one.own_host_us:6.1f} "
            f"{one.differing_rows:6} {'yes' if take else 'no'}"
        )


if __name__ == "__main__":
    main()
