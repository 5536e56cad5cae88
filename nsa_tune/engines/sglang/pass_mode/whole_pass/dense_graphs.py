"""Prefill CUDA graphs without breaks, in which attention is dense.

SGLang's prefill graphs break twice in each layer, for the indexer and for attention, and it turns
MHA off inside them. Where no sequence has more keys than the indexer selects, both can be captured:
the indexer only stores its keys, and dense attention reads the lengths from tensors that lie in
the same place in each replay. There are two kinds: MHA over the new tokens, for batches without a
prefix; and absorbed MLA over the pool's pages, which takes a prefix, if the pool is bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.sglang.facts import PAGE, mha_bytes
from nsa_tune.engines.sglang.pass_mode.whole_pass.absorbed import AbsorbedAttention, Inputs
from nsa_tune.engines.sglang.pass_mode.whole_pass.attention import Swap, swapped
from nsa_tune.engines.sglang.pass_mode.whole_pass.expanded import expanding
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import (
    LEAST_TOKENS,
    Kind,
    capture,
    lens_of,
    shape_key,
    spaced,
)


def most_sequences(size: int, most: int) -> int:
    """Sequences in a graph of `size` tokens, those that fill it up included.

    Attention visits them all, empty or not. `most` is the longest one.
    """
    return min(max(size // 64, 4), 64) + _fillers(size, most)


def room(size: int, index_topk: int) -> int:
    """The most sequences of a batch that a graph of `size` tokens runs, whatever its padding."""
    most = min(size, index_topk)
    return most_sequences(size, most) - _fillers(size, most)


def _fillers(size: int, most: int) -> int:
    """The most sequences of `most` rows that padding takes."""
    return -(-size // most)


def padding(rows: int, most: int) -> list[int]:
    """Lengths of the sequences that stand for so many rows of padding.

    Rows that attention leaves out would hold whatever lay in memory, and a NaN there would reach
    the experts' router.
    """
    full, rest = divmod(rows, most)
    return [most] * full + ([rest] if rest else [])


class DenseGraphs:
    """The dense graphs of one kind of one prefill graph runner."""

    def __init__(self, runner: Any, index_topk: int, kind: Kind) -> None:
        """`runner` is SGLang's PrefillCudaGraphRunner."""
        self._runner = runner
        self._index_topk = index_topk
        self.kind = kind
        self._inputs: dict[int, Inputs] = {}
        """By captured size."""
        self._read: list[Any] = []
        """What graphs may read besides: the batches that they were captured with."""

    @property
    def sizes(self) -> list[int]:
        """The captured sizes, in tokens."""
        return sorted(self._inputs)

    def capture(self, size: int) -> None:
        """Capture the graph of `size` tokens. Call it within the runner's own capture session."""
        import torch

        runner = self._runner
        most = min(size, self._index_topk)
        forward_batch, backend = runner.capture_prepare(size)
        backend.init_forward_metadata(forward_batch)
        # The indexer looks at this to see that all keys are selected.
        forward_batch.seq_lens_cpu = torch.tensor([most])
        inputs = self._new_inputs(size)
        self._write(inputs, size, [0] * len(padding(size, most)), padding(size, most))
        backend.forward_metadata = replace(
            backend.forward_metadata, cu_seqlens_q=inputs.starts, cu_seqlens_k=inputs.starts,
            max_seq_len_q=most, max_seq_len_k=most,
        )  # fmt: skip

        absorbed = Swap(backend, AbsorbedAttention(backend, inputs, most))
        with expanding(backend) if self.kind is Kind.MHA else swapped(absorbed):
            capture(runner, self.key(size), partial(runner._run_forward, forward_batch, size))
        self._inputs[size] = inputs
        self._read.append(forward_batch)

    def wanted(self) -> list[int]:
        """The sizes to capture, by those that SGLang has graphs of."""
        sizes = spaced(sorted(self._runner.capture_num_tokens))
        return [size for size in sizes if size >= LEAST_TOKENS] or sizes[-1:]

    def scratch_bytes(self) -> int:
        """Memory that capturing takes beside what SGLang's own graph of a size has just taken.

        Attention has a copy of all queries, keys and values besides.
        """
        return 2 * self.wanted()[-1] * mha_bytes(self._runner.model_runner)

    def fits(self, size: int, batch: Batch) -> bool:
        """Whether there is a graph of `size` tokens that runs a batch with these sums."""
        return (
            size in self._inputs
            and (self.kind is Kind.MLA or batch.kv_tokens == batch.q_tokens)
            and batch.max_kv <= self._index_topk
            and batch.batch_size <= room(size, self._index_topk)
        )

    def prepare(self, size: int, forward_batch: Any) -> None:
        """Write a batch's lengths and pages to where the graph of `size` tokens reads them."""
        inputs = self._inputs[size]
        prefix_lens, extend_lens = lens_of(forward_batch)
        sequences = len(extend_lens)
        rest = padding(size - sum(extend_lens), min(size, self._index_topk))
        self._write(inputs, size, prefix_lens + [0] * len(rest), extend_lens + rest)
        if self.kind is Kind.MLA:
            table = self._runner.model_runner.req_to_token_pool.req_to_token
            rows = forward_batch.req_pool_indices[:sequences]
            pages = table[rows, : self._index_topk : PAGE] // PAGE
            # Of a model with a shorter context there are fewer.
            inputs.pages[:sequences, : pages.shape[1]] = pages
            inputs.pages[sequences:] = 0

    def key(self, size: int) -> Any:
        """Under which SGLang keeps the graph of `size` tokens."""
        return shape_key(size, self.kind)

    def _new_inputs(self, size: int) -> Inputs:
        import torch

        sequences = most_sequences(size, min(size, self._index_topk))
        device = self._runner.device
        lengths = torch.zeros(2 * sequences + 1, dtype=torch.int32, device=device)
        columns = self._index_topk // PAGE if self.kind is Kind.MLA else 0
        pages = torch.zeros((sequences, columns), dtype=torch.int32, device=device)
        return Inputs(lengths[: sequences + 1], lengths[sequences + 1 :], pages)

    @staticmethod
    def _write(
        inputs: Inputs, size: int, prefix_lens: Sequence[int], extend_lens: Sequence[int]
    ) -> None:
        import torch

        sequences = len(inputs.kv_lens)
        starts, kv_lens, total = [0], [], 0
        for prefix, new in zip(prefix_lens, extend_lens, strict=True):
            total += new
            starts.append(total)
            kv_lens.append(prefix + new)
        assert total == size, "padding fills a graph up"
        # Sequences that are not there have no rows and no keys.
        starts += [total] * (sequences + 1 - len(starts))
        kv_lens += [0] * (sequences - len(kv_lens))
        host = torch.tensor(starts + kv_lens, dtype=torch.int32, pin_memory=inputs.starts.is_cuda)
        inputs.starts.copy_(host[: sequences + 1], non_blocking=True)
        inputs.kv_lens.copy_(host[sequences + 1 :], non_blocking=True)
