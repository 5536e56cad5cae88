"""Requests as a scheduler meets them: when each arrives, and how much of its input is cached.

Requests are prefilled in the order of their arrival. So what the prefix cache holds of each does
not depend on when passes run, and is found out once, however often a trace is replayed.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import NamedTuple, Self

from nsa_tune._errors import NsaTuneError
from nsa_tune.autotune.workload.requests import BLOCK, TraceRequest


class Arrival(NamedTuple):
    """One request."""

    arrival_s: float
    """Seconds since the trace's first request."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    """Leading tokens of the input that are in the prefix cache when its prefill begins; at most all
    but the last, which is always computed."""


def arrivals(requests: Iterable[TraceRequest], cache_tokens: int) -> Iterator[Arrival]:
    """`requests`, which are in order of arrival, with a prefix cache of so many tokens."""
    cache = _Cache(cache_tokens)
    for arrival_s, input_tokens, output_tokens, blocks in requests:
        cached = min(cache.prefilled(blocks), input_tokens - 1) if blocks else 0
        yield Arrival(arrival_s, input_tokens, output_tokens, cached)


class _Cache:
    """The prefix cache: blocks in the pool, the least recently used first."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // BLOCK
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def prefilled(self, blocks: tuple[Hashable, ...]) -> int:
        """A request with these blocks is prefilled: how many leading tokens were cached. All of
        its blocks are cached then, and others evicted."""
        held, leading, cached = self._blocks, 0, True
        for block in blocks:
            if block in held:
                held.move_to_end(block)
                leading += cached
            else:
                held[block] = None
                cached = False
        while len(held) > self._most:
            held.popitem(last=False)
        return leading * BLOCK


@dataclass(slots=True)
class Counted:
    """How much was read."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


_BLOCK = 256
"""Requests that are kept together."""
_MOST_IN_MEMORY = 2**20
"""Bytes; what is kept of a longer trace goes to the disk."""
_arrival = partial(tuple.__new__, Arrival)
"""As `Arrival._make`, which takes longer."""


class KeptArrivals:
    """Arrivals that can be iterated over several times. Reading a trace takes longer than most of
    its replay, and so it is read once: what was read is kept in a temporary file.

    Memory does not grow with the number of requests; the file has some 20 bytes for each. A context
    manager, which removes the file.
    """

    def __init__(self, coming: Iterable[Arrival]) -> None:
        self._coming = iter(coming)
        # It has no name, so nobody else can write what is unpickled.
        self._kept = SpooledTemporaryFile(_MOST_IN_MEMORY)  # noqa: SIM115
        self._end = 0
        """Bytes that are kept."""
        self.counted = Counted()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What could not be written has been told of already.
        with suppress(OSError):
            self._kept.close()

    def __iter__(self) -> Iterator[Arrival]:
        """All arrivals from the first on.

        Raises:
            NsaTuneError: when the temporary file cannot be written.
        """
        return chain.from_iterable(self._blocks())

    def _blocks(self) -> Iterator[Iterable[Arrival]]:
        at = 0
        while True:
            if at == self._end:
                block = list(islice(self._coming, _BLOCK))
                if not block:
                    return
                self._keep(block)
                at = self._end
                yield block
            else:
                self._kept.seek(at)
                found: list[tuple[object, ...]] = pickle.load(self._kept)
                at = self._kept.tell()
                yield map(_arrival, found)

    def _keep(self, block: list[Arrival]) -> None:
        try:
            self._kept.seek(self._end)
            pickle.dump(list(map(tuple, block)), self._kept, pickle.HIGHEST_PROTOCOL)
            # A full disk is found here, and not when the file is read or closed.
            self._kept.flush()
        except OSError as error:
            raise NsaTuneError(
                f"the requests of the trace cannot be kept in a temporary file ({error.strerror}); "
                "set TMPDIR to a folder with more room"
            ) from error
        self._end = self._kept.tell()
        counted = self.counted
        counted.requests += len(block)
        counted.prompt_tokens += sum([one.input_tokens for one in block])
        counted.output_tokens += sum([one.output_tokens for one in block])
