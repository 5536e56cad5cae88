"""How much work a prefill's logits are: the features that an arm's time is a weighted sum of."""

from __future__ import annotations

from math import log2

from nsa_tune.backend.libraries.deep_gemm import limits as deep_gemm
from nsa_tune.backend.types.formula import Formulas, Value
from nsa_tune.backend.types.point import Setting

__all__ = ["OF_CHUNKED", "OF_PAGED", "OF_RAGGED", "chunk_bytes", "formulas"]

_OF_ALL = ("rows", "scored_pairs", "waves", "pairs_in_waves_to_the_longest")
OF_PAGED = _OF_ALL
OF_RAGGED = (*_OF_ALL, "keys")
OF_CHUNKED = (*OF_RAGGED, "chunks")
_HEADS_AT_ONCE = 128
"""Heads that one SM computes together: two queries' 64, or four queries' 32 (DeepGEMM
csrc/apis/attention.hpp, block_q)."""


def chunk_bytes(setting: Setting) -> int:
    """Most bytes of logits that `chunked` has at a time: vLLM's VLLM_SPARSE_INDEXER_MAX_LOGITS_MB.
    SGLang takes a share of what is free."""
    return 2**16 if setting.device.arch == "cpu" else 2**29


def formulas(setting: Setting) -> Formulas:
    """The features of a prefill batch: a query scores the keys that it sees, its `pairs`."""
    wave = max(setting.device.sms, 1) * (_HEADS_AT_ONCE // setting.profile.index_heads)
    needed = deep_gemm.ragged_logits_bytes()
    values = {
        "scored_pairs": Value("1.0 * pairs"),
        "waves": Value(f"(q_tokens + {wave - 1}) // {wave}"),
        "pairs_in_waves_to_the_longest": Value(
            f"(scored_pairs / q_tokens * (waves - 1) + max_kv) * {wave}"
        ),
        "chunks": Value(f"-(-{needed} // {chunk_bytes(setting)})"),
    }
    coordinates = {
        "rows": "log2(q_tokens)",
        "keys_a_row": "log2(pairs / q_tokens)",
        "kv_tokens": "log2(kv_tokens) / 2",
    }
    return Formulas(
        values, OF_CHUNKED, coordinates, functions={"log2": log2}, regimes=frozenset({0})
    )
