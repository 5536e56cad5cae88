"""Steering DeepSeek V4's builders: which prefills widen their KV, and which read the paged pools.

vLLM widens the whole context of a prefill into a bf16 workspace, and reads the pools where they lie
for decodes. What is a decode is said twice for a step, by the builder of the window's metadata
(`decode_threshold`) and by that of the layers of ratio 128 (`reorder_batch_threshold`), and both
must agree. So both get one answer, from the same lengths: to take every prefill of the step for a
decode, or none. A decode of many tokens is no special case: the paged kernel takes each token as a
query of its own, with its own indices, and all buffers of decodes have a row a token.

The indexer and the compressor split a step by thresholds of their own, which stay as they are: the
indexer writes the same positions for decodes and prefills alike.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import sub
from typing import Any

from nsa_tune.engines.decision_log import DecisionLog
from nsa_tune.engines.extends import batch_of
from nsa_tune.engines.v4_answers import PAGED, SPARSE, V4Answers
from nsa_tune.engines.vllm.edge import attempt
from nsa_tune.engines.vllm.prefill import ATTRIBUTE

WINDOW, RATIO = "decode_threshold", "reorder_batch_threshold"
"""The threshold of either builder."""


def around_window_build(
    original: Callable[..., Any],
    builder: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    fast_build: bool = False,
    replay_start: Any = None,
) -> Any:
    """The hook around the window's `build`."""

    def build() -> Any:
        return original(builder, common_prefix_len, common_attn_metadata, fast_build, replay_start)

    if replay_start is not None:
        return build()
    return _built(build, builder, WINDOW, common_attn_metadata, fast_build)


def around_v4_build(
    original: Callable[..., Any],
    builder: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    fast_build: bool = False,
) -> Any:
    """The hook around the `build` of the compressed layers."""

    def build() -> Any:
        return original(builder, common_prefix_len, common_attn_metadata, fast_build)

    return _built(build, builder, RATIO, common_attn_metadata, fast_build)


def _built(build: Callable[[], Any], builder: Any, name: str, batch: Any, fast_build: bool) -> Any:
    prefill = builder.__dict__.get(ATTRIBUTE)
    if (
        prefill is None
        or prefill.busy
        or fast_build
        or not prefill.whole
        or batch.max_query_len <= prefill.decode_tokens
    ):
        return build()
    threshold = prefill.threshold(batch)
    if threshold is None:
        return build()
    own = getattr(builder, name)
    setattr(builder, name, threshold)
    try:
        # Once one builder has followed the answer, the other cannot go back.
        metadata = build() if prefill.followed else attempt("preparing a steered V4 step", build)
    finally:
        setattr(builder, name, own)
    if metadata is None:
        prefill.give_up()
        return build()
    prefill.followed = True
    return metadata


class V4Prefill:
    """Steers the builders of one engine."""

    def __init__(
        self, answers: V4Answers, *, ratio_128: bool, decode_tokens: int, log: DecisionLog | None
    ) -> None:
        self._answers = answers
        self._log = log
        self._missing = {WINDOW, RATIO} if ratio_128 else {WINDOW}
        self._seen: tuple[list[int], list[int]] | None = None
        self._threshold: int | None = None
        """The answer for the lengths that were seen last."""
        self.decode_tokens = decode_tokens
        self.busy = False
        """Whether a step is being prepared that is not to be changed."""
        self.whole = False
        """Whether all that must agree is steered."""
        self.followed = False
        """Whether a builder has followed the answer for the lengths that were seen last."""

    def take(self, builder: Any, name: str) -> None:
        """Steer `builder`, whose threshold is called `name`."""
        setattr(builder, ATTRIBUTE, self)
        self._missing.discard(name)
        self.whole = not self._missing

    def give_up(self) -> None:
        """Change nothing from now on: a builder that would have to agree cannot be steered."""
        self._missing.add("given up")
        self.whole = False

    def threshold(self, batch: Any) -> int | None:
        """The threshold under which every prefill of the step is a decode, or None for the
        engine's own: the same for both builders."""
        found = attempt("steering a V4 prefill", self._looked, batch)
        if found is None:
            self.give_up()
            return None
        return found or None

    def _looked(self, batch: Any) -> int:
        """As `threshold`; 0 for the engine's own."""
        lens = batch.seq_lens_cpu_upper_bound
        if lens is None or batch.causal is not True or batch.mm_req_doc_ranges:
            return 0
        seen = batch.query_start_loc_cpu.tolist(), lens.tolist()
        if seen != self._seen:
            self._threshold = self._decided(*seen)
            self._seen, self.followed = seen, False
        return self._threshold or 0

    def _decided(self, starts: list[int], lens: list[int]) -> int | None:
        all_news = list(map(sub, starts[1:], starts))
        first = next((i for i, new in enumerate(all_news) if new > self.decode_tokens), None)
        if first is None:
            return None
        news = all_news[first:]
        prefixes = list(map(sub, lens[first : first + len(news)], news))
        batch = batch_of(prefixes, news)
        if batch is None or min(prefixes) < 0:
            return None
        # The decodes before them are rows of the same call.
        paged = starts[-1] <= self._answers.most_q and self._answers.paged(batch)
        if self._log is not None and (count := self._log.due()):
            questions = self._answers.questions
            self._log.write(
                count,
                batch,
                own=dict.fromkeys(questions, SPARSE),
                taken=dict.fromkeys(questions, PAGED if paged else SPARSE),
                table=self._answers.table,
            )
        return max(news) if paged else None
