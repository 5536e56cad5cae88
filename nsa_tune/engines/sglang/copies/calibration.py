"""Timing both ways of each copy when the engine starts, and checking that they give the same bits.

It compiles the kernel too, which must not happen while a request waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from nsa_tune.engines.sglang.copies.copies import BYTES, RANK, ROPE, padded, read_back
from nsa_tune.engines.sglang.copies.eligible import PADDED_HEADS
from nsa_tune.engines.sglang.timing import gains, more_launched_us, timed_us

_TOKENS = (512, 2048, 8192, 32768, 65536)
_ROWS = (64, 256, 1024, 2048)
_KEYS = 4096
_TILES = 4
_WIN = 0.98
"""nsa-tune's copy is taken if it takes less than this part of the time with SGLang's."""


@dataclass(frozen=True, slots=True)
class CopyTime:
    """Both ways at one size, in microseconds of GPU time."""

    size: int
    """Tokens that are read back, or rows of queries."""
    engine_us: float
    own_us: float
    more_host_us: float = 0.0
    """How much longer the host launches nsa-tune's way: a pass may wait for it."""

    @property
    def is_win(self) -> bool:
        """Whether nsa-tune's copy was faster, by more than the host needs to launch it."""
        return gains(self.engine_us, self.own_us, self.more_host_us, part=_WIN)


def least_of(times: Iterable[CopyTime]) -> int | None:
    """The size from which on nsa-tune's copy was faster at all measured sizes; None: at none."""
    least = None
    for one in sorted(times, key=lambda one: one.size, reverse=True):
        if not one.is_win:
            break
        least = one.size
    return least


def read_back_times(original: Callable[..., Any], device: Any) -> Iterator[CopyTime]:
    """Time reading a prefix back from a made-up pool; `original` is SGLang's function.

    Raises:
        RuntimeError: where the two do not give the same bits.
    """
    import torch

    pool = _made_up_pool(max(_TOKENS), device)
    for tokens in _TOKENS:
        slots = torch.randperm(len(pool), device=device)[:tokens].int()
        ways = (partial(original, pool, slots), partial(read_back, pool, slots))
        _check("reads a prefix back", tokens, *(way() for way in ways))
        yield _timed(tokens, *ways)


def padding_times(original: Callable[..., Any], backend: Any, device: Any) -> Iterator[CopyTime]:
    """Time sparse attention with both ways of padding; `original` is SGLang's method.

    Raises:
        RuntimeError: where the two do not give the same bits, whatever the padding holds.
    """
    import torch

    heads, topk = int(backend.num_q_heads), int(backend.dsa_index_topk)
    latents = torch.randn(_KEYS, 1, RANK + ROPE, device=device).bfloat16()
    for rows in _ROWS:
        q = torch.randn(rows, heads, RANK + ROPE, device=device).bfloat16()
        named = {
            "kv_cache": latents,
            "v_head_dim": RANK,
            "page_table_1": torch.randint(_KEYS, (rows, topk), dtype=torch.int32, device=device),
            "sm_scale": (RANK + ROPE) ** -0.5,
            "topk_length": torch.full((rows,), topk, dtype=torch.int32, device=device),
        }
        filled = padded(q, PADDED_HEADS)
        filled[:, heads:] = float("nan")
        with_nan = original(backend, q_all=filled, **named)[:, :heads]
        _check("pads queries", rows, original(backend, q_all=q, **named), with_nan)

        def own(q: Any = q, named: dict[str, Any] = named) -> Any:
            return original(backend, q_all=padded(q, PADDED_HEADS), **named)

        yield _timed(rows, partial(original, backend, q_all=q, **named), own)


def _timed(size: int, engine: Callable[[], Any], own: Callable[[], Any]) -> CopyTime:
    engine_us, own_us = timed_us((engine, own))
    return CopyTime(size, engine_us, own_us, more_launched_us(engine, own))


def _check(what: str, size: int, wanted: Any, found: Any) -> None:
    import torch

    bits = [one.contiguous().view(torch.int16) for one in (wanted, found)]
    if not torch.equal(*bits):
        raise RuntimeError(f"nsa-tune {what} otherwise than SGLang, at a size of {size}")


def _made_up_pool(tokens: int, device: Any) -> Any:
    """[tokens, 1, 656] float8_e4m3fn: any values but NaN, scales and rotary parts."""
    import torch

    values = torch.randn(tokens, RANK, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(tokens, _TILES, device=device) + 0.5
    rope = torch.randn(tokens, ROPE, device=device).bfloat16()
    parts = [one.view(torch.uint8) for one in (values, scales, rope)]
    pool = torch.cat(parts, dim=1)
    assert pool.shape[1] == BYTES
    return pool.view(torch.float8_e4m3fn).unsqueeze(1)
