"""Chunk sizes measured whole: how long one prompt takes in chunks of one size.

Each chunk is a pass of its own, whose prefix is all that came before. It takes the path that the
engine takes there, in all layers and with every step that has a price: the indexer's logits grow
with the prefix, and so does what is read back. With a model of the rest of a pass, what each
further pass costs counts too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nsa_tune.backend.types.batch import Batch
from nsa_tune.reports.replay.prices import Price, Pricer, Way
from nsa_tune.reports.replay.rest import RestOfPass, kind_of

CHUNKS = (1024, 2048, 4096, 8192, 16384, 32768)
_PROMPTS = (8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """One prompt, alone, in chunks of one size."""

    prompt: int
    chunk: int
    passes: int
    engine_s: float
    """Attention, as the engine chooses."""
    table_s: float
    """Attention, as the table chooses."""
    engine_whole_s: float | None
    """Whole passes: the time to first token of this prompt. None without a model of the rest."""
    table_whole_s: float | None
    best: bool
    """Whether no other size takes the engine less time for the prompt."""
    extrapolated: bool
    """Whether a part of it lies outside of the measured batches."""
    unpriced: tuple[str, ...]
    """Steps without a price in some chunk."""

    @property
    def engine(self) -> float:
        """What sizes are compared by."""
        return self.engine_s if self.engine_whole_s is None else self.engine_whole_s

    @property
    def table(self) -> float:
        """The same as the table chooses."""
        return self.table_s if self.table_whole_s is None else self.table_whole_s


def chunk_times(
    pricer: Pricer, graph_tokens: int, rest: RestOfPass | None = None
) -> tuple[ChunkTime, ...]:
    """Every prompt in chunks of every size, as far as such passes were measured."""
    policy = pricer.dispatcher.policies.get("prefill")
    singles = [] if policy is None else [one for one in policy.measured if one.batch_size == 1]
    most_new = max((one.q_tokens for one in singles), default=0)
    most_kv = max((one.kv_tokens for one in singles), default=0)
    found: list[ChunkTime] = []
    for prompt in (one for one in _PROMPTS if one <= most_kv):
        sizes = [one for one in CHUNKS if one <= min(prompt, most_new)]
        own = [_time(pricer, prompt, chunk, graph_tokens, rest) for chunk in sizes]
        found += _marked(own)
    return tuple(found)


def _marked(found: Sequence[ChunkTime]) -> Iterator[ChunkTime]:
    least = min((one.engine for one in found), default=0.0)
    for one in found:
        yield replace(one, best=one.engine == least)


def _time(
    pricer: Pricer, prompt: int, chunk: int, graph_tokens: int, rest: RestOfPass | None
) -> ChunkTime:
    ways = (Way.ENGINE, Way.TABLE)
    seconds, whole = [0.0, 0.0], [0.0, 0.0]
    outside, unpriced = False, dict[str, None]()
    starts = range(0, prompt, chunk)
    for prefix in starts:
        batch = Batch.extend([prefix], [min(chunk, prompt - prefix)])
        graph = batch.q_tokens <= graph_tokens
        price = pricer.price(batch, graph=graph)
        outside |= _outside(price)
        unpriced |= dict.fromkeys(price.unpriced)
        for i, way in enumerate(ways):
            attention_ms = price.total_us(way) / 1e3
            seconds[i] += attention_ms / 1e3
            if rest is not None:
                sums = (1, batch.q_tokens, batch.kv_tokens, batch.max_kv, batch.pairs)
                kind = kind_of(extend=True, graph=graph)
                whole[i] += rest.ms(kind, attention_ms, sums) / 1e3
    return ChunkTime(
        prompt, chunk, len(starts), seconds[0], seconds[1],
        None if rest is None else whole[0], None if rest is None else whole[1],
        False, outside, tuple(unpriced),
    )  # fmt: skip


def _outside(price: Price) -> bool:
    return any(step.times[0].extrapolated for step in price.steps)
