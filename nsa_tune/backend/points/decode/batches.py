"""The batches that the decode point sweeps, and random ones for held-out checks."""

from __future__ import annotations

from math import exp, log
from random import Random

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BETWEEN = (0, 1 / 4, 1 / 2, 3 / 4)
"""On the way to the next of them, in turns: kernels divide other numbers of rows less evenly."""
_CONTEXTS = (1 / 2, 1, 2, 8, 32, 64)
"""In the profile's unit: index_topk."""
_NEXT_NS = (1, 2, 4)
_RANDOM, _RANDOM_ON_A_CPU = 32, 8
"""Random batches besides: some have short contexts, and many lengths."""


def _most_kv(setting: Setting) -> int:
    """Most kv tokens of a swept batch: a pool of a GB, or what a CPU fills in a second."""
    return (64 if setting.device.arch == "cpu" else 512) * setting.profile.unit


def grid(setting: Setting) -> list[Batch]:
    """Sequences by context by next_n: a third of equal round contexts, a third of equal uneven
    ones, and a third of three lengths; and random batches. Coarse batches first."""
    random, fits = Random(0), []
    topk, cpu = setting.profile.unit, setting.device.arch == "cpu"
    for i, count in enumerate(_SEQUENCES[::2] if cpu else _SEQUENCES):
        for j, scale in enumerate(_CONTEXTS):
            for k, next_n in enumerate(_NEXT_NS):
                sequences = count + int(count * _BETWEEN[(i + j + k) % len(_BETWEEN)])
                if sequences * round(scale * topk) <= _most_kv(setting):
                    contexts = _contexts(random, sequences, round(scale * topk), (i + j + k) % 3)
                    fits.append((i % 2 + j % 2, random.random(), _batch(contexts, next_n)))
    fits += [
        (rank % 3, random.random(), sample(setting, random))
        for rank in range(_RANDOM_ON_A_CPU if cpu else _RANDOM)
    ]
    return list(dict.fromkeys(batch for _, _, batch in sorted(fits, key=lambda fit: fit[:2])))


def _contexts(random: Random, count: int, context: int, kind: int) -> list[int]:
    """`count` contexts about `context`: equal and round (0), equal and uneven (1), of three uneven
    lengths (2)."""
    if kind == 0:
        return [context] * count
    lengths = [round(context * part) for part in ((1,) if kind == 1 else (1 / 2, 1, 3 / 2))]
    uneven = [max(length - random.randint(1, length // 8 + 1) | 1, 5) for length in lengths]
    return [uneven[i * len(uneven) // count] for i in range(count)]


def _batch(contexts: list[int], next_n: int) -> Batch:
    return Batch.decode(contexts) if next_n == 1 else Batch.verify(contexts, next_n)


def sample(setting: Setting, random: Random) -> Batch:
    """A random decode or verify of 1 to 256 sequences; half of them ragged."""
    topk, next_n = setting.profile.unit, random.choice(_NEXT_NS)
    count = round(exp(random.uniform(0, log(256))))
    longest = max(min(64 * topk, _most_kv(setting) // count), topk // 4)

    def context() -> int:
        return max(round(exp(random.uniform(log(topk / 8), log(longest)))), next_n)

    if random.random() < 0.5:
        return _batch([context() for _ in range(count)], next_n)
    return _batch([context()] * count, next_n)
