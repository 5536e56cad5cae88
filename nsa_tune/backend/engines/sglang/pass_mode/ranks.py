"""The ranks of one engine: they agree before anything is steered, and go by rank 0's numbers.

A rank that replays one graph while another runs a different one would wait for it for ever.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib import import_module
from typing import Any, TypeVar

from nsa_tune.backend.engines.agreement import agree, refuse
from nsa_tune.backend.engines.sglang.parallel import parallel

__all__ = ["Ranks"]

T = TypeVar("T")

_asked: Counter[str] = Counter()
"""How often this process has asked each question: SGLang may capture its graphs anew."""

_TIMEOUT = "NSA_TUNE_AGREE_S"
"""Environment variable: seconds to wait for the other ranks, 60 where it is not set."""


class Ranks:
    """This rank among those of its tensor-parallel group."""

    def __init__(self, runner: Any) -> None:
        """`runner` is SGLang's ModelRunner."""
        # Later releases keep the group elsewhere.
        group = getattr(runner, "tp_group", None)
        self._group = parallel().tp_group if group is None else group
        self.rank = int(self._group.rank_in_group)
        self.count = int(self._group.world_size)

    def all_say(self, question: str, answer: str | None) -> bool:
        """Whether all ranks ask the same question and give the same answer, within a minute.

        None refuses for all: a rank that leaves everything to SGLang waits for nobody.
        """
        if self.count == 1:
            return answer is not None
        _asked[question] += 1
        question = f"{question}/{_asked[question]}"
        store = import_module("torch.distributed.distributed_c10d")._get_default_store()
        if answer is None:
            refuse(store, question)
            return False
        timeout_s = float(os.environ.get(_TIMEOUT, "60"))
        return agree(store, question, answer, rank=self.rank, ranks=self.count, timeout_s=timeout_s)

    def from_first(self, value: T) -> T:
        """Rank 0's value; every rank must call it, in the same order."""
        if self.count == 1:
            return value
        found: T = self._group.broadcast_object(value if self.rank == 0 else None, src=0)
        return found
