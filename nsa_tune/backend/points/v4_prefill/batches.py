"""The batches that V4's prefill points sweep, and random ones for held-out checks."""

from __future__ import annotations

from math import exp, log
from random import Random

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

__all__ = ["grid", "sample"]


def _limits(setting: Setting) -> tuple[int, int]:
    """Most (q tokens, kv tokens) of a swept batch; a CPU is given what it computes in a second."""
    return (512, 8192) if setting.device.arch == "cpu" else (16384, 2**19)


def grid(setting: Setting) -> list[Batch]:
    """Equal sequences over prefix length, new tokens and sequence count; coarse batches first."""
    cpu = setting.device.arch == "cpu"
    prefixes = (0, 128, 512, 2048) if cpu else (0, 512, 2048, 8192, 32768, 131072, 2**18)
    news = (1, 16, 64, 256) if cpu else (1, 16, 32, 64, 128, 256, 1024, 2048, 4096, 8192, 16384)
    most_q, most_kv = _limits(setting)
    fits = [
        (i % 2 + j % 2 + k % 2, (count, prefix, new))
        for i, prefix in enumerate(prefixes)
        for j, new in enumerate(news)
        for k, count in enumerate((1, 4) if cpu else (1, 4, 16))
        if count * new <= most_q and count * (prefix + new) <= most_kv
    ]
    # Shuffled within a rank, so that any first part of the sweep is spread over all of it.
    order = Random(0)
    fits = sorted(fits, key=lambda fit: (fit[0], order.random()))
    return [Batch.extend([prefix] * count, [new] * count) for _, (count, prefix, new) in fits]


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
