"""Which way is the fastest for a batch: arithmetic over measured times, without an engine at hand.

The plug-in decides by it while it serves, and `nsa-tune replay` says by it what that is worth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.pass_mode.whole_pass.prefix_graphs import least_keys

GRAPH_SIZES = (
    *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
    *range(1280, 4097, 256), *range(4608, 8193, 512),
)  # fmt: skip
"""New tokens for which SGLang captures prefill graphs where nothing is given."""
_MOST_PADDING = 2
"""SGLang runs a prefill eagerly where a graph would have more than so many times its tokens."""
MARGIN = 0.03
"""Another way must be faster than SGLang's own by this share of a pass."""
_KERNEL_MARGIN = 0.01
"""The same for another kernel in SGLang's own way, of whose time on the GPU the table is sure."""
_WAITING_MARGIN = 0.1
"""The same if such a pass waits for the host, which takes up to so much longer while it serves than
it took when the pass was measured."""
_EAGER_MARGIN = 0.25
"""By this share an eager pass must be faster than all other ways. The host launches each of its
kernels, and has more to do while it serves: one took 276 ms where 192 were estimated."""
_SCORED = 0.14
"""What a key costs that is scored only, as a share of one that is attended to as well: 16 heads."""


class Graphs(Protocol):
    """Captured whole-pass graphs of one kind."""

    @property
    def sizes(self) -> Sequence[int]:
        """The captured sizes, in tokens, ascending."""

    def fits(self, size: int, batch: Batch) -> bool:
        """Whether there is a graph of `size` tokens that runs a batch with these sums."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Chooses how prefill passes of one engine run."""

    sizes: Sequence[int]
    """Tokens of SGLang's own prefill graphs, ascending."""
    index_topk: int
    graphs: Mapping[PassMode, Graphs]
    """Whole-pass graphs of the plug-in, by the way that they run."""
    rows: Sequence[int]
    """Rows of the decode graphs that may run a prefill, ascending."""

    def fastest(
        self,
        times: PassTimes | None,
        batch: Batch,
        rows: int | None,
        disabled: frozenset[PassMode] = frozenset(),
    ) -> PassMode:
        """The fastest way for a batch from its sums.

        Args:
            times: what passes were measured to take; None before they are.
            batch: the sums.
            rows: how many it takes in decode graphs; None where these may not run it.
            disabled: ways that are not taken any more.
        """
        return self.of(self.estimates_us(times, batch, rows), times, batch, disabled)

    def of(
        self,
        estimates: Mapping[PassMode, float],
        times: PassTimes | None,
        batch: Batch,
        disabled: frozenset[PassMode] = frozenset(),
    ) -> PassMode:
        """The fastest way by a batch's `estimates_us`. The other arguments are as in `fastest`."""
        kernel_us, selects = estimates.get(PassMode.TABLE_KERNEL), batch.max_kv > self.index_topk
        waits = (
            times is not None
            and kernel_us is not None
            and times.waits(PassMode.TABLE_KERNEL, kernel_us, selects=selects)
        )
        return _fastest(estimates, disabled, _WAITING_MARGIN if waits else _KERNEL_MARGIN)

    def estimates_us(
        self, times: PassTimes | None, batch: Batch, rows: int | None = None
    ) -> dict[PassMode, float]:
        """What a pass takes in each way that can run it and was measured, in microseconds.

        Args:
            times: what passes were measured to take; None before they are.
            batch: its sums.
            rows: how many it takes in decode graphs; None where these may not run it.
        """
        size = bucket(self.sizes, batch.q_tokens)
        if times is None or size is None:
            return {}
        context, selects = self.context(batch), batch.max_kv > self.index_topk
        estimates = {}
        for mode in self.ways(batch, rows):
            if mode is PassMode.ENGINE and not times.reaches(size, selects=selects):
                # It is only known to be less than its shortest passes took.
                pass_us = None
            elif mode in (PassMode.ENGINE, PassMode.TABLE_KERNEL):
                pass_us = self._usual_us(times, mode, batch, size)
            elif mode is PassMode.DECODE_GRAPH and rows is not None:
                pass_us = self._decode_us(times, rows, context)
            else:
                tokens = self._whole_size(mode, batch) or batch.q_tokens
                keys = context
                if mode is PassMode.PREFIX_GRAPH:
                    keys = max(context, least_keys(batch.prefix_tokens, tokens))
                pass_us = times.pass_us(mode, tokens, keys)
            if pass_us is not None:
                estimates[mode] = pass_us
        return estimates

    def ways(self, batch: Batch, rows: int | None) -> list[PassMode]:
        """The ways that can run a batch, measured or not. The arguments are as in `estimates_us`.

        Without a graph of SGLang's for so many tokens there are none but its own.
        """
        size = bucket(self.sizes, batch.q_tokens)
        if size is None:
            return [PassMode.ENGINE]
        ways = [PassMode.ENGINE, PassMode.TABLE_KERNEL]
        if batch.max_kv <= self.index_topk:
            ways.append(PassMode.EAGER)
        ways += [mode for mode in self.graphs if self._whole_size(mode, batch) is not None]
        if rows is not None and self.rows:
            ways.append(PassMode.DECODE_GRAPH)
        return ways

    def context(self, batch: Batch) -> float:
        """Mean keys of a new token: those of one sequence that takes as long as the batch.

        Beyond `index_topk` a key is scored, but not attended to, which costs less. So tokens of few
        and of many keys together are not as costly as their mean says.
        """
        most, mean = self.index_topk, batch.pairs / batch.q_tokens
        lens = batch.lens
        if lens is None or len(lens) == 1 or batch.max_kv <= most:
            return mean
        attended = sum(_attended(prefix, new, most) for prefix, new in lens) / batch.q_tokens
        cost = attended + _SCORED * (mean - attended)
        return cost if cost <= most else most + (cost - most) / _SCORED

    def _whole_size(self, mode: PassMode, batch: Batch) -> int | None:
        """Tokens of the whole-pass graph that runs a batch; None where there is none, or SGLang
        would find it too large."""
        graphs = self.graphs.get(mode)
        size = None if graphs is None else bucket(graphs.sizes, batch.q_tokens)
        if graphs is None or size is None or not graphs.fits(size, batch):
            return None
        return size if size <= _MOST_PADDING * batch.q_tokens else None

    def _usual_us(self, times: PassTimes, mode: PassMode, batch: Batch, size: int) -> float | None:
        """The time of SGLang's own way, which is eager where its graph would be mostly padding."""
        context = self.context(batch)
        selects = batch.max_kv > self.index_topk
        graph_us = times.padded_us(mode, size, batch.q_tokens, context, selects=selects)
        if graph_us is None or size <= _MOST_PADDING * batch.q_tokens:
            return graph_us
        # So few tokens take what launching them takes, with any context.
        launched_us = times.launched_us(batch.q_tokens, selects=selects)
        return graph_us if launched_us is None else max(graph_us, launched_us)

    def _decode_us(self, times: PassTimes, rows: int, context: float) -> float | None:
        """The time by decode graphs: as many of the largest as are full, and one of the rest."""
        full, rest = divmod(rows, self.rows[-1])
        total = 0.0
        for count, needed in ((full, self.rows[-1]), (1 if rest else 0, rest)):
            size = bucket(self.rows, needed) if count else None
            if size is not None:
                pass_us = times.pass_us(PassMode.DECODE_GRAPH, size, context)
                if pass_us is None:
                    return None
                total += count * pass_us
        return total


def _fastest(
    estimates: Mapping[PassMode, float], disabled: frozenset[PassMode], kernel_margin: float
) -> PassMode:
    """The fastest way by `estimates`, without those that are not taken any more."""
    engine_us = estimates.get(PassMode.ENGINE)
    best = _usual(estimates, disabled)
    if engine_us is None:
        return best
    least_us = engine_us
    ways = {mode: us for mode, us in estimates.items() if mode not in disabled}
    eager_us = ways.pop(PassMode.EAGER, None)
    for mode, pass_us in ways.items():
        margin = kernel_margin if mode is PassMode.TABLE_KERNEL else MARGIN
        if pass_us < (1 - margin) * engine_us and pass_us < least_us:
            best, least_us = mode, pass_us
    if eager_us is not None and eager_us < (1 - _EAGER_MARGIN) * least_us:
        return PassMode.EAGER
    return best


def _attended(prefix: int, new: int, most: int) -> int:
    """(query, key) pairs of one sequence if no query attends to more than `most` keys."""
    few = min(max(most - prefix, 0), new)
    return few * prefix + few * (few + 1) // 2 + (new - few) * most


def _usual(estimates: Mapping[PassMode, float], disabled: frozenset[PassMode]) -> PassMode:
    """SGLang's own way; where a pass like this was not measured, by the table's kernel.

    Few new tokens leave the host more to do than the GPU, and another kernel may leave it more
    still: that was measured. With many only the GPU's time counts, which the table has.
    """
    known = PassMode.TABLE_KERNEL in estimates or PassMode.TABLE_KERNEL in disabled
    return PassMode.ENGINE if known else PassMode.TABLE_KERNEL


def bucket(sizes: Sequence[int], tokens: int) -> int | None:
    """The captured size that a batch is padded to; None where it fits into none."""
    at = bisect_left(sizes, tokens)
    return sizes[at] if at < len(sizes) else None


def graph_size(tokens: int, sizes: Sequence[int] = GRAPH_SIZES) -> int:
    """Tokens that a prefill graph of so many new tokens runs; all beyond the largest, or where
    SGLang finds a graph too large."""
    size = bucket(sizes, tokens) or tokens
    return size if size <= _MOST_PADDING * tokens else tokens
