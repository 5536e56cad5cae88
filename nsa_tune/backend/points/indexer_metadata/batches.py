"""The batches that the indexer_metadata point sweeps, and random ones for held-out checks."""

from __future__ import annotations

from math import exp, log
from random import Random

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Setting

_DECODED = (1, 4, 16, 64, 128, 256, 512, 1024)
_EXTENDED = (1000, 2048, 4096, 8192, 11648, 16384, 32768, 58112, 65536)
"""Few numbers of rows, since DeepGEMM compiles for each; each is measured at several contexts."""


def grid(setting: Setting) -> list[Batch]:
    """Decode batches of 1 to 1024 rows and extends of up to 65536; coarse batches first."""
    random = Random(0)
    few = setting.device.arch == "cpu"
    topk = setting.profile.index_topk
    shapes = []
    for i, rows in enumerate(_DECODED[::2] if few else _DECODED):
        for j, scale in enumerate((1 / 2, 2, 8, 64)):
            longest = round(scale * topk)
            shapes.append((i % 2 + j % 2, Batch.decode(_contexts(random, rows, longest))))
    for i, rows in enumerate(_EXTENDED[:2] if few else _EXTENDED):
        for j, (prefix, count) in enumerate(((0, 1), (0, 7), (3 * topk + 5, 1), (64 * topk, 3))):
            news = [rows // count] * (count - 1) + [rows - rows // count * (count - 1)]
            shapes.append((i % 2 + j % 2, Batch.extend([prefix] * count, news)))
    # Shuffled within a rank, so that any first part of the sweep is spread over all of it.
    order = Random(0)
    return [batch for _, _, batch in sorted((r, order.random(), b) for r, b in shapes)]


def _contexts(random: Random, rows: int, longest: int) -> list[int]:
    """`rows` contexts of up to 8 lengths from half of `longest`."""
    lengths = [random.randint(longest // 2 + 1, longest) for _ in range(min(rows, 8))]
    return [lengths[i * len(lengths) // rows] for i in range(rows)]


def sample(setting: Setting, random: Random) -> Batch:
    """A random decode of up to 1024 rows, or an extend whose rows fill a bucket of the grid."""
    topk = setting.profile.index_topk
    if random.random() < 0.5:
        rows = random.choice(_DECODED)
        longest = round(exp(random.uniform(log(topk / 2), log(64 * topk))))
        return Batch.decode(_contexts(random, rows, longest))
    # Rows of a bucket that is compiled already.
    rows = random.choice(_EXTENDED[:3]) - random.randint(0, 7)
    return Batch.extend([random.randint(0, 16 * topk)], [rows])
