"""The buffers that SGLang's custom all-reduce registers for graphs while they are captured.

When all graphs are captured, the ranks tell each other where these buffers are: the first one of
each rank, the second one of each, and so on. A rank that failed within a graph has registered
fewer, and all graphs behind it would add up the wrong ones. So a graph that not all ranks have
captured must leave no buffer, or the engine must not go on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

GROUPS = ("_TP", "_PP", "_DCP", "_ATTN_TP", "_SHARED_EXPERTS_TP", "_MOE_EP", "_MOE_TP")
"""Groups whose all-reduces may be in a graph: variables of `parallel_state`, not of all releases.
"""


class GraphBuffers:
    """What the custom all-reduces of one process have registered and not yet exchanged."""

    def __init__(self, communicators: Sequence[Any]) -> None:
        self._communicators = communicators

    @classmethod
    def of_engine(cls) -> GraphBuffers:
        """Those of all groups of this process's ranks."""
        return cls(list(_communicators()))

    def snapshot(self) -> Mapping[int, int]:
        """How many buffers each communicator has registered, for those that can be rolled back."""
        return {at: len(buffers) for at, buffers in self._lists()}

    def rollback(self, snapshot: Mapping[int, int]) -> None:
        """Forget the buffers since `snapshot`; the graphs that they are for must not run."""
        for at, buffers in self._lists():
            del buffers[snapshot[at] :]

    def fingerprint(self) -> str | None:
        """Equal on ranks that have registered as many buffers; None where that cannot be told."""
        counts = [_count(communicator) for communicator in self._communicators]
        return None if None in counts else str(counts)

    def _lists(self) -> Iterator[tuple[int, list[Any]]]:
        for at, communicator in enumerate(self._communicators):
            buffers = getattr(communicator, "_graph_inputs", None)
            if isinstance(buffers, list):
                yield at, buffers


def _communicators() -> Iterator[Any]:
    state = import_module("sglang.srt.distributed.parallel_state")
    seen: set[int] = set()
    for name in GROUPS:
        communicator = getattr(getattr(state, name, None), "ca_comm", None)
        if communicator is None or id(communicator) in seen:
            continue
        seen.add(id(communicator))
        if not getattr(communicator, "disabled", False):
            yield communicator


def _count(communicator: Any) -> int | None:
    """Buffers that are registered: in Python, or within the older kernel's own library."""
    buffers = getattr(communicator, "_graph_inputs", None)
    if isinstance(buffers, list):
        return len(buffers)
    operations = getattr(sys.modules[type(communicator).__module__], "ops", None)
    address = getattr(communicator, "_ptr", None)
    if operations is None or address is None:
        return None
    return len(operations.get_graph_buffer_ipc_meta(address)[1])
