"""The prefills of a step, from the lengths that the engine keeps on the host."""

from __future__ import annotations

from operator import sub
from typing import Any, NamedTuple

from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.extends import sums_of


class Prefills(NamedTuple):
    """The requests of a step from the first one on that is no decode."""

    sums: Batch
    prefix_lens: list[int]
    new_lens: list[int]
    has_decodes: bool
    """Whether decodes come before them."""
    step_tokens: int
    """New tokens of the whole step."""


def prefills_of(starts: Any, lens: Any, decode_tokens: int) -> Prefills | None:
    """The requests from the first one on that has more than `decode_tokens` new tokens.

    None where there is no such request, or where one among them has no new token, as a padded step
    has at its end; with drafts, also where one has no more than a decode. It may be one, behind a
    request that was preempted, and the host then knows no more than a bound of its length.

    Args:
        starts: [requests + 1] int32 on the host: where each request's new tokens begin.
        lens: [requests or more] int32 on the host: how long each request is with them.
        decode_tokens: the most new tokens of a decode.
    """
    begins = starts.tolist()
    new_lens = list(map(sub, begins[1:], begins))
    first = next((i for i, new in enumerate(new_lens) if new > decode_tokens), len(new_lens))
    new_lens = new_lens[first:]
    prefix_lens = list(map(sub, lens.tolist()[first:], new_lens))
    too_few = decode_tokens if decode_tokens > 1 else 0
    sums = None if min(new_lens, default=0) <= too_few else sums_of(prefix_lens, new_lens)
    return None if sums is None else Prefills(sums, prefix_lens, new_lens, first > 0, begins[-1])
