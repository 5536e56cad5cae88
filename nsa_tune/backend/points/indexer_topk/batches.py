"""The batches that the indexer_topk point sweeps, and random ones for held-out checks."""

from __future__ import annotations

from math import exp, log
from random import Random

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

_DECODES = (1, 4, 16, 32, 64, 128, 256, 512)
"""Sequences of a step; every other one verifies two tokens."""
_CONTEXTS = (5 / 4, 2, 4, 8, 16, 32, 64)
"""In index_topk."""
_EXTENDS = (1 / 64, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
_PREFIXES = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 60.0)
_RANDOM, _RANDOM_ON_A_CPU = 32, 8
"""Random batches besides: of few rows, some select and others take all keys."""


def _most_scores(setting: Setting) -> int:
    """Most rows times columns of a swept batch: 4 GB, or what a CPU selects from in a second."""
    return 2**18 if setting.device.arch == "cpu" else 2**30


def grid(setting: Setting) -> list[Batch]:
    """Steps over sequences and context, and extends over new tokens, prefix and sequences; every
    third of several lengths; and random batches. Coarse batches first."""
    random, topk = Random(0), setting.profile.index_topk
    fits: list[tuple[int, float, Batch]] = []

    def add(rank: int, batch: Batch) -> None:
        if batch.max_kv > topk and batch.q_tokens * batch.max_kv <= _most_scores(setting):
            fits.append((rank, random.random(), batch))

    for i, count in enumerate(_DECODES):
        for j, scale in enumerate(_CONTEXTS):
            contexts = _lengths(random, count, round(scale * topk), (i + j) % 3 == 2)
            add(i % 2 + j % 2, Batch.verify(contexts, 2) if i % 2 else Batch.decode(contexts))
    for i, new in enumerate(_EXTENDS):
        for j, prefix in enumerate(_PREFIXES):
            count = (1, 4)[(i + j) % 2] if new >= 1 / 4 else 1
            prefixes = _lengths(random, count, round(prefix * topk), (i + j) % 3 == 2)
            add(i % 2 + j % 2, Batch.extend(prefixes, [max(round(new * topk) // count, 1)] * count))
    for rank in range(_RANDOM_ON_A_CPU if setting.device.arch == "cpu" else _RANDOM):
        add(rank % 3, sample(setting, random))
    return list(dict.fromkeys(batch for _, _, batch in sorted(fits, key=lambda fit: fit[:2])))


def _lengths(random: Random, count: int, length: int, ragged: bool) -> list[int]:
    """`count` times `length`, or up to 8 uneven lengths of half of it to all of it."""
    if not ragged or length < 8:
        return [length] * count
    kinds = min(count, 8)
    uneven = [random.randint(length // 2, length - 1) | 1 for _ in range(kinds)]
    return [uneven[i * kinds // count] for i in range(count)]


def sample(setting: Setting, random: Random) -> Batch:
    """A random step of up to 512 sequences, or an extend of up to 8; half of them ragged."""
    topk, most = setting.profile.index_topk, _most_scores(setting)
    while True:
        batch = _drawn(topk, random)
        if batch.max_kv > topk and batch.q_tokens * batch.max_kv <= most:
            return batch


def _drawn(topk: int, random: Random) -> Batch:
    extends, ragged = random.random() < 0.5, random.random() < 0.5
    count = round(exp(random.uniform(0, log(8 if extends else 512))))
    next_n = random.choice((1, 2, 4))

    def length() -> int:
        return round(exp(random.uniform(log(topk / 2), log(64 * topk))))

    contexts = [length() for _ in range(count)] if ragged else [length()] * count
    if not extends:
        return Batch.decode(contexts) if next_n == 1 else Batch.verify(contexts, next_n)
    new = round(exp(random.uniform(0, log(4 * topk)))) // count + 1
    return Batch.extend(contexts, [new] * count)
