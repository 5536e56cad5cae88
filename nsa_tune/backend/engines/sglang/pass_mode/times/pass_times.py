"""What passes take in this engine, by the way they run, and which way is the fastest for a batch.

Only a whole pass tells: one way may spend less on the GPU and wait longer for the host. So these
times are measured in the engine itself (calibration.py), and a way is chosen from them alone.

All ranks interpolate the same times, perhaps on hosts with different mathematical libraries. So
nothing here but +, -, *, / and exponents of two is used, which IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import floor, frexp, ldexp
from statistics import median

__all__ = ["PassMode", "PassTime", "PassTimes"]


class PassMode(StrEnum):
    """A way to run a prefill pass."""

    ENGINE = "engine"
    """As SGLang does it: a breakable CUDA graph, or eagerly where it has none."""
    TABLE_KERNEL = "table_kernel"
    """The same with the prefill kernel that the table chooses, where that is another one."""
    EAGER = "eager"
    """Without a graph, where SGLang takes MHA up to index_topk keys."""
    DENSE_GRAPH = "dense_graph"
    """One CUDA graph without breaks, in which attention is MHA over the new tokens."""
    DENSE_MLA_GRAPH = "dense_mla_graph"
    """One CUDA graph without breaks, in which attention is absorbed MLA over all keys."""
    DECODE_GRAPH = "decode_graph"
    """A decode (or verify) CUDA graph, of which rows are the new tokens."""


@dataclass(frozen=True, slots=True)
class PassTime:
    """A measured pass."""

    mode: PassMode
    q_tokens: int
    """New tokens; for a graph the size that was captured."""
    context: int
    """Mean number of keys that a new token attends to."""
    pass_us: float
    """From the pass's first call on the host until the GPU has finished it."""
    selects: bool = False
    """Whether a sequence is so long that the indexer scores and selects keys. Decode graphs always
    do that, or never: there it is False."""
    host_us: float | None = None
    """Until the host had launched it; None where that was not measured."""
    padding: int = 0
    """How many of `q_tokens` are no new tokens, but fill the graph."""

    @property
    def waits(self) -> bool:
        """Whether the GPU waited for the host, so that launching was all that the pass took."""
        return self.host_us is not None and self.pass_us < _WAITS * self.host_us


_WAITS = 1.1
"""A pass that takes up to so many times what launching it takes is one that waits for the host."""


class _Grid:
    """Times of one mode over new tokens and contexts, interpolated on log scales.

    Launching a pass takes the host as long for few tokens as for many. So all passes that waited
    for it take their median: single ones were up to half as long again.

    A pass with fewer new tokens and keys takes no longer. Where one was measured to, the host had
    something else to do.
    """

    def __init__(self, times: Sequence[PassTime]) -> None:
        rows: dict[int, dict[int, float]] = {}
        waited = [one.pass_us for one in times if one.waits]
        launched_us = median(waited) if waited else 0.0
        took = [(one, launched_us if one.waits else one.pass_us) for one in times]
        for one, _ in took:
            larger = (
                pass_us
                for other, pass_us in took
                if other.q_tokens >= one.q_tokens and other.context >= one.context
            )
            rows.setdefault(one.q_tokens, {})[one.context] = _log2(min(larger))
        self._sizes = sorted(rows)
        self._rows = [sorted(rows[size].items()) for size in self._sizes]

    def __bool__(self) -> bool:
        return bool(self._sizes)

    @property
    def largest(self) -> int:
        """The most new tokens that were measured."""
        return self._sizes[-1]

    def pass_us(self, q_tokens: int, context: float) -> float | None:
        """The time of a pass; None outside what was measured."""
        if not self._sizes or q_tokens > self._sizes[-1]:
            return None
        at = bisect_left(self._sizes, q_tokens)
        above = _along(self._rows[at], context)
        if at == 0 or self._sizes[at] == q_tokens:
            return None if above is None else _exp2(above)
        below = _along(self._rows[at - 1], context)
        if above is None or below is None:
            return None
        low, high = self._sizes[at - 1], self._sizes[at]
        share = _share(q_tokens, low, high)
        return _exp2(below + share * (above - below))


_BEYOND = 1.125
"""A context up to so many times the longest that was measured takes as long as that one."""


def _along(row: list[tuple[int, float]], context: float) -> float | None:
    """The value of a grid's row at `context`: as at its start before it, none far behind it."""
    if context <= row[0][0]:
        return row[0][1]
    if context > row[-1][0]:
        return row[-1][1] if context <= _BEYOND * row[-1][0] else None
    at = bisect_left(row, context, key=lambda point: point[0])
    (low, before), (high, after) = row[at - 1], row[at]
    return before + _share(context, low, high) * (after - before)


def _share(value: float, low: float, high: float) -> float:
    """How far `value` lies from `low` to `high`, on a log scale."""
    return (_log2(value) - _log2(low)) / (_log2(high) - _log2(low))


def _log2(value: float) -> float:
    """log2, a straight line between powers of two: within 0.09 of it."""
    mantissa, exponent = frexp(value)
    return exponent + 2 * (mantissa - 1)


def _exp2(value: float) -> float:
    """The inverse of `_log2`."""
    whole = floor(value)
    return ldexp(1 + (value - whole), whole)


_SCHEMA = "nsa-tune/pass-times/2"


class PassTimes:
    """All measured passes of one engine."""

    def __init__(
        self,
        key: Mapping[str, object],
        times: Iterable[PassTime],
        table: str | None = None,
        memory_mib: Mapping[str, int] | None = None,
    ) -> None:
        self.memory_mib = dict(memory_mib or {})
        """Memory that was taken beside SGLang's own, by what took it."""
        self.table = table
        """Which table chose the kernels of `PassMode.TABLE_KERNEL`; None where there was none."""
        self.key = dict(key)
        """What the times are valid for: GPU, engine and its version, model, heads and so on."""
        self.times = tuple(times)
        self._grids = {
            (mode, selects): _Grid(
                [
                    one
                    for one in self.times
                    if one.mode is mode and one.selects is selects and not one.padding
                ]
            )
            for mode in PassMode
            for selects in (False, True)
        }
        self._padding_costs = {mode: self._padding_cost(mode) for mode in PassMode}

    def pass_us(
        self, mode: PassMode, q_tokens: int, context: float, *, selects: bool = False
    ) -> float | None:
        """What a pass takes, in microseconds; None where that was not measured.

        Args:
            mode: the way it runs.
            q_tokens: new tokens; for a graph its size.
            context: mean number of keys that a new token attends to.
            selects: as in `PassTime`.
        """
        return self._grids[mode, selects].pass_us(q_tokens, context)

    def padded_us(
        self, mode: PassMode, size: int, q_tokens: int, context: float, *, selects: bool = False
    ) -> float | None:
        """The same for a graph of `size` tokens with only `q_tokens` new ones.

        What a graph holds runs for all of its tokens; attention, outside of it, only for new ones.
        """
        full_us = self.pass_us(mode, size, context, selects=selects)
        cost = self._padding_costs[mode]
        if full_us is None or cost == 1:
            return full_us
        fitting_us = self.pass_us(mode, q_tokens, context, selects=selects)
        return full_us if fitting_us is None else fitting_us + cost * (full_us - fitting_us)

    def launched_us(self, q_tokens: int, *, selects: bool) -> float | None:
        """What launching every kernel of a pass takes: the time of an eager pass over few keys.

        Where no eager pass was measured that selects keys, scoring and selecting are as many
        launches more as in SGLang's own way, whose graphs hold neither.
        """
        measured_us = self.pass_us(PassMode.EAGER, q_tokens, 1, selects=selects)
        if measured_us is not None or not selects:
            return measured_us
        eager_us = self.pass_us(PassMode.EAGER, q_tokens, 1)
        usual_us, selecting_us = (
            self.pass_us(PassMode.ENGINE, 1, 1, selects=one) for one in (False, True)
        )
        if eager_us is None or usual_us is None or selecting_us is None:
            return eager_us
        return eager_us + max(selecting_us - usual_us, 0.0)

    def _padding_cost(self, mode: PassMode) -> float:
        """What a token of padding costs of what a new token costs, from 0 to 1; 1 where that was
        not measured."""
        for one in self.times:
            if one.mode is mode and one.padding:
                new = one.q_tokens - one.padding
                full_us = self.pass_us(mode, one.q_tokens, one.context, selects=one.selects)
                fitting_us = self.pass_us(mode, new, one.context, selects=one.selects)
                if full_us is not None and fitting_us is not None and full_us > fitting_us:
                    share = (one.pass_us - fitting_us) / (full_us - fitting_us)
                    return min(max(share, 0.0), 1.0)
        return 1.0

    def as_text(self) -> str:
        """The same as JSON."""
        document = {
            "schema": _SCHEMA,
            "key": self.key,
            "table": self.table,
            "memory_mib": self.memory_mib,
            "times": [asdict(one) for one in self.times],
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_text(cls, text: str) -> PassTimes:
        """Times that `as_text` wrote.

        Raises:
            ValueError: when the text is something else; it says what is wrong.
        """
        try:
            document = json.loads(text)
            if document["schema"] != _SCHEMA:
                raise ValueError(f"its schema is {document['schema']!r}, not {_SCHEMA!r}")
            times = [
                PassTime(
                    PassMode(one["mode"]), int(one["q_tokens"]), int(one["context"]),
                    float(one["pass_us"]), bool(one["selects"]),
                    # Not every version of the plug-in has measured the other two.
                    None if one.get("host_us") is None else float(one["host_us"]),
                    int(one.get("padding", 0)),
                )
                for one in document["times"]
            ]  # fmt: skip
            key = dict(document["key"])
            table = document["table"]
            # Times that were kept before memory was measured have none.
            memory_mib = {
                str(what): int(mib) for what, mib in document.get("memory_mib", {}).items()
            }
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError(f"a field is missing or of the wrong kind: {error}") from error
        for one in times:
            if not (1 <= one.q_tokens < 2**31 and 1 <= one.context < 2**31):
                raise ValueError(f"{one.q_tokens} new tokens over {one.context} keys is no pass")
            if not 1 <= one.pass_us <= 1e9:
                raise ValueError(f"{one.pass_us} us is no time of a pass")
            if one.host_us is not None and not 0 <= one.host_us <= 1e9:
                raise ValueError(f"{one.host_us} us is no time of a host")
            if not 0 <= one.padding < one.q_tokens:
                raise ValueError(f"{one.padding} of {one.q_tokens} tokens is no padding")
        if table is not None and type(table) is not str:
            raise ValueError(f"{table!r} is no name of a table")
        return cls(key, times, table, memory_mib)
