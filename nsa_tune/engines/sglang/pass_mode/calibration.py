"""Measuring what passes take in this engine, with passes that it might serve.

They run as served ones do, on one stream and with the host's work in them (made_up.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from nsa_tune.backend.types.profiles import ALL_TOKENS
from nsa_tune.engines.sglang.facts import index_topk_of
from nsa_tune.engines.sglang.pass_mode import made_up
from nsa_tune.engines.sglang.pass_mode.mode import ALWAYS_SELECTS, PassMode
from nsa_tune.engines.sglang.pass_mode.steering.steering import Steering
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.whole_pass.prefix_graphs import PREFIXES, timed_prefixes
from nsa_tune.engines.sglang.prefill import changed

MEASURED = 6
"""Which passes are measured, and how; part of the key, so that others are not taken for them."""

_CONTEXTS = (2048, 16384, 65536)
"""Keys before a few new tokens."""
_FEW = 2048
"""New tokens up to which these are measured: with more the GPU has enough to do."""
_MIDDLE = 512
"""New tokens from which on passes without a prefix are measured at close sizes."""
_MANY = 2048
"""New tokens from which on eager passes are measured: fewer never make up for the launches."""
_PROMPT = 512
"""Tokens of a short prompt, of which many come in one pass: the fewer keys, the less attention."""
_TURN = 512
"""New tokens of a sequence that continues a short one."""
_SHORT_TURN = 128
"""The same in batches of many sequences, where MHA expands many more keys than are new."""
_ROWS = (8, 64, 256, 1024)
"""Rows of decode graphs that are measured, where they were captured, and the most that were."""
_USUAL = (PassMode.ENGINE, PassMode.TABLE_KERNEL)
_OVER_SHORT = (PassMode.DENSE_GRAPH, PassMode.DENSE_MLA_GRAPH)
"""Whole-pass graphs over sequences of at most index_topk keys."""
_SPACING, _FAR_SPACING = 2, 4
"""Graphs for many tokens are measured whose sizes differ by so many times; SGLang's own list has 58
up to 8192. Fewer are for few tokens and behind prefixes, where most passes wait for the host, and
then all take as long."""
_SMALLEST = 64
"""Smaller graphs are not measured: all of them wait for the host."""
_RUNS = 2
"""The shorter counts. Comparing has warmed up: of 113 first runs none took 1.5 times as long."""
_STEADY, _GPU_BOUND, _AT_ONCE = 1.05, 1.3, 15.0
"""A pass runs once if its launch takes at most _STEADY times this way's shortest launch so far; or
if the pass takes _GPU_BOUND times its launch, and _AT_ONCE times what the launch takes beyond that
shortest one (to compile, say). Of 54 such passes 53 took up to 1.06 times what they took next, one
1.27 times."""


@dataclass(frozen=True, slots=True)
class Case:
    """A pass to measure: sequences of `lens` new tokens, each behind a prefix."""

    mode: PassMode
    size: int
    """Tokens of the graph that runs it; new tokens where none does."""
    prefix: int
    lens: tuple[int, ...]

    @property
    def padding(self) -> int:
        """Tokens of the graph that are not new."""
        return self.size - sum(self.lens)

    @property
    def longest(self) -> int:
        """Keys of the longest sequence."""
        return self.prefix + max(self.lens)

    @property
    def context(self) -> int:
        """Mean keys of a new token, rounded up: this very batch lies within what was measured."""
        pairs = sum(self.prefix * new + new * (new + 1) // 2 for new in self.lens)
        return -(-pairs // sum(self.lens))

    def unmeasured(self, index_topk: int) -> PassTime:
        """What is known of its time before it is measured."""
        selects = self.mode not in ALWAYS_SELECTS and self.longest > index_topk
        return PassTime(self.mode, self.size, self.context, 0.0, selects, 0.0, self.padding)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Captured sizes, ascending: here, and where known times come from."""

    here: Sequence[int]
    there: Sequence[int]

    def spaced(self, spacing: int, most: int | None = None) -> list[int]:
        """Those of at most `most` tokens to measure."""
        here, there = (
            [size for size in sizes if most is None or size <= most]
            for sizes in (self.here, self.there)
        )
        return _spaced(here, spacing, _spaced(there, spacing))


def measure(runner: Any, steering: Steering, cases: Iterable[Case]) -> list[PassTime]:
    """Measure the cases in `runner`, SGLang's ModelRunner."""
    times: list[PassTime] = []
    most = index_topk_of(runner.attn_backend)
    with made_up.no_events_left(runner):
        for case in cases:
            count = len(case.lens)
            batch = made_up.prefill(runner, [case.prefix] * count, case.lens)
            with made_up.page_tables(runner, [case.longest] * count):
                unmeasured, kind = case.unmeasured(most), attrgetter("mode", "selects")
                before = [one.host_us or 0.0 for one in times if kind(one) == kind(unmeasured)]
                took_us = _timed_us(runner, steering, case.mode, batch, min(before, default=0.0))
            if took_us is not None:
                times.append(replace(unmeasured, pass_us=took_us[0], host_us=took_us[1]))
    return times


def contexts(runner: Any) -> list[int]:
    """Keys before a few new tokens that this engine has room for; part of the key.

    Not the room itself: the pool's size differs a little from start to start.
    """
    return [context for context in _CONTEXTS if context + _FEW <= made_up.longest(runner)]


def cases(runner: Any, steering: Steering, known: Mapping[str, Any]) -> Iterator[Case]:
    """The passes to measure: those that this engine has room for, in ways that are not off.

    `known` is the key of an engine whose times may hold here, or empty: sizes that were measured
    there are measured here too, else nothing would tell whether they hold.
    """
    for case in _wanted(runner, steering, known):
        fits = case.longest <= made_up.longest(runner) and len(case.lens) <= made_up.requests(
            runner
        )
        if fits and case.mode not in steering.off:
            yield case


def _wanted(runner: Any, steering: Steering, known: Mapping[str, Any]) -> Iterator[Case]:
    topk = index_topk_of(runner.attn_backend)
    own = sorted(runner.prefill_cuda_graph_runner.capture_num_tokens)
    sizes, whole = _Sizes(own, known.get("prefill_sizes", ())), known.get("whole_pass_sizes", {})
    yield from _prefills(steering, sizes, min(topk, made_up.SHORT))
    if topk == ALL_TOKENS:
        yield from _long_prompts(steering, sizes, whole)
    largest = {*steering.rows[-1:], *known.get("decode_sizes", ())[-1:]}
    for rows in sorted({*_ROWS, *largest} & set(steering.rows)):
        for prefix in (0, *_CONTEXTS):
            # A batch to measure is made as for a prefill graph.
            if rows <= own[-1]:
                yield Case(PassMode.DECODE_GRAPH, rows, prefix, (rows,))
    if sparse := steering.graphs.get(PassMode.SPARSE_GRAPH):
        for size in _Sizes(sparse.sizes, whole.get(PassMode.SPARSE_GRAPH, ())).spaced(_FAR_SPACING):
            for prefix in (0, *_CONTEXTS):
                yield Case(PassMode.SPARSE_GRAPH, size, prefix, (size,))


def _spaced(sizes: Sequence[int], spacing: int, besides: Sequence[int] = ()) -> list[int]:
    """Those of the ascending sizes to measure: the largest, and enough below it, with `besides`.

    The smaller ones all wait for the host, as long as the smallest of these.
    """
    kept = list(sizes[-1:])
    for size in reversed(sizes[:-1]):
        if size >= _SMALLEST and (spacing * size <= kept[-1] or size in besides):
            kept.append(size)
    return kept[::-1]


def _padded(sizes: Sequence[int], most: int) -> Iterator[Case]:
    """The largest graph with as few tokens as it ever has, where it can have much padding."""
    size, below = sizes[-1], sizes[-2] if len(sizes) > 1 else 0
    if size >= _MANY and below and _SPACING * below <= size:
        for mode in _USUAL:
            yield Case(mode, size, 0, _lens(below + 1, most))


def _prefills(steering: Steering, sizes: _Sizes, most: int) -> Iterator[Case]:
    dense = [mode for mode in steering.graphs if mode in _OVER_SHORT]
    few, many = sizes.spaced(_FAR_SPACING), sizes.spaced(_SPACING)
    for size in [size for size in many if size in few or size >= _MIDDLE]:
        for mode in (*_usual(size), *dense):
            yield Case(mode, size, 0, _lens(size, most))
    mla = tuple(mode for mode in dense if mode is PassMode.DENSE_MLA_GRAPH)
    for size in few:
        # Turns behind short prefixes, and short prompts. What long turns of many tokens take lies
        # between prompts and short turns, unless they are eager.
        for turn in (_TURN, _SHORT_TURN) if size >= _MANY else (_TURN,):
            ways = (PassMode.EAGER,) if size >= _MANY and turn == _TURN else (*_usual(size), *mla)
            for mode in ways:
                yield Case(mode, size, most - min(size, turn), _lens(size, turn))
        yield from (Case(mode, size, 0, _lens(size, _PROMPT)) for mode in _USUAL if size >= _MANY)
    yield from _padded(sizes.here, most)
    for size in sizes.spaced(_FAR_SPACING, _FEW):
        for prefix in _CONTEXTS:
            for mode in _USUAL:
                yield Case(mode, size, prefix, (size,))


def _long_prompts(
    steering: Steering, sizes: _Sizes, whole: Mapping[str, Sequence[int]]
) -> Iterator[Case]:
    """Single sequences of dense MLA, which attend to ever more keys."""
    for size in [size for size in sizes.spaced(_SPACING) if size > made_up.SHORT]:
        for mode in (*_usual(size), *(mode for mode in steering.graphs if mode in _OVER_SHORT)):
            yield Case(mode, size, 0, (size,))
    if over_prefixes := steering.graphs.get(PassMode.PREFIX_GRAPH):
        there = whole.get(PassMode.PREFIX_GRAPH, ())
        for size in _Sizes(over_prefixes.sizes, there).spaced(_SPACING):
            for prefix in (prefix for room in PREFIXES for prefix in timed_prefixes(room)):
                yield Case(PassMode.PREFIX_GRAPH, size, prefix, (size,))
    for size in [size for size in sizes.spaced(_SPACING) if size >= _MANY]:
        for prefix in _CONTEXTS:
            if size > _FEW:
                yield Case(PassMode.ENGINE, size, prefix, (size,))
            yield Case(PassMode.EAGER, size, prefix, (size,))


def _usual(size: int) -> Sequence[PassMode]:
    """The ways of SGLang's own that are measured for so many tokens."""
    return (*_USUAL, PassMode.EAGER) if size >= _MANY else _USUAL


def _lens(q_tokens: int, most: int) -> tuple[int, ...]:
    """Sequences of at most `most` tokens, together `q_tokens`."""
    full, rest = divmod(q_tokens, most)
    return (most,) * full + ((rest,) if rest else ())


def _timed_us(
    runner: Any, steering: Steering, mode: PassMode, batch: Any, launch_us: float
) -> tuple[float, float] | None:
    """Least microseconds of a pass, and until the host had launched it, from its first call; None
    if the table's kernel is SGLang's own. Launching took `launch_us` at least before, or 0.

    How often it runs follows from rank 0's clock and table: a rank that ran it once more would wait
    in it for the others. The slowest rank's launches count, as all wait for it within the pass.
    """
    import torch

    took, launched = [], []
    with steering.forcing(mode):
        for _ in range(_RUNS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            runner._forward_raw(copy.copy(batch), None)
            host_s = time.perf_counter() - begin
            torch.cuda.synchronize()
            took_s = time.perf_counter() - begin
            # Not before: what asking the others takes is no part of the pass.
            host_s = steering.ranks.longest(host_s)
            same = mode is PassMode.TABLE_KERNEL and not changed(runner.attn_backend)
            if not same:
                took.append(took_s * 1e6)
                launched.append(host_s * 1e6)
            # The GPU repeats its times within a percent; a host may be up to half off.
            besides_s = host_s - launch_us / 1e6
            busy = took_s > max(_GPU_BOUND * host_s, _AT_ONCE * besides_s)
            enough = same or busy or host_s <= _STEADY * launch_us / 1e6
            if steering.ranks.from_first(enough):
                break
    return (min(took), min(launched)) if took else None
