"""The batches that the prefill point sweeps, and random ones for held-out checks."""

from __future__ import annotations

from math import exp, log
from random import Random

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

# In the profile's unit, index_topk: up to 1 the dense regime, where MHA may run, beyond it only
# MLA. A model without an indexer has one regime.
_DENSE_PREFIXES = (0.0, 1 / 128, 1 / 16, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 15 / 16)
_SPARSE_PREFIXES = (0.0, 1 / 2, 1.0, 4.0, 16.0, 62.0)
_NEWS = tuple(2.0**k for k in range(-7, 4))
_RANDOM, _RANDOM_ON_A_CPU = 64, 16
"""Random batches besides: some are ragged, and their lengths lie between powers of two."""


def _limits(setting: Setting) -> tuple[int, int]:
    """Most (q tokens, kv tokens) of a swept batch; a CPU is given what it computes in a second."""
    topk = setting.profile.unit
    return (2 * topk, 16 * topk) if setting.device.arch == "cpu" else (8 * topk, 64 * topk)


def _news(setting: Setting) -> list[int]:
    return sorted({1, *(max(round(new * setting.profile.unit), 1) for new in _NEWS)})


def grid(setting: Setting) -> list[Batch]:
    """Equal sequences over prefix length, new tokens and sequence count, and random batches; coarse
    batches first.

    Dense regime: 1, 4, 16 and 64 sequences of up to index_topk tokens. Beyond: 1, 4 and 16
    sequences with prefixes of up to 62 index_topk.
    """
    topk = setting.profile.unit
    shapes: dict[tuple[int, int, int], int] = {}
    for i, prefix in enumerate(_DENSE_PREFIXES):
        for j, new in enumerate([*_news(setting), topk - round(prefix * topk)]):
            for k, count in enumerate((1, 4, 16, 64)):
                if round(prefix * topk) + new <= topk:
                    shapes.setdefault((count, round(prefix * topk), new), i % 2 + j % 2 + k % 2)
    for i, prefix in enumerate(_SPARSE_PREFIXES):
        for j, new in enumerate(_news(setting)):
            for k, count in enumerate((1, 4, 16)):
                if round(prefix * topk) + new > topk:
                    shapes.setdefault((count, round(prefix * topk), new), i % 2 + j % 2 + k % 2)
    most_q, most_kv = _limits(setting)
    fits = [
        (rank, shape)
        for shape, rank in shapes.items()
        if shape[0] * shape[2] <= most_q and shape[0] * (shape[1] + shape[2]) <= most_kv
    ]
    ranks = {Batch.extend([prefix] * n, [new] * n): rank for rank, (n, prefix, new) in fits}
    random = Random(0)
    wanted = len(ranks) + (_RANDOM_ON_A_CPU if setting.device.arch == "cpu" else _RANDOM)
    while len(ranks) < wanted:
        # Some in each rank.
        ranks.setdefault(sample(setting, random), len(ranks) % 4)
    # Shuffled within a rank, so that any first part of the sweep is spread over all of it.
    return sorted(ranks, key=lambda batch: (ranks[batch], random.random()))


def sample(setting: Setting, random: Random) -> Batch:
    """A random extend: half dense regime, half beyond; half of those of several sequences ragged, a
    quarter without prefix."""
    topk = setting.profile.unit
    most_q, most_kv = _limits(setting)
    dense, ragged, cold = random.random() < 0.5, random.random() < 0.5, random.random() < 0.25
    while True:
        count = round(exp(random.uniform(0, log(64))))
        shapes = [
            _sequence(random, topk, most_q // count, most_kv // count, dense, cold)
            for _ in range(count if ragged else 1)
        ]
        if not ragged:
            shapes *= count
        batch = Batch.extend([prefix for prefix, _ in shapes], [new for _, new in shapes])
        if (batch.max_kv <= topk) == dense and batch.q_tokens <= most_q:
            return batch


def _sequence(
    random: Random, topk: int, most_q: int, most_kv: int, dense: bool, cold: bool
) -> tuple[int, int]:
    longest = topk if dense else max(most_kv, 2)
    new = round(exp(random.uniform(0, log(min(longest, max(most_q, 2))))))
    if cold or new >= longest:
        return 0, new
    return round(exp(random.uniform(0, log(longest - new)))), new
