"""Prefill CUDA graphs without breaks, in which the indexer selects keys and attention is sparse.

A pass of some hundred new tokens behind a long prefix keeps the GPU busy for less time than Python
takes to launch its attention, twice a layer. In a graph nothing waits for Python. With more than
`MOST_TOKENS` the GPU has enough to do anyway.
"""

from __future__ import annotations

from typing import Any

from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.sglang import attempt
from nsa_tune.engines.sglang.eligible import PADDED_HEADS, reads_back
from nsa_tune.engines.sglang.facts import PAGE
from nsa_tune.engines.sglang.kernels.topk import check
from nsa_tune.engines.sglang.pass_mode.seconds import spent
from nsa_tune.engines.sglang.pass_mode.whole_pass.attention import Swap, swapped
from nsa_tune.engines.sglang.pass_mode.whole_pass.sparse_attention import (
    IndexerMetadata,
    SparseAttention,
)
from nsa_tune.engines.sglang.pass_mode.whole_pass.sparse_inputs import SEQUENCES, SparseInputs
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import (
    LEAST_TOKENS,
    Kind,
    capture,
    lens_of,
    shape_key,
    spaced,
)

MOST_TOKENS = 2048
"""Tokens of the largest graph that is captured."""
_MOST_KEYS = 2**17
"""Keys of a batch at most. What the indexer computes takes 4 bytes a key and row."""
_FP32_BYTES, _BF16_BYTES = 4, 2


def most_keys(runner: Any) -> int:
    """Keys of a batch that sparse graphs of `runner`, SGLang's ModelRunner, have room for."""
    return int(min(runner.max_total_num_tokens, _MOST_KEYS)) // PAGE * PAGE


class SparseGraphs:
    """The sparse graphs of one prefill graph runner."""

    kind = Kind.SPARSE

    def __init__(self, runner: Any, index_topk: int) -> None:
        """`runner` is SGLang's PrefillCudaGraphRunner."""
        from nsa_tune.backend.kernels.sampled_topk import compile_all

        self._runner = runner
        self._index_topk = index_topk
        self._inputs = SparseInputs(most_keys(runner.model_runner), runner.device)
        # SGLang's own graphs are captured by now, and others before these: time to compile.
        attempt("compiling a kernel", compile_all, index_topk)
        self._captured: dict[int, Any] = {}
        """By size, what the graph reads besides: SGLang's batch that it was captured with."""

    @property
    def sizes(self) -> list[int]:
        """The captured sizes, in tokens."""
        return sorted(self._captured)

    def wanted(self) -> list[int]:
        """The sizes to capture, by those that SGLang has graphs of."""
        sizes = spaced(sorted(self._runner.capture_num_tokens))
        return [size for size in sizes if LEAST_TOKENS <= size <= MOST_TOKENS]

    def scratch_bytes(self) -> int:
        """Memory that capturing takes beside what SGLang's own graph of a size has just taken.

        Scores of all keys for each row, filled up queries, and the keys that are read back.
        """
        runner, keys = self._runner.model_runner, self._inputs.most_keys
        heads = max(int(runner.attn_backend.num_q_heads), PADDED_HEADS)
        width = int(runner.model_config.kv_lora_rank + runner.attn_backend.qk_rope_head_dim)
        row = _FP32_BYTES * keys + 2 * _BF16_BYTES * heads * width
        packed = reads_back(runner.attn_backend)
        return MOST_TOKENS * row + (_BF16_BYTES * keys * width if packed else 0)

    def capture(self, size: int) -> None:
        """Capture the graph of `size` tokens. Call it within the runner's own capture session.

        Raises:
            RuntimeError: when nsa-tune's kernel selects wrongly here.
        """
        import torch

        runner, inputs = self._runner, self._inputs
        if not self._captured:
            with spent("checking the top-k kernel"):
                check(self._index_topk, runner.device)
        forward_batch, backend = runner.capture_prepare(size)
        backend.init_forward_metadata(forward_batch)
        # The indexer looks at this to see that not all keys are selected.
        forward_batch.seq_lens_cpu = torch.tensor([self._index_topk + 1])
        inputs.write([0], [size])
        packed = reads_back(backend)

        def forward() -> Any:
            rows = inputs.rows(size, self._index_topk)
            keys = inputs.keys() if packed else None
            metadata = IndexerMetadata(inputs, rows, packed=packed)
            swap = Swap(backend, SparseAttention(backend, rows, keys), metadata)
            with swapped(swap):
                return runner._run_forward(forward_batch, size)

        capture(runner, self.key(size), forward)
        self._captured[size] = forward_batch

    def fits(self, size: int, batch: Batch) -> bool:
        """Whether there is a graph of `size` tokens that runs a batch with these sums."""
        return (
            size in self._captured
            and batch.batch_size <= SEQUENCES
            and batch.kv_tokens <= self._inputs.most_keys
        )

    def prepare(self, size: int, forward_batch: Any) -> None:
        """Write a batch to where the graph of `size` tokens reads it."""
        prefix_lens, extend_lens = lens_of(forward_batch)
        self._inputs.write(prefix_lens, extend_lens)
        longest = max(prefix + new for prefix, new in zip(prefix_lens, extend_lens, strict=True))
        table = self._runner.model_runner.req_to_token_pool.req_to_token
        self._inputs.write_pages(table, forward_batch.req_pool_indices[: len(extend_lens)], longest)

    def key(self, size: int) -> Any:
        """Under which SGLang keeps the graph of `size` tokens."""
        return shape_key(size, self.kind)
