"""What leaves the plug-in, or a part of it, out: environment variables, and pausing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from nsa_tune.engines.switches import switched_on


class Part(StrEnum):
    """A part of the plug-in that can be left out by itself."""

    TABLE = "kernels by table"
    """MHA or MLA, the prefill kernel, and the indexer's rows, as a table has them."""
    PASSES = "how passes run"
    DENSE = "dense graphs"
    DENSE_MLA = "dense MLA graphs"
    SPARSE = "sparse graphs"
    DECODE_GRAPHS = "decode graphs for prefills"
    TOPK = "key selection"
    COPIES = "copies"
    DECODE = "decode kernel"


SWITCHES: Mapping[Part, str] = {
    Part.PASSES: "NSA_TUNE_PASS_MODE",
    Part.DENSE: "NSA_TUNE_DENSE_GRAPHS",
    Part.SPARSE: "NSA_TUNE_SPARSE_GRAPHS",
    Part.TOPK: "NSA_TUNE_TOPK",
    Part.COPIES: "NSA_TUNE_COPIES",
    Part.DECODE: "NSA_TUNE_DECODE",
}
"""Environment variables, by part: 0 leaves the part to SGLang."""

SAME_NUMERICS = "NSA_TUNE_SAME_NUMERICS"
"""Environment variable: 1 keeps to what differs from SGLang no more than two runs of SGLang do."""


def switch_is_on(part: Part) -> bool:
    """Whether the environment leaves `part` on, as it is by default."""
    return part not in SWITCHES or switched_on(SWITCHES[part])


_paused = False
_told: list[Callable[[], None]] = []


def when_switched(call: Callable[[], None]) -> None:
    """Have `call` run whenever the plug-in was paused or resumed."""
    _told.append(call)


def pause() -> None:
    """From the next pass on SGLang decides everything itself, so that both ways can be measured.

    A pass that has begun is finished as it began. Graphs captured with the plug-in stay.
    Of an engine with several ranks pause each of them while it is idle, and resume so too: two
    ranks that run one pass in different ways may wait for each other.
    """
    _switch(paused=True)


def resume() -> None:
    """From the next pass on the plug-in decides again."""
    _switch(paused=False)


def _switch(*, paused: bool) -> None:
    global _paused
    _paused = paused
    for call in _told:
        call()


def paused() -> bool:
    """Whether the plug-in is paused."""
    return _paused
