"""What passes take in one engine, by the way they run.

Only a whole pass tells: one way may spend less on the GPU and wait longer for the host. So these
times are measured in the engine itself (calibration.py), and a way is chosen from them alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times.grid import Grid
from nsa_tune.engines.sglang.pass_mode.times.pass_time import WAITS, PassTime

_SCHEMA = "nsa-tune/pass-times/2"
_LAUNCHED = frozenset({PassMode.ENGINE, PassMode.TABLE_KERNEL})
"""Ways that wait for the host where tokens are few."""
_UNHINDERED = (PassMode.SPARSE_GRAPH, PassMode.DENSE_MLA_GRAPH, PassMode.DENSE_GRAPH)
"""Ways that do the same work without waiting: first what is most alike, last what is measured at
the most sizes."""


class PassTimes:
    """All measured passes of one engine."""

    def __init__(
        self,
        key: Mapping[str, object],
        times: Iterable[PassTime],
        table: str | None = None,
        memory_mib: Mapping[str, int] | None = None,
        verdicts: Mapping[str, str] | None = None,
        kernels: Mapping[str, str] | None = None,
    ) -> None:
        self.kernels = dict(kernels or {})
        """What the table chose where `PassMode.TABLE_KERNEL` was to be timed, by `kernel_place`.
        Where that was SGLang's own kernel too, there is no such time."""
        self.verdicts = dict(verdicts or {})
        """In words, whether each way was right and fast enough when the engine last started."""
        self.memory_mib = dict(memory_mib or {})
        """Memory that was taken beside SGLang's own, by what took it."""
        self.table = table
        """Which table chose those kernels, in words; None where there was none."""
        self.key = dict(key)
        """What the times are valid for: GPU, engine and its version, model, heads and so on."""
        self.times = tuple(times)
        self._grids = self._gridded()
        self._padding_costs = {mode: self._padding_cost(mode) for mode in PassMode}

    def _gridded(self) -> dict[tuple[PassMode, bool], Grid]:
        """By the way and whether keys are selected."""
        times: dict[tuple[PassMode, bool], list[PassTime]] = {
            (mode, selects): [] for mode in PassMode for selects in (False, True)
        }
        for time in self.times:
            if not time.padding:
                times[time.mode, time.selects].append(time)
        graphs = [found for mode in _UNHINDERED if (found := times[mode, False])]
        shortest: dict[int, PassTime] = {}
        for time in sorted(graphs[-1] if graphs else (), key=lambda one: one.context):
            shortest.setdefault(time.q_tokens, time)
        growth = [(size, shortest[size].pass_us) for size in sorted(shortest)]
        unhindered = Grid(graphs[0], growth) if graphs else None
        return {
            (mode, selects): Grid(found, growth, unhindered if mode in _LAUNCHED else None)
            for (mode, selects), found in times.items()
        }

    def with_verdicts(self, verdicts: Mapping[str, str], peak_mib: int) -> PassTimes:
        """The same times with what another start has found, and what that took of memory."""
        memory_mib = self.memory_mib | {"released before serving": peak_mib}
        return PassTimes(self.key, self.times, self.table, memory_mib, verdicts, self.kernels)

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

    def waits(self, mode: PassMode, pass_us: float, *, selects: bool) -> bool:
        """Whether a pass that takes `pass_us` waits for its host, or nearly does.

        The other arguments are those of `pass_us`.
        """
        return pass_us <= WAITS * self._grids[mode, selects].launched_us

    def reaches(self, q_tokens: int, *, selects: bool) -> bool:
        """Whether SGLang's own passes of so few new tokens are known: by their size, or since
        shorter ones than those that wait for the host take as long as these."""
        grid = self._grids[PassMode.ENGINE, selects]
        return not grid.least_tokens or q_tokens >= grid.least_tokens or grid.launched_us > 0

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
            self.pass_us(PassMode.ENGINE, 1, 1, selects=selecting) for selecting in (False, True)
        )
        if eager_us is None or usual_us is None or selecting_us is None:
            return eager_us
        return eager_us + max(selecting_us - usual_us, 0.0)

    def _padding_cost(self, mode: PassMode) -> float:
        """What a token of padding costs of what a new token costs, from 0 to 1; 1 where that was
        not measured."""
        for time in self.times:
            if time.mode is mode and time.padding:
                new = time.q_tokens - time.padding
                full_us = self.pass_us(mode, time.q_tokens, time.context, selects=time.selects)
                fitting_us = self.pass_us(mode, new, time.context, selects=time.selects)
                if full_us is not None and fitting_us is not None and full_us > fitting_us:
                    share = (time.pass_us - fitting_us) / (full_us - fitting_us)
                    return min(max(share, 0.0), 1.0)
        return 1.0

    def as_text(self) -> str:
        """The same as JSON."""
        document = {
            "schema": _SCHEMA,
            "key": self.key,
            "table": self.table,
            "memory_mib": self.memory_mib,
            "verdicts": self.verdicts,
            "kernels": self.kernels,
            "times": [asdict(time) for time in self.times],
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
                    PassMode(fields["mode"]), int(fields["q_tokens"]), int(fields["context"]),
                    float(fields["pass_us"]), bool(fields["selects"]),
                    # Not every version of the plug-in has measured the other two.
                    None if fields.get("host_us") is None else float(fields["host_us"]),
                    int(fields.get("padding", 0)),
                )
                for fields in document["times"]
            ]  # fmt: skip
            key = dict(document["key"])
            table = document["table"]
            # Times that were kept before memory was measured have none.
            memory_mib = {str(at): int(mib) for at, mib in document.get("memory_mib", {}).items()}
            verdicts, kernels = (
                {str(name): str(value) for name, value in document.get(field, {}).items()}
                for field in ("verdicts", "kernels")
            )
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError(f"a field is missing or of the wrong kind: {error}") from error
        for time in times:
            if not (1 <= time.q_tokens < 2**31 and 1 <= time.context < 2**31):
                raise ValueError(f"{time.q_tokens} new tokens over {time.context} keys is no pass")
            if not 1 <= time.pass_us <= 1e9:
                raise ValueError(f"{time.pass_us} us is no time of a pass")
            if time.host_us is not None and not 0 <= time.host_us <= 1e9:
                raise ValueError(f"{time.host_us} us is no time of a host")
            if not 0 <= time.padding < time.q_tokens:
                raise ValueError(f"{time.padding} of {time.q_tokens} tokens is no padding")
        if table is not None and type(table) is not str:
            raise ValueError(f"{table!r} is no name of a table")
        return cls(key, times, table, memory_mib, verdicts, kernels)
