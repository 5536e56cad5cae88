"""The batches that the indexer_prefill point sweeps, and random ones for held-out checks."""

from __future__ import annotations

from math import exp, log
from random import Random

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

_NEWS = (1 / 256, 1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
"""New tokens of all sequences, and the prefix of each, in index_topk."""
_PREFIXES = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 60.0)
_COUNTS = (1, 4, 16)


def _limits(setting: Setting) -> tuple[int, int]:
    """Most kv tokens, and most rows times kv tokens, of a swept batch: 4 GB of logits, or what a
    CPU computes in a second."""
    topk = setting.profile.index_topk
    return (16 * topk, 2**18) if setting.device.arch == "cpu" else (64 * topk, 2**30)


def _fits(batch: Batch, setting: Setting) -> bool:
    most_kv, most_scores = _limits(setting)
    return (
        batch.max_kv > setting.profile.index_topk
        and batch.kv_tokens <= most_kv
        and batch.q_tokens * batch.kv_tokens <= most_scores
    )


def grid(setting: Setting) -> list[Batch]:
    """New tokens by prefix by 1, 4 and 16 sequences; every third of several lengths; coarse batches
    first."""
    random, topk = Random(0), setting.profile.index_topk
    found: dict[str, tuple[int, float, Batch]] = {}
    for i, new in enumerate(_NEWS):
        for j, prefix in enumerate(_PREFIXES):
            for k, count in enumerate(_COUNTS):
                each = max(round(new * topk) // count, 1)
                lengths = [round(prefix * topk)] * count
                if (i + j + k) % 3 == 2:
                    lengths = [random.randint(length // 2, length) for length in lengths]
                batch = Batch.extend(lengths, [each] * count)
                if _fits(batch, setting):
                    rank = i % 2 + j % 2 + (k + 1) % 2
                    found.setdefault(str(batch), (rank, random.random(), batch))
    return [batch for _, _, batch in sorted(found.values(), key=lambda fit: fit[:2])]


def sample(setting: Setting, random: Random) -> Batch:
    """A random extend of up to 16 sequences; half of them ragged."""
    topk = setting.profile.index_topk
    while True:
        count, ragged = round(exp(random.uniform(0, log(16)))), random.random() < 0.5

        def sequence() -> tuple[int, int]:
            new = round(exp(random.uniform(0, log(4 * topk))))
            return round(exp(random.uniform(log(topk / 4), log(62 * topk)))), new

        lens = [sequence() for _ in range(count)] if ragged else [sequence()] * count
        batch = Batch.extend([prefix for prefix, _ in lens], [new for _, new in lens])
        if _fits(batch, setting) and batch.q_tokens <= 4 * topk:
            return batch
