"""Steering V4's `_use_sparse_prefill`: whether a pass widens its KV into a bf16 workspace first, or
attends to the paged pools where they lie.

The engine's own method runs first, and only a yes of its is ever turned into a no. It is asked in
each layer and once before the first (deepseek_v4_backend.py of 0.5.23: 2950, 4043, 4263), with
other numbers of query rows, and all must hear the same. So a batch is looked at once, when it is
first asked about, by the lengths that the host has, and its answer then stays.

Why a no is safe there: it is what SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=0 makes the engine say.

- All that paged attention reads is made when a pass is prepared, before anybody asks: the pages of
  the window and of ratio 128, the lengths, the schedules of each ratio (init_flashmla_related).
  Ratio 4's indexer writes slots and positions alike, whoever reads them.
- `sparse_prefill_cache` is read by the two sparse forwards alone, which build it where it is
  missing, and goes with the pass's metadata. Before the first layer the engine builds it, if its
  method says yes, for afterwards the scheduler may change the page tables that it is made from. A
  no then and a yes later would read them too late: hence one answer a pass, and nothing else.
- Where more hangs upon the answer the backend is left alone (v4_backend.py): V4.1's indexer drops
  the slots (4043), mega attention, trtllm-gen and the fp8 kernel have sparse ways of their own, a
  CUDA graph or context parallelism has the pass prepared elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

from nsa_tune.backend.costmodel.regret import MARGIN
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.engines.decision_log import DecisionLog
from nsa_tune.backend.engines.sglang.edge import attempt
from nsa_tune.backend.engines.sglang.passes import batch_of, is_plain_extend
from nsa_tune.backend.types.batch import Batch

__all__ = ["Layers", "V4Answers", "V4Prefill", "around_sparse_prefill"]

_ATTRIBUTE = "_nsa_tune_v4"
_MOST_RECENT = 4096
_SPARSE, _PAGED = "sparse_fwd", "with_kvcache"


def around_sparse_prefill(
    original: Callable[..., Any], backend: Any, forward_batch: Any, *, num_qo_tokens: int
) -> Any:
    """The hook around `_use_sparse_prefill`."""
    own = original(backend, forward_batch, num_qo_tokens=num_qo_tokens)
    prefill = backend.__dict__.get(_ATTRIBUTE)
    if own and prefill is not None and prefill.turns_off(forward_batch):
        return False
    return own


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
        self._most_q = most_q
        self._window = setting.profile.window
        self._recent: dict[Batch, bool] = {}

    def paged(self, batch: Batch) -> bool:
        """Whether to attend to the pools where they lie."""
        known = self._recent.get(batch)
        if known is None:
            if len(self._recent) >= _MOST_RECENT:
                self._recent.clear()
            known = self._recent[batch] = self._fresh(batch)
        return known

    def _fresh(self, batch: Batch) -> bool:
        if batch.q_tokens > self._most_q:
            return False
        plan = self._plan(batch)
        chosen = {getattr(plan, question) for question in self.questions}
        if _PAGED not in chosen or None in chosen:
            return False
        if chosen == {_PAGED} and not self._layers.window:
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
            if _PAGED not in policy.survey(one).latencies or not times.keys() >= {_SPARSE, _PAGED}:
                return False  # forbidden, or not measured
            sparse_us += count * times[_SPARSE].latency_us
            paged_us += count * times[_PAGED].latency_us
        return paged_us * (1 + MARGIN) < sparse_us


class V4Prefill:
    """Steers one backend."""

    def __init__(self, answers: V4Answers, log: DecisionLog | None) -> None:
        self._answers = answers
        self._log = log
        self._seen: Callable[[], Any] = _nobody
        self._off = False
        """The answer for the batch that was seen last."""
        self._broken = False

    @classmethod
    def attach(cls, backend: Any, answers: V4Answers, log: DecisionLog | None) -> None:
        """Steer `backend` from now on."""
        setattr(backend, _ATTRIBUTE, cls(answers, log))

    def turns_off(self, forward_batch: Any) -> bool:
        """Whether this pass goes without the workspace: the same however often it is asked."""
        if self._seen() is not forward_batch:
            if self._broken:
                return False
            self._broken = not attempt("steering a V4 prefill", self._look, forward_batch)
        return self._off

    def _look(self, forward_batch: Any) -> bool:
        """Decide for a batch that was not seen before. Always True."""
        self._off = False
        # Not the batch itself: it holds the pass's tensors, and its address may be taken anew.
        self._seen = ref(forward_batch)
        self._off = self._decided(forward_batch)
        return True

    def _decided(self, forward_batch: Any) -> bool:
        if not is_plain_extend(forward_batch):
            return False
        batch = batch_of(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu)
        if batch is None:
            return False
        off = self._answers.paged(batch)
        if self._log is not None and (count := self._log.due()):
            questions = self._answers.questions
            self._log.write(
                count,
                batch,
                own=dict.fromkeys(questions, _SPARSE),
                taken=dict.fromkeys(questions, _PAGED if off else _SPARSE),
                table=self._answers.table,
            )
        return off


def _nobody() -> None:
    """The batch that was seen before the first."""
