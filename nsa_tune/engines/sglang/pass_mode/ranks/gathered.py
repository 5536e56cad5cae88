"""What data-parallel attention's ranks tell each other before a pass, and what is added to it.

Before each pass SGLang gathers a row of integers from every rank (`MLPSyncBatchInfo.all_gather`).
All ranks decide from these rows alone whether they replay a graph. In an engine without two-batch
overlap one of the integers, `local_can_run_tbo`, is 0 on each rank and read by none. There a rank
says what the plug-in needs to know of its batch. So nothing else is sent, a rank without the
plug-in still says 0, and each rank reads the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nsa_tune.engines.sglang.pass_mode.mode import PassMode

_COLUMN = 4
"""Of `local_can_run_tbo` in a rank's row."""
_SPEAKS, _SHORT, _FRESH, _PREFILL = 2, 4, 8, 16
"""Bits of a rank's integer. 0 and 1 are SGLang's own."""
_LOST = {PassMode.DECODE_GRAPH: 32, PassMode.DENSE_GRAPH: 64, PassMode.DENSE_MLA_GRAPH: 128}
_SEQUENCES_SHIFT, _CONTEXT_SHIFT = 8, 24
"""Bits below these numbers."""
MOST_SEQUENCES = 2**16 - 1
_MOST_CONTEXT = 2**36


@dataclass(frozen=True, slots=True)
class Said:
    """One rank's batch, which asks for nothing but each sequence's next token."""

    context: int = 0
    """Mean keys of a new token, rounded up; 0 where the rank has nothing to do."""
    sequences: int = 0
    """At most `MOST_SEQUENCES`."""
    prefill: bool = False
    """Whether it is one, and no decode step."""
    short: bool = False
    """Whether no sequence has more keys than the indexer selects."""
    fresh: bool = False
    """Whether it is a prefill without any prefix."""
    lost: frozenset[PassMode] = frozenset()
    """Ways that have lost on this rank, by its own clock."""

    def encoded(self) -> int:
        """As an integer that SGLang does not use: 2 or more, less than 2**63."""
        flags = _SPEAKS | (_SHORT if self.short else 0) | (_FRESH if self.fresh else 0)
        flags |= _PREFILL if self.prefill else 0
        for mode in self.lost:
            flags |= _LOST.get(mode, 0)
        context = min(self.context, _MOST_CONTEXT)
        return context << _CONTEXT_SHIFT | self.sequences << _SEQUENCES_SHIFT | flags

    @classmethod
    def decoded(cls, value: int) -> Said | None:
        """What a rank said; None where it said nothing."""
        if value < _SPEAKS or not value & _SPEAKS:
            return None
        return cls(
            value >> _CONTEXT_SHIFT,
            value >> _SEQUENCES_SHIFT & MOST_SEQUENCES,
            bool(value & _PREFILL),
            bool(value & _SHORT),
            bool(value & _FRESH),
            frozenset(mode for mode, bit in _LOST.items() if value & bit),
        )


class Gathered(list[int]):
    """New tokens of each rank, as SGLang passes them on to the pass, with what each rank said.

    SGLang hands its list of tokens from the gathering to the pass as it is; this takes its place
    where all ranks have said something. All that is in it was gathered: it is the same on each
    rank.
    """

    def __init__(
        self, tokens: Iterable[int], said: tuple[Said, ...], *, prefill: bool, graph: bool
    ) -> None:
        super().__init__(tokens)
        self.said = said
        self.prefill = prefill
        """Whether any rank has a prefill."""
        self.graph = graph
        """Whether all ranks would replay a prefill graph."""


_taking_part = False
"""Whether this process is steered, in the gathering that it is about to take part in."""
_said: Said | None = None
"""What this rank says in it."""


@contextmanager
def saying(said: Said | None) -> Iterator[None]:
    """Within it this rank's row says `said`, and it goes by what all ranks have said.

    It does so too where it says nothing itself: of ranks that share a batch (attention with tensor
    parallelism within data parallelism) only the first one's row is read.
    """
    global _said, _taking_part
    _said, _taking_part = said, True
    try:
        yield
    finally:
        _said, _taking_part = None, False


def around_gather(original: Callable[..., Any], info: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `MLPSyncBatchInfo.all_gather`.

    What it does after the gathering follows from what was gathered, so that an error there would
    be every rank's.
    """
    # With two-batch overlap the field is in use.
    if not _taking_part or info.local_can_run_tbo is not False:
        return original(info, *rest, **named)
    if _said is not None:
        info.local_can_run_tbo = _said.encoded()
    result = original(info, *rest, **named)
    # Later releases keep what was gathered in the host's memory.
    rows = info.tp0_info_cpu if hasattr(info, "tp0_info_cpu") else info.tp0_info
    said = [Said.decoded(value) for value in rows[:, _COLUMN].tolist()]
    if None not in said:
        info.global_num_tokens = Gathered(
            info.global_num_tokens,
            tuple(one for one in said if one is not None),
            prefill=info.is_extend_in_batch,
            graph=info.can_run_prefill_cuda_graph,
        )
    return result
