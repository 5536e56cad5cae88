"""How much work a V4 prefill batch is, and which batches are swept and sampled."""

from __future__ import annotations

from math import exp, log, log2
from random import Random

from nsa_tune.backend.points.prefill.terms import pairs_in_waves, runs, wave_of
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import ModelProfile

__all__ = [
    "COORDINATES",
    "TERMS",
    "cost_terms",
    "extra_width",
    "gathered",
    "grid",
    "locate",
    "most_gathered",
    "sample",
]

TERMS = (
    "sequences",
    "q_tokens",
    "gathered_tokens",
    "index_columns",
    "attended_pairs",
    "attended_pairs_in_waves_to_the_longest",
)
COORDINATES = ("q_tokens", "gathered_tokens", "attended_per_query", "sequences")


def extra_width(profile: ModelProfile, ratio: int, max_kv: int) -> int:
    """Most compressed tokens that a query attends to: ratio 4 selects index_topk of them, ratio
    128 attends to all."""
    return profile.index_topk if ratio == 4 else max(max_kv // ratio, 1)


def gathered(batch: Batch, setting: Setting, ratio: int) -> tuple[int, int]:
    """Window tokens and compressed tokens that [window; extra] is made of."""
    if batch.lens is None:
        return most_gathered(batch, setting, ratio)
    before, window, compressed = setting.profile.window - 1, 0, 0
    for prefix, new, count in runs(batch):
        window += count * min(prefix + new, new + before)
        compressed += count * ((prefix + new) // ratio)
    return window, compressed


def most_gathered(batch: Batch, setting: Setting, ratio: int) -> tuple[int, int]:
    """`gathered` by a batch's sums: at least as many."""
    before = setting.profile.window - 1
    window = min(batch.kv_tokens, batch.q_tokens + batch.sequences * before)
    return window, batch.kv_tokens // ratio


def _seen(tokens: float, ratio: int, most: int) -> float:
    """Sum of min(i // ratio, most) over the first `tokens` positions i = 1, 2, ..."""
    below = min(tokens, ratio * most)
    whole = below // ratio
    return (
        ratio * whole * (whole - 1) / 2
        + whole * (below - ratio * whole + 1)
        + most * (tokens - below)
    )


def _attended(batch: Batch, setting: Setting, ratio: int) -> float:
    """Pairs of queries and keys; from sums alone as if all sequences were equal."""
    profile = setting.profile
    most = extra_width(profile, ratio, batch.max_kv)
    if batch.lens is None:
        count = batch.sequences
        equal = _pairs(batch.prefix_tokens / count, batch.q_tokens / count, ratio, most, profile)
        return count * equal
    return sum(
        count * _pairs(prefix, new, ratio, most, profile) for prefix, new, count in runs(batch)
    )


def _pairs(prefix: float, new: float, ratio: int, most: int, profile: ModelProfile) -> float:
    """Pairs of one sequence."""
    end = prefix + new
    in_window = _seen(end, 1, profile.window) - _seen(prefix, 1, profile.window)
    return in_window + _seen(end, ratio, most) - _seen(prefix, ratio, most)


def cost_terms(batch: Batch, setting: Setting, ratio: int) -> tuple[float, ...]:
    """Amounts of work in a layer of compression ratio `ratio`, in the order of `TERMS`."""
    attended = _attended(batch, setting, ratio)
    profile = setting.profile
    extra = extra_width(profile, ratio, batch.max_kv)
    longest = _smaller(batch.max_kv, profile.window) + _smaller(batch.max_kv // ratio, extra)
    return (
        batch.sequences,
        batch.q_tokens,
        sum(gathered(batch, setting, ratio)),
        batch.q_tokens * (profile.window + extra),
        attended,
        pairs_in_waves(attended, batch.q_tokens, longest, wave_of(setting)),
    )


def _smaller(one: float, other: float) -> float:
    """The smaller one, without a branch, which a plan's code would have to take."""
    return one + (other - one) * (other < one)


def locate(batch: Batch, setting: Setting, ratio: int) -> tuple[float, ...]:
    """Where the batch lies, in the order of `COORDINATES`: octaves of q tokens, half octaves of
    the others."""
    return (
        log2(batch.q_tokens),
        log2(sum(gathered(batch, setting, ratio))) / 2,
        log2(_attended(batch, setting, ratio) / batch.q_tokens) / 2,
        log2(batch.sequences) / 2,
    )


def _limits(setting: Setting) -> tuple[int, int]:
    """Most (q tokens, kv tokens) of a swept batch; a CPU is given what it computes in a second."""
    return (512, 8192) if setting.device.arch == "cpu" else (16384, 2**19)


def grid(setting: Setting) -> list[Batch]:
    """Equal sequences over prefix length, new tokens and sequence count; coarse batches first."""
    cpu = setting.device.arch == "cpu"
    prefixes = (0, 128, 512, 2048) if cpu else (0, 512, 2048, 8192, 32768, 131072, 2**18)
    news = (1, 16, 64, 256) if cpu else (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
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
