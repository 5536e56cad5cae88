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

from collections.abc import Callable
from typing import Any
from weakref import ref

from nsa_tune.engines.decision_log import DecisionLog
from nsa_tune.engines.extends import batch_of
from nsa_tune.engines.sglang.edge import attempt
from nsa_tune.engines.sglang.passes import is_plain_extend
from nsa_tune.engines.v4_answers import PAGED, SPARSE, V4Answers

_ATTRIBUTE = "_nsa_tune_v4"


def around_sparse_prefill(
    original: Callable[..., Any], backend: Any, forward_batch: Any, *, num_qo_tokens: int
) -> Any:
    """The hook around `_use_sparse_prefill`."""
    own = original(backend, forward_batch, num_qo_tokens=num_qo_tokens)
    prefill = backend.__dict__.get(_ATTRIBUTE)
    if own and prefill is not None and prefill.turns_off(forward_batch):
        return False
    return own


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
                own=dict.fromkeys(questions, SPARSE),
                taken=dict.fromkeys(questions, PAGED if off else SPARSE),
                table=self._answers.table,
            )
        return off


def _nobody() -> None:
    """The batch that was seen before the first."""
