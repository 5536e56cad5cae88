"""The ranks of one engine: they agree before anything is steered, and go by rank 0's numbers.

A rank that replays one graph while another runs a different one would wait for it for ever.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from nsa_tune.engines.agreement import agree, refuse, silent
from nsa_tune.engines.edge import EngineMustStop
from nsa_tune.engines.sglang import say_once

T = TypeVar("T")

_asked: Counter[str] = Counter()
"""How often this process has come to each topic: SGLang may capture its graphs anew."""
_unanswered: list[str] = []
"""Topics to which a rank said nothing in time: from then on nothing is agreed on."""

_TIMEOUT = "NSA_TUNE_AGREE_S"
"""Environment variable: seconds to wait for the other ranks, 60 where it is not set."""


def parallel() -> Any:
    """SGLang's own record of its ranks and groups, the same in all known releases."""
    return import_module("sglang.srt.runtime_context").get_parallel()


class Ranks:
    """This rank among those of its tensor-parallel group."""

    def __init__(self, runner: Any) -> None:
        """`runner` is SGLang's ModelRunner."""
        # Later releases keep the group elsewhere.
        group = getattr(runner, "tp_group", None)
        self._group = parallel().tp_group if group is None else group
        self.rank = int(self._group.rank_in_group)
        self.count = int(self._group.world_size)
        # Stages of a pipeline have groups of their own, and share the store.
        self._first = int(getattr(self._group, "first_rank", 0))

    def agree(self, topic: str, value: str | None) -> bool:
        """Whether all ranks come to the same topic with the same value, within a minute.

        Pass None to veto: a rank that leaves everything to SGLang waits for nobody. A rank that was
        waited for in vain, such as one without the plug-in, is waited for only once.
        """
        if self.count == 1:
            return value is not None
        topic = _numbered(f"{self._first}/{topic}")
        if value is None or _unanswered:
            refuse(_store(), topic)
            return False
        return self._agree(topic, value)

    def together(self, what: str, call: Callable[[], T]) -> T | None:
        """The result of `call`, in which ranks may wait for each other; None if it failed on any.

        Every rank must call it, in the same order. With one rank an error is raised as it is.

        Args:
            what: what is done, as part of a sentence.
            call: what every rank does.

        Raises:
            EngineMustStop: it failed here, and another rank has not come back from it in time.
        """
        if self.count == 1:
            return call()
        topic = _numbered(f"{self._first}/{what}")
        try:
            result = call()
        except EngineMustStop:
            raise
        except Exception as error:
            self._agree(topic, f"failed on rank {self.rank}")
            missing = silent(_store(), topic, ranks=self.count)
            if missing:
                raise EngineMustStop(self._stuck(what, error, missing)) from error
            raise
        return result if self._agree(topic, "done") else None

    def _stuck(self, what: str, error: Exception, missing: list[int]) -> str:
        ranks = ", ".join(map(str, missing))
        return (
            f"{what} failed on rank {self.rank} ({type(error).__name__}: {error}) while rank "
            f"{ranks} still waits for it, so this engine cannot start. Start it with "
            f"NSA_TUNE_PASS_MODE=0, or, if memory ran out, with a smaller --mem-fraction-static "
            f"or with NSA_TUNE_DENSE_GRAPHS=0"
        )

    def _agree(self, topic: str, value: str) -> bool:
        store, begin = _store(), time.monotonic()
        timeout_s = float(os.environ.get(_TIMEOUT, "60"))
        alike = agree(store, topic, value, rank=self.rank, ranks=self.count, timeout_s=timeout_s)
        if not alike and time.monotonic() - begin >= timeout_s:
            ranks = ", ".join(map(str, silent(store, topic, ranks=self.count)))
            text = f"rank {ranks} says nothing, as one without the plug-in: SGLang decides on all"
            say_once(logging.WARNING, text)
            _unanswered.append(topic)
        return alike

    def from_first(self, value: T) -> T:
        """Rank 0's value; every rank must call it, in the same order."""
        if self.count == 1:
            return value
        first: T = self._group.broadcast_object(value if self.rank == 0 else None, src=0)
        return first

    def longest(self, value: float) -> float:
        """The largest of all ranks' values; every rank must call it, in the same order."""
        return value if self.count == 1 else max(self._group.all_gather_object(value))


def _store() -> Any:
    return import_module("torch.distributed.distributed_c10d")._get_default_store()


def _numbered(topic: str) -> str:
    _asked[topic] += 1
    return f"{topic}/{_asked[topic]}"
