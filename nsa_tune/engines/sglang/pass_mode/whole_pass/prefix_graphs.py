"""Prefill CUDA graphs of dense MLA without breaks, in which MHA attends to a prefix too.

SGLang expands a prefix at once where it runs MHA eagerly (MHA_ONE_SHOT): it reads the latents of
all tokens back by a list of slots, the new ones just written. A graph holds that for a list of a
fixed length, of which each replay uses as much as there is. What is beyond costs its expansion, so
there are two lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.sglang.facts import mha_bytes
from nsa_tune.engines.sglang.pass_mode.rows.rows import to_device
from nsa_tune.engines.sglang.pass_mode.whole_pass.expanded import expanding
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import Kind, capture, lens_of, shape_key

PREFIXES = (8192, 32768)
"""Cached tokens that a graph has room for, all sequences' together."""
_SMALLEST = 64
"""Cached tokens more than a smaller graph has room for, in the shortest batch that is timed."""
SEQUENCES = 16
"""Sequences of a batch at most; padding is one more."""
LEAST_TOKENS = 256
"""Smaller graphs are not captured: expanding a prefix does not pay for so few new tokens."""


def timed_prefixes(room: int) -> tuple[int, int]:
    """Cached tokens behind which a graph with so much room is timed: about as few and as many as it
    ever runs."""
    return room // 4 + _SMALLEST, room


def least_keys(prefix_tokens: int, new_tokens: int) -> float:
    """Keys of a new token from which on the graph that runs a batch was timed.

    Several short prefixes take the room of a long one, and cost its expansion.
    """
    room = next(room for room in PREFIXES if room >= prefix_tokens)
    return timed_prefixes(room)[0] + (new_tokens + 1) / 2


class PrefixGraphs:
    """The graphs over prefixes of one prefill graph runner."""

    kind = Kind.PREFIX

    def __init__(self, runner: Any) -> None:
        """`runner` is SGLang's PrefillCudaGraphRunner."""
        import torch

        self._runner = runner
        context = runner.model_runner.model_config.context_len
        self._prefixes = [prefix for prefix in PREFIXES if prefix < context]
        most = max(self._prefixes, default=0) + max(runner.capture_num_tokens)
        starts = torch.zeros((2, SEQUENCES + 2), dtype=torch.int32, device=runner.device)
        self._starts_q, self._starts_kv = starts[0], starts[1]
        self._slots = torch.zeros(most, dtype=torch.int32, device=runner.device)
        self._captured: dict[int, list[Any]] = {}
        """By size, SGLang's batches that the graphs were captured with."""
        self._prefix = 0
        """The room of the graph that was prepared last."""

    @property
    def sizes(self) -> list[int]:
        """The captured sizes, in tokens."""
        return sorted(self._captured)

    def wanted(self) -> list[int]:
        """The sizes to capture, of those that SGLang has graphs of."""
        sizes = sorted(self._runner.capture_num_tokens) if self._prefixes else []
        return [size for size in sizes if size >= LEAST_TOKENS]

    def scratch_bytes(self) -> int:
        """Memory that capturing takes beside what SGLang's own graph of a size has just taken."""
        return len(self._slots) * mha_bytes(self._runner.model_runner)

    def capture(self, size: int) -> None:
        """Capture the graphs of `size` tokens. Call it within the runner's own capture session."""
        batches = [self._capture(size, prefix) for prefix in self._prefixes]
        self._captured[size] = batches

    def _capture(self, size: int, prefix: int) -> Any:
        runner = self._runner
        forward_batch, backend = runner.capture_prepare(size)
        backend.init_forward_metadata(forward_batch)
        self._prefix = prefix
        self._write(size, [0], [size])
        # As for a batch behind a prefix, whose slots SGLang would list here.
        forward_batch.extend_prefix_lens_cpu = [prefix] * forward_batch.batch_size
        forward_batch.mha_one_shot_kv_indices = self._slots[: prefix + size]
        backend.forward_metadata = replace(
            backend.forward_metadata, cu_seqlens_q=self._starts_q, cu_seqlens_k=self._starts_kv,
            max_seq_len_q=size, max_seq_len_k=prefix + size,
        )  # fmt: skip
        with expanding(backend):
            capture(runner, self.key(size), partial(runner._run_forward, forward_batch, size))
        return forward_batch

    def fits(self, size: int, batch: Batch) -> bool:
        """Whether there is a graph of `size` tokens that runs a batch with these sums."""
        return (
            size in self._captured
            and 0 < batch.prefix_tokens <= self._prefixes[-1]
            and batch.batch_size <= SEQUENCES
        )

    def prepare(self, size: int, forward_batch: Any) -> None:
        """Write a batch's lengths and slots to where the graph of `size` tokens reads them."""
        prefix_lens, extend_lens = lens_of(forward_batch)
        self._prefix = next(room for room in self._prefixes if room >= sum(prefix_lens))
        self._write(size, prefix_lens, extend_lens)
        table = self._runner.model_runner.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices[: len(extend_lens)]
        kv_lens = [prefix + new for prefix, new in zip(prefix_lens, extend_lens, strict=True)]
        total, padding = sum(kv_lens), size - sum(extend_lens)
        self._slots[:total] = _joined(table[:, : max(kv_lens)].index_select(0, rows), kv_lens)
        # Padding attends to what padding writes.
        self._slots[total : total + padding] = 0

    def key(self, size: int) -> Any:
        """Under which SGLang keeps the graph of `size` tokens that was prepared last."""
        return shape_key(size, f"{self.kind}_{self._prefix}")

    def _write(self, size: int, prefix_lens: Sequence[int], extend_lens: Sequence[int]) -> None:
        """Where each sequence begins; padding is one more."""
        padding = size - sum(extend_lens)
        new = [*extend_lens, padding]
        both = [prefix + rows for prefix, rows in zip([*prefix_lens, 0], new, strict=True)]
        for starts, lens in ((self._starts_q, new), (self._starts_kv, both)):
            ends = list(accumulate(lens))
            # Sequences that are not there have no rows and no keys.
            filled = [0, *ends, *[ends[-1]] * (SEQUENCES + 1 - len(ends))]
            starts.copy_(to_device(filled, starts), non_blocking=True)


def _joined(slots: Any, lens: Sequence[int]) -> Any:
    """Of slots [sequences, longest] the first of each sequence, one after the other."""
    import torch

    if len(lens) == 1:
        return slots[0]
    width = slots.shape[1]
    places = torch.cat([torch.arange(length) + i * width for i, length in enumerate(lens)])
    return slots.flatten().index_select(0, to_device(places, slots))
