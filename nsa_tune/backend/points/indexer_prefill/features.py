"""How much work a prefill's logits are: the features that an arm's time is a weighted sum of."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

from nsa_tune.backend.libraries.deep_gemm import limits as deep_gemm
from nsa_tune.backend.points.indexer_prefill.busiest import keys_of_the_busiest
from nsa_tune.backend.points.sequences import FUNCTIONS, by_sequences
from nsa_tune.backend.types.formula import Formulas, Value, larger
from nsa_tune.backend.types.point import Setting

OF_PAGED = ("rows", "scored_pairs")
OF_RAGGED = ("rows", "keys", "keys_of_the_busiest")
OF_CHUNKED = ("rows", "keys", "chunks", "chunked_keys_of_the_busiest")
_FEATURES = tuple(dict.fromkeys((*OF_PAGED, *OF_RAGGED, *OF_CHUNKED)))
_HEADS_A_BLOCK = 128
"""Heads that one SM computes together: two queries' 64, or four queries' 32 (DeepGEMM
csrc/apis/attention.hpp, block_q)."""
_MOST_CHUNKS = 256
"""A batch of more counts as one of so many, since a look at each takes time."""


def chunk_bytes(setting: Setting) -> int:
    """Most bytes of logits that `chunked` has at a time: vLLM's VLLM_SPARSE_INDEXER_MAX_LOGITS_MB.
    SGLang takes a share of what is free."""
    return 2**16 if setting.device.arch == "cpu" else 2**29


def formulas(setting: Setting) -> Formulas:
    """The features of a prefill batch: a query scores the keys that it sees, its `pairs`."""
    sms, block = max(setting.device.sms, 1), _HEADS_A_BLOCK // setting.profile.index_heads
    needed, most = deep_gemm.ragged_logits_bytes(), chunk_bytes(setting)
    busiest = f"busiest_of({{{{}}}}, {block}, {sms}, {{}})"
    values = {
        "scored_pairs": Value("1.0 * pairs"),
        "keys_of_the_busiest": by_sequences(busiest.format("q_tokens")),
        "rows_that_fit": Value(larger(f"{most} * q_tokens // ({needed})", "1")),
        "chunks": Value("-(-q_tokens // rows_that_fit)"),
        "rows_a_chunk": Value(larger("rows_that_fit", f"q_tokens // {_MOST_CHUNKS} + 1")),
        "chunked_keys_of_the_busiest": by_sequences(busiest.format("rows_a_chunk")),
    }
    coordinates = {
        "rows": "log2(q_tokens)",
        "keys_a_row": "log2(pairs / q_tokens)",
        "kv_tokens": "log2(kv_tokens) / 2",
    }
    functions: dict[str, Callable[..., Any]] = {
        **FUNCTIONS,
        "busiest_of": keys_of_the_busiest,
        "log2": log2,
    }
    return Formulas(values, _FEATURES, coordinates, functions=functions, regimes=frozenset({0}))
