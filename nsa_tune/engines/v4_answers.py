"""One choice for all of V4's layers in a pass: does it widen its KV, or read the paged pools?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from nsa_tune.backend.costmodel.regret import MARGIN
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.variables import asked_for

V4_SWITCH = "NSA_TUNE_V4"
"""Environment variable: 1 lets a plug-in decide for V4."""

SPARSE, PAGED = "sparse_fwd", "with_kvcache"
_MOST_RECENT = 4096


def check_asked() -> None:
    """Go on only where deciding for V4 is asked for.

    Raises:
        LeftAlone: when nobody asked for it.
    """
    if not asked_for(V4_SWITCH):
        raise LeftAlone(f"no GPU has run an engine with that yet; {V4_SWITCH}=1 asks for it")


@dataclass(frozen=True, slots=True)
class Layers:
    """The attention layers that a process runs."""

    compressed: Mapping[int, int]
    """How many there are of each compression ratio."""
    window: int
    """Those that attend to the window alone."""


class V4Answers:
    """One choice for all layers of a pass; recent ones are kept."""

    def __init__(self, dispatcher: Dispatcher, layers: Layers, *, most_q: int) -> None:
        """`most_q` is the most new tokens for which there is scratch memory."""
        setting = dispatcher.setting
        self.table = {
            "gpu": setting.device.name,
            "model": setting.profile.name,
            "heads": setting.heads,
            "kv_layout": str(setting.layout),
        }
        """Which table answers, for the decision log."""
        self.questions = tuple(f"v4_prefill_c{ratio}" for ratio in layers.compressed)
        self._plan = dispatcher.plan
        self._policies = dispatcher.policies
        self._layers = layers
        self.most_q = most_q
        self._window = setting.profile.window
        self._recent: dict[Batch, bool] = {}

    def check_measured(self) -> None:
        """Whether the table has times of both ways in every layer.

        Raises:
            LeftAlone: when it has not.
        """
        for question in self.questions:
            policy = self._policies[question]
            if not all(policy.spread(arm) < inf for arm in (SPARSE, PAGED)):
                raise LeftAlone(f"the table has no times of {question}")

    def paged(self, batch: Batch) -> bool:
        """Whether to attend to the pools where they lie."""
        known = self._recent.get(batch)
        if known is None:
            if len(self._recent) >= _MOST_RECENT:
                self._recent.clear()
            known = self._recent[batch] = self._fresh(batch)
        return known

    def _fresh(self, batch: Batch) -> bool:
        if batch.q_tokens > self.most_q:
            return False
        plan = self._plan(batch)
        chosen = {getattr(plan, question) for question in self.questions}
        if PAGED not in chosen or None in chosen:
            return False
        if chosen == {PAGED} and not self._layers.window:
            return True
        return self._gains(batch)

    def _gains(self, batch: Batch) -> bool:
        """Whether all layers together are faster that way, by more than counts as equal.

        By the estimates, which know the measured neighbours: near a break-even the cost models that
        plans are made by may be off by more than a layer gains.

        What either way does once a pass is in each layer's time: the paged kernel's schedule, and
        in layers of ratio 128 and of the window alone the combining of indices, which is the less.
        What the sparse way does besides to prepare a pass is in none, so that it is dearer still.
        """
        of = list(zip(self._layers.compressed.values(), self.questions, strict=True))
        asked = [(count, question, batch) for count, question in of]
        if self._layers.window:
            # A layer of the window alone is not measured. One of ratio 128 with nothing but the
            # window behind it has a compressed token more for each 128 that are new.
            behind = [min(prefix, self._window) for prefix, _ in batch.lens or ()]
            asked.append(
                (self._layers.window, "v4_prefill_c128", Batch.extend(behind, batch.new_lens or ()))
            )
        sparse_us = paged_us = 0.0
        for count, question, one in asked:
            policy = self._policies[question]
            times = policy.estimates(one)
            if PAGED not in policy.survey(one).latencies or not times.keys() >= {SPARSE, PAGED}:
                return False  # forbidden, or not measured
            sparse_us += count * times[SPARSE].latency_us
            paged_us += count * times[PAGED].latency_us
        return paged_us * (1 + MARGIN) < sparse_us
