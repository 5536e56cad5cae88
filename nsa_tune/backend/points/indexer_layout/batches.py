"""The batches that the indexer_layout point sweeps, and random ones for held-out checks."""

from __future__ import annotations

from math import exp, log
from random import Random

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

_SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def _most_keys(setting: Setting) -> int:
    """Most kv tokens of a swept batch: the index keys of a big pool, or what a CPU can score."""
    topk = setting.profile.index_topk
    return 64 * topk if setting.device.arch == "cpu" else 2048 * topk


def grid(setting: Setting) -> list[Batch]:
    """Sequences by context by next_n, all equal and, for powers of two, of several lengths.

    With equal contexts and a power-of-two batch each sequence's keys fall on the same SMs for all
    of its split rows, which then share the L2; contexts of a real batch never line up like that.
    Half of the contexts are no multiples of a page or of a segment of 256 keys, as real ones.
    """
    topk, random = setting.profile.index_topk, Random(1)
    fits = []
    for i, count in enumerate(_SEQUENCES[::2] if setting.device.arch == "cpu" else _SEQUENCES):
        for j, scale in enumerate((1 / 2, 1, 2, 4, 8, 16, 32, 64)):
            context = round(scale * topk)
            if count * context <= _most_keys(setting):
                rank, uneven = i % 2 + j % 2, (i // 2 + j + 1) % 2
                equal = _uneven(random, context) if uneven else context
                fits += [(rank, (equal,) * count, next_n) for next_n in (2, 3, 4)]
                if count > 1 and count & (count - 1) == 0 and scale < 64:
                    mixed = _three_lengths(count, context)
                    if uneven:
                        mixed = _many_lengths(random, count, context)
                    fits += [(rank, mixed, next_n) for next_n in (2, 3, 4)]
    # Shuffled within a rank, so that any first part of the sweep is spread over all of it.
    order = Random(0)
    fits = sorted(fits, key=lambda fit: (fit[0], order.random()))
    return [Batch.verify(list(contexts), next_n) for _, contexts, next_n in fits]


def _uneven(random: Random, context: int) -> int:
    """An odd length of 3/4 to all of `context`."""
    return random.randint(context * 3 // 4, context - 1) | 1


def _many_lengths(random: Random, count: int, context: int) -> tuple[int, ...]:
    """`count` contexts of up to 8 uneven lengths about `context`."""
    kinds = min(count, 8)
    lengths = [_uneven(random, round(context * (k + 1) * 2 / (kinds + 1))) for k in range(kinds)]
    return tuple(lengths[i * kinds // count] for i in range(count))


def _three_lengths(count: int, context: int) -> tuple[int, ...]:
    """`count` contexts of 1/2, 1 and 3/2 of `context`, as many short ones as long ones."""
    outer = (count + 1) // 3
    middle = count - 2 * outer
    return (
        *(round(context * 1.5),) * outer,
        *(context,) * middle,
        *(context // 2,) * outer,
    )


def sample(setting: Setting, random: Random) -> Batch:
    """A random verify of 1 to 128 sequences; half of them ragged."""
    topk, next_n = setting.profile.index_topk, random.choice((2, 3, 4))
    count = round(exp(random.uniform(0, log(128))))
    longest = min(64 * topk, _most_keys(setting) // count)

    def context() -> int:
        return round(exp(random.uniform(log(topk / 2), log(longest))))

    if random.random() < 0.5:
        return Batch.verify([context() for _ in range(count)], next_n)
    return Batch.verify([context()] * count, next_n)
