"""Features of a dense decode or verify batch: rows, and how kernels spread their tiles."""

from __future__ import annotations

from math import log2

from nsa_tune.backend.points.dense_prefill.features import (
    ABSORBED,
    FA3,
    FLASH_MLA,
    FLASHINFER,
    absorbed_terms,
)
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import FeatureFunctions, Setting

OF_FA3 = ("rows", "read_keys", *FA3)
OF_FLASH_MLA = ("rows", "read_keys", *FLASH_MLA)
OF_FLASHINFER = ("rows", "read_keys", *FLASHINFER)
OF_TRITON = ("rows", "longest_keys", "pairs")
OF_TORCH = ("rows", "pairs")


def features(setting: Setting) -> FeatureFunctions:
    """The features of a batch, and where it lies: octaves of its rows and of the keys a sequence,
    half octaves of the longest one's."""
    absorbed = absorbed_terms(setting)

    def computed(batch: Batch) -> tuple[float, ...]:
        return (float(batch.q_tokens), float(batch.pairs), *absorbed(batch))

    def coordinates(batch: Batch) -> tuple[float, ...]:
        return (
            log2(batch.q_tokens),
            log2(batch.kv_tokens / batch.batch_size),
            log2(batch.max_kv) / 2,
            log2(batch.next_n),
        )

    return FeatureFunctions(("rows", "pairs", *ABSORBED), computed, coordinates)
