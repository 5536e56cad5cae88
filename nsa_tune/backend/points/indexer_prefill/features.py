"""How much work a prefill's logits are: the features that an arm's time is a weighted sum of."""

from __future__ import annotations

from itertools import accumulate
from math import log2
from operator import add, mul
from typing import NamedTuple

from nsa_tune.backend.libraries.deep_gemm.limits import ragged_logits_bytes
from nsa_tune.backend.points.schedules import sequences, sms_of
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import FeatureFunctions, Setting

_HEADS_PER_BLOCK = 128
"""Heads that one SM computes together: two queries' 64, or four queries' 32 (DeepGEMM
csrc/apis/attention.hpp, block_q)."""


class Terms(NamedTuple):
    """What the three ways to the logits do."""

    rows: float
    keys: float
    scored_pairs: float
    """A query scores the keys that it sees."""
    makespan_keys: float
    """Keys that DeepGEMM's busiest SM goes through: blocks of rows are dealt out in turn."""
    chunks: float
    """Parts of the rows whose logits fit into the budget."""


OF_PAGED = ("rows", "scored_pairs")
OF_RAGGED = ("rows", "keys", "makespan_keys")
OF_CHUNKED = ("rows", "keys", "makespan_keys", "chunks")


def chunk_bytes(setting: Setting) -> int:
    """Most bytes of logits that `chunked` has at a time: vLLM's VLLM_SPARSE_INDEXER_MAX_LOGITS_MB.
    SGLang takes a share of what is free."""
    return 2**16 if setting.device.arch == "cpu" else 2**29


def rows_per_chunk(batch: Batch, most: int) -> int:
    """Rows of a part whose logits take `most` bytes; at least one."""
    return max(most * batch.q_tokens // ragged_logits_bytes(batch), 1)


def features(setting: Setting) -> FeatureFunctions:
    """The features of a prefill batch, and where it lies."""
    sms, block = sms_of(setting), max(_HEADS_PER_BLOCK // setting.profile.index_heads, 1)
    most = chunk_bytes(setting)

    def computed(batch: Batch) -> tuple[float, ...]:
        rows = batch.q_tokens
        return Terms(
            rows=float(rows),
            keys=float(batch.kv_tokens),
            scored_pairs=float(batch.pairs),
            makespan_keys=makespan_keys(batch, block, sms),
            chunks=float(-(-rows // rows_per_chunk(batch, most))),
        )

    return FeatureFunctions(Terms._fields, computed, _coordinates)


def makespan_keys(batch: Batch, block: int, sms: int) -> float:
    """Keys of the busiest of `sms`, to which blocks of `block` rows are dealt out in turn.

    A block with rows of several sequences scores the keys of all of them.
    """
    # Differences of straight lines over the SMs, twice around: values at 0, and slopes.
    bases, slopes = [0] * (2 * sms + 1), [0] * (2 * sms + 1)

    def deal(first: int, blocks: int, keys: int, more: int) -> None:
        """Blocks from number `first` on, which has `keys`; each next one has `more`."""
        at, (rounds, rest) = first % sms, divmod(blocks, sms)
        for start, end, each in ((at, at + rest, rounds + 1), (at + rest, at + sms, rounds)):
            base = each * (keys - more * at) + more * sms * each * (each - 1) // 2
            for edge, sign in ((start, 1), (end, -1)):
                bases[edge] += sign * base
                slopes[edge] += sign * more * each

    # The first row and key of a sequence, and the first key of the block that its first row is in.
    row = key = begun = 0
    for prefix, new, count in sequences(batch):
        for _ in range(count):
            end = row + new
            # Its blocks, but one that began before.
            first, last = -(-row // block), end // block
            if row % block and last >= first:
                deal(first - 1, 1, key + prefix + first * block - row - begun, 0)
            if last > first:
                deal(first, last - first, prefix + (first + 1) * block - row, block)
            if last >= first:
                begun = key
            row, key = end, key + prefix + new
    if row % block:
        deal(row // block, 1, key - begun, 0)
    keys = list(map(add, accumulate(bases), map(mul, accumulate(slopes), range(2 * sms))))
    return float(max(map(add, keys, keys[sms:])))


def _coordinates(batch: Batch) -> tuple[float, ...]:
    return (
        log2(batch.q_tokens),
        log2(batch.pairs / batch.q_tokens),
        log2(batch.kv_tokens) / 2,
    )
