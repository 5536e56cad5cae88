"""The buffers that SGLang's custom all-reduce has noted for graphs while they are captured.

When all graphs are captured, the ranks tell each other where these buffers are: the first one of
each rank, the second one of each, and so on. A rank that failed within a graph has noted fewer, and
all graphs behind it would add up the wrong ones. So a graph that not all ranks have captured must
leave no buffer, or the engine must not go on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

GROUPS = ("_TP", "_PP", "_DCP", "_ATTN_TP", "_SHARED_EXPERTS_TP", "_MOE_EP", "_MOE_TP")
"""Groups whose all-reduces may be in a graph: variables of `parallel_state`, not of all releases.
"""


class NotedBuffers:
    """What the custom all-reduces of one process have noted and not yet exchanged."""

    def __init__(self, communicators: Sequence[Any]) -> None:
        self._communicators = communicators

    @classmethod
    def of_engine(cls) -> NotedBuffers:
        """Those of all groups of this process's ranks."""
        return cls(list(_communicators()))

    def marks(self) -> Mapping[int, int]:
        """How far the notes are that can be taken back."""
        return {at: len(notes) for at, notes in self._lists()}

    def take_back(self, marks: Mapping[int, int]) -> None:
        """Forget what was noted since `marks`; the graphs that it was noted for must not run."""
        for at, notes in self._lists():
            del notes[marks[at] :]

    def counted(self) -> str | None:
        """How much is noted, in words that are equal on ranks that have noted as much; None where
        that cannot be told."""
        counts = [_count(one) for one in self._communicators]
        return None if None in counts else str(counts)

    def _lists(self) -> Iterator[tuple[int, list[Any]]]:
        for at, one in enumerate(self._communicators):
            notes = getattr(one, "_graph_inputs", None)
            if isinstance(notes, list):
                yield at, notes


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
    """Buffers that are noted: in Python, or within the older kernel's own library."""
    notes = getattr(communicator, "_graph_inputs", None)
    if isinstance(notes, list):
        return len(notes)
    operations = getattr(sys.modules[type(communicator).__module__], "ops", None)
    address = getattr(communicator, "_ptr", None)
    if operations is None or address is None:
        return None
    return len(operations.get_graph_buffer_ipc_meta(address)[1])
