"""The batches that V4's prefill points sweep, and random ones for held-out checks."""

from __future__ import annotations

from math import exp, log
from random import Random

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

_RANDOM, _RANDOM_ON_A_CPU = 48, 16
"""Random batches besides: some are ragged, and rows have other numbers of blocks."""


def _limits(setting: Setting) -> tuple[int, int]:
    """Most (q tokens, kv tokens) of a swept batch; a CPU is given what it computes in a second."""
    return (512, 8192) if setting.device.arch == "cpu" else (16384, 2**19)


def grid(setting: Setting) -> list[Batch]:
    """Equal sequences over prefix length, new tokens and sequence count, and random batches; coarse
    batches first."""
    cpu = setting.device.arch == "cpu"
    prefixes = (0, 128, 512, 2048) if cpu else (0, 512, 2048, 8192, 32768, 131072, 2**18)
    news = (1, 16, 64, 256) if cpu else (1, 16, 32, 64, 128, 256, 1024, 2048, 4096, 8192, 16384)
    most_q, most_kv = _limits(setting)
    ranks = {
        Batch.extend([prefix] * count, [new] * count): i % 2 + j % 2 + k % 2
        for i, prefix in enumerate(prefixes)
        for j, new in enumerate(news)
        for k, count in enumerate((1, 4) if cpu else (1, 4, 16))
        if count * new <= most_q and count * (prefix + new) <= most_kv
    }
    random = Random(0)
    wanted = len(ranks) + (_RANDOM_ON_A_CPU if cpu else _RANDOM)
    while len(ranks) < wanted:
        # Some in each rank.
        ranks.setdefault(sample(setting, random), len(ranks) % 4)
    # Shuffled within a rank, so that any first part of the sweep is spread over all of it.
    return sorted(ranks, key=lambda batch: (ranks[batch], random.random()))


def sample(setting: Setting, random: Random) -> Batch:
    """A random extend of 1 to 16 sequences: half ragged, a quarter without prefix."""
    most_q, most_kv = _limits(setting)
    count = round(exp(random.uniform(0, log(16))))
    ragged, cold = random.random() < 0.5, random.random() < 0.25

    def sequence() -> tuple[int, int]:
        new = round(exp(random.uniform(0, log(most_q // count))))
        longest = most_kv // count - new
        return (0 if cold else round(exp(random.uniform(0, log(longest))))), new

    shapes = [sequence() for _ in range(count)] if ragged else [sequence()] * count
    return Batch.extend([prefix for prefix, _ in shapes], [new for _, new in shapes])
