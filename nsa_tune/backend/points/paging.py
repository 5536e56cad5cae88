"""Where a batch's tokens lie in a pool of scattered pages, and which of them its queries see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

_ROWS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Paging:
    """Where the tokens of a batch lie."""

    starts: torch.Tensor
    """[sequences + 1] int64: first flattened token of each sequence."""
    slots: torch.Tensor
    """[kv tokens] int32: slot of each token, sequence after sequence."""
    block_table: torch.Tensor
    """[sequences, pages of the longest] int32; unused entries repeat page 0."""


def slots_for(lens: Iterable[int], page_size: int, device: torch.device) -> int:
    """Slots of a pool for sequences of so many kv tokens: few sizes, so that batches share pools,
    and at least a few times what the L2 holds, so that scattered pages are really scattered."""
    needed = sum(-(-length // page_size) * page_size for length in lens)
    return max(2**12 if device.type == "cpu" else 2**18, 1 << (needed - 1).bit_length())


def scatter(lens: list[int], page_size: int, pool_slots: int, device: torch.device) -> Paging:
    """Give each sequence pages from all over a pool of `pool_slots`, in a seeded random order.

    Args:
        lens: kv tokens of each sequence.
        page_size: tokens a page.
        pool_slots: slots of the pool, at least what the pages of all sequences take.
    """
    generator = torch.Generator(device="cpu").manual_seed(len(lens))
    pages = [-(-length // page_size) for length in lens]
    assert sum(pages) * page_size <= pool_slots, "the pool is smaller than the batch"
    free = torch.randperm(pool_slots // page_size, generator=generator)[: sum(pages)].to(device)
    starts = torch.tensor([0, *lens]).cumsum(0).to(device)
    counts = torch.tensor(pages, device=device)
    first = counts.cumsum(0) - counts
    column = torch.arange(max(pages), device=device)
    own = free[(first[:, None] + column).clamp_max(len(free) - 1)]
    table = torch.where(column < counts[:, None], own, 0).int()
    # On the device: a big batch has millions of tokens, which a CPU takes longer to place than a
    # GPU takes to time all arms.
    row = torch.repeat_interleave(starts.diff(), output_size=sum(lens))
    offset = torch.arange(sum(lens), device=device) - starts[row]
    slots = free[first[row] + offset // page_size] * page_size + offset % page_size
    return Paging(starts, slots.int(), table)


def query_rows(
    lens: Sequence[tuple[int, int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys each query of a batch sees: those of its sequence up to its own.

    Args:
        lens: (prefix, new) of each sequence.

    Returns:
        The sequence of each query, [q tokens] int64, and how many keys it sees, [q tokens] int32.
    """
    prefix, new = torch.tensor(lens, device=device).unbind(1)
    total = sum(one for _, one in lens)
    sequence = torch.repeat_interleave(new, output_size=total)
    row = torch.arange(total, device=device) - (new.cumsum(0) - new)[sequence]
    return sequence, (prefix[sequence] + row + 1).int()


def spread_keys(seen: torch.Tensor, order: torch.Tensor, jitter: torch.Tensor) -> torch.Tensor:
    """Different keys out of `seen`, one from each of equal parts of them: [rows, count] int64.

    Args:
        seen: [rows, 1], how many keys there are; only rows with more than `count` are of use.
        order: [count], the parts in the order in which they are taken.
        jitter: [rows, count] from 0 to 1, which key of its part each is.
    """
    count = order.numel()
    first, behind = order * seen // count, (order + 1) * seen // count
    return first + (jitter * (behind - first)).long().clamp_max(behind - first - 1)


def placed(indices: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Indices into a batch's tokens as the `slots` of these, -1 as it is."""
    out = indices.clone()
    for start in range(0, len(out) if slots.numel() else 0, _ROWS_AT_ONCE):
        part = out[start : start + _ROWS_AT_ONCE]
        part.copy_(torch.where(part >= 0, slots[part.clamp_min(0).long()], -1))
    return out


def spread_selection(
    seen: torch.Tensor, first: torch.Tensor, out: torch.Tensor, most: int, seed: int
) -> torch.Tensor:
    """`out` filled with up to `most` different keys a row: all that it sees, or as many spread over
    them in a scrambled order, as a top-k returns them; -1 behind.

    Args:
        seen: [rows] keys that each row sees.
        first: [rows] what is added to its places.
        out: [rows, at least `most`] int32, -1 from `most` on.
    """
    device = out.device
    generator = torch.Generator(device=device).manual_seed(seed)
    order = torch.randperm(most, generator=generator, device=device)
    column = torch.arange(most, device=device)
    for start in range(0, len(out), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        sees = seen[rows, None]
        jitter = torch.rand(len(sees), most, generator=generator, device=device)
        chosen = torch.where(sees > most, spread_keys(sees, order, jitter), column)
        out[rows, :most] = torch.where(column < sees, chosen + first[rows, None], -1).int()
    return out
