"""Limits that follow from what an answer means, how the engine runs it, or how an arm is built."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from nsa_tune.backend.libraries.limits import at_most, at_most_rows, rows_in_quarter_of_memory
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Guard, Limit, Setting

_FEW = 64
_SAMPLED_TOPK = 2048
"""Half of the scores that it can list."""


def _dense_exact(setting: Setting) -> Limit:
    topk = setting.profile.index_topk
    why = f"dense attention equals sparse only up to {topk} kv tokens"
    return at_most(topk, attrgetter("max_kv"), lambda tokens: f"{why}, {tokens} given")


def _chunk_capacity(setting: Setting) -> Limit:
    most = setting.max_chunk_kv
    why = f"kv tokens pass the chunk capacity of {most}"
    return at_most(most, attrgetter("kv_tokens"), lambda tokens: f"{tokens} {why}")


def _nothing_to_select(setting: Setting) -> Limit:
    topk = setting.profile.index_topk

    def limit(batch: Batch) -> str | None:
        # A captured graph computes it at every context.
        if batch.max_kv > topk or batch.captured:
            return None
        return f"{batch.max_kv} kv tokens are all selected, {topk} at most: nothing is scored"

    return limit


def _triton_shape(setting: Setting) -> str | None:
    widths = (setting.profile.rank, setting.profile.rope)
    if all(width >= 16 and not width & (width - 1) for width in widths):
        return None
    return f"the Triton kernel takes widths that are powers of two from 16, not {widths}"


def _equal_queries(batch: Batch) -> str | None:
    new = batch.new_lens
    equal = batch.q_tokens % batch.batch_size == 0 if new is None else min(new) == max(new)
    return None if equal else "the kernel takes equally many new tokens of each sequence only"


def in_any_setting(limit: Limit) -> Callable[[Setting], Limit]:
    """`limit`, which depends on the batch alone."""
    return lambda setting: limit


def whenever(forbids: Callable[[Batch], bool], why: str) -> Callable[[Setting], Limit]:
    """Forbids the batches of which `forbids` is true, in any setting."""
    return in_any_setting(lambda batch: why if forbids(batch) else None)


DENSE_EXACT = Guard(
    "dense_exact", "semantic", "with at most index_topk tokens, the indexer selects all",
    _dense_exact,
)  # fmt: skip
CHUNK_CAPACITY = Guard(
    "chunk_capacity", "formula", "SGLang 0.5.23 environ.py:724 SGLANG_MAX_KV_CHUNK_CAPACITY",
    _chunk_capacity,
)  # fmt: skip
NOT_CAPTURED = Guard(
    "not_captured", "semantic", "SGLang 0.5.23 dsa_backend.py:4050",
    whenever(
        attrgetter("captured"), "dense MHA plans on the host, which a CUDA graph cannot hold"
    ),
)  # fmt: skip
NOTHING_TO_SELECT = Guard(
    "nothing_to_select", "semantic", "with at most index_topk tokens, the indexer selects all",
    _nothing_to_select,
)  # fmt: skip
SAMPLED_TOPK = Guard(
    "sampled_topk", "formula", "backend/kernels/sampled_topk.py: twice as many are listed",
    lambda setting: (
        f"sampled_topk selects up to {_SAMPLED_TOPK} scores, not {setting.profile.index_topk}"
        if setting.profile.index_topk > _SAMPLED_TOPK
        else None
    ),
)  # fmt: skip
SOME_PREFIX = Guard(
    "some_prefix", "semantic", "two parts are merged: cached tokens and new ones",
    whenever(
        lambda batch: not batch.prefix_tokens,
        "without a prefix there is one part: nothing is merged",
    ),
)  # fmt: skip
SOME_ROWS = Guard(
    "some_rows", "semantic", "CUDA refuses a grid of 0 blocks",
    # No constructor of Batch makes one without a query; an idle rank of data parallelism has one.
    whenever(lambda batch: batch.q_tokens <= 0, "a kernel cannot be launched without a query"),
)  # fmt: skip
SEVERAL_QUERIES = Guard(
    "several_queries", "semantic", "a row of one query: flashmla_kv itself",
    whenever(
        lambda batch: batch.next_n <= 1, "with next_n 1 flashmla_kv_grouped is flashmla_kv itself"
    ),
)  # fmt: skip
ONE_QUERY = Guard(
    "one_query", "semantic", "SGLang 0.5.23 triton_backend.py:1669 forward_extend",
    whenever(lambda batch: batch.next_n != 1, "SGLang verifies by its prefill kernel in Triton"),
)  # fmt: skip
EQUAL_QUERIES = Guard(
    "equal_queries", "semantic", "FlashMLA csrc/api/dense_decode.h: q [b, s_q, h, 576]",
    in_any_setting(_equal_queries),
)  # fmt: skip
FEW_ROWS = Guard(
    "few_rows", "semantic", "kernels/split_sparse_mla.py: slower than any other arm beyond",
    in_any_setting(
        at_most_rows(_FEW, f"pass the {_FEW} that splitting each row's selection is made for")
    ),
)  # fmt: skip
TRITON_SHAPE = Guard(
    "triton_shape", "formula", "backend/kernels/sparse_mla.py: one block spans a latent",
    _triton_shape,
)  # fmt: skip
TRITON_BYTES = Guard(
    "triton_bytes", "formula", "backend/kernels/sparse_mla.py: q and the output",
    # In bf16. Rows are split only where there are few of them.
    lambda setting: rows_in_quarter_of_memory(
        2 * setting.heads * (setting.profile.latent + setting.profile.rank),
        "operands of the Triton kernel", setting,
    ),
)  # fmt: skip
SELECTION_BYTES = Guard(
    "selection_bytes", "formula", "points/decode: each row's selection is gathered",
    lambda setting: rows_in_quarter_of_memory(
        setting.profile.index_topk * 2 * setting.profile.latent, "gathered latents", setting
    ),
)  # fmt: skip
