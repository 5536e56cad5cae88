"""The ways in which a prefill pass can run."""

from __future__ import annotations

from enum import StrEnum


class PassMode(StrEnum):
    """A way to run a prefill pass."""

    ENGINE = "engine"
    """As SGLang does it: a breakable CUDA graph, or eagerly where it has none."""
    TABLE_KERNEL = "table_kernel"
    """The same with the prefill kernel that the table chooses, where that is another one."""
    EAGER = "eager"
    """Without a graph, where SGLang takes MHA up to index_topk keys."""
    DENSE_GRAPH = "dense_graph"
    """One CUDA graph without breaks, in which attention is MHA over the new tokens."""
    DENSE_MLA_GRAPH = "dense_mla_graph"
    """One CUDA graph without breaks, in which attention is absorbed MLA over all keys."""
    PREFIX_GRAPH = "prefix_graph"
    """One CUDA graph without breaks, in which attention is MHA over a prefix too: dense MLA."""
    SPARSE_GRAPH = "sparse_graph"
    """One CUDA graph without breaks, in which the indexer selects keys and attention is sparse."""
    DECODE_GRAPH = "decode_graph"
    """A decode (or verify) CUDA graph, of which rows are the new tokens."""


ALWAYS_SELECTS = frozenset({PassMode.DECODE_GRAPH, PassMode.SPARSE_GRAPH})
"""Ways that run alike whether keys are selected or not."""
