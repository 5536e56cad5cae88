"""Prefill batches that no user has sent, made as the scheduler makes them.

An engine's start runs them to compare and to time the ways of a pass. Only slots of the KV pool
that hold nothing yet are written and read, and page tables are put back. So the engine's state is
as before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nsa_tune.engines.sglang.facts import PAGE
from nsa_tune.engines.sglang.pass_mode.rows.rows import count_rows

_LONGEST = 2**17
"""Longer sequences are not made up: how many more an engine could hold makes no difference."""
SHORT = 2048
"""Tokens of a made-up prompt at most, but where long ones are measured: V3.2's index_topk."""
_READ_DONE = ("war_fastpath_read_done_event", "shared_read_done_event")
"""A ModelRunner's field, by release: the event after which the pass that was launched last reads
nothing any more that the scheduler writes. A pass without one is waited for as a whole."""


def prefill(
    runner: Any, prefix_lens: Sequence[int], extend_lens: Sequence[int], slots: Any = None
) -> Any:
    """A ForwardBatch of `runner`, SGLang's ModelRunner, whose sequences have these lengths.

    `slots` has an int64 tensor of places in the pool for the new tokens; without it all of them go
    to slot 0, which SGLang keeps for padding. The tokens are random.
    """
    import torch

    graphs = runner.prefill_cuda_graph_runner
    q_tokens, device = sum(extend_lens), graphs.device
    size = min(size for size in graphs.capture_num_tokens if size >= q_tokens)
    batch = copy.copy(graphs.capture_prepare(size)[0])
    kv_lens = [prefix + new for prefix, new in zip(prefix_lens, extend_lens, strict=True)]
    starts = [sum(extend_lens[:i]) for i in range(len(extend_lens))]
    long = {"dtype": torch.int64, "device": device}
    whole = {"dtype": torch.int32, "device": device}
    batch.batch_size = len(extend_lens)
    batch.input_ids = torch.randint(0, runner.model_config.vocab_size, (q_tokens,), **long)
    batch.positions = torch.cat(
        [torch.arange(*span, **long) for span in zip(prefix_lens, kv_lens, strict=True)]
    )
    batch.out_cache_loc = torch.zeros(q_tokens, **long) if slots is None else slots
    batch.req_pool_indices = torch.arange(1, len(extend_lens) + 1, **long)
    batch.seq_lens = torch.tensor(kv_lens, **long)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_cpu = torch.tensor(kv_lens)
    batch.seq_lens_sum = sum(kv_lens)
    batch.extend_num_tokens = q_tokens
    # Later releases have renamed it.
    renamed = hasattr(batch, "global_num_token_non_padded_cpu")
    setattr(batch, f"{'global_' if renamed else ''}num_token_non_padded_cpu", q_tokens)
    count_rows(batch, q_tokens)
    batch.extend_seq_lens = torch.tensor(extend_lens, **whole)
    batch.extend_prefix_lens = torch.tensor(prefix_lens, **whole)
    batch.extend_start_loc = torch.tensor(starts, **whole)
    batch.extend_prefix_lens_cpu = list(prefix_lens)
    batch.extend_seq_lens_cpu = list(extend_lens)
    batch.extend_logprob_start_lens_cpu = list(extend_lens)
    batch.next_token_logits_buffer = None
    hidden = type(batch.capture_hidden_mode)
    # The draft layer reads all hidden states.
    batch.capture_hidden_mode = hidden.FULL if runner.spec_algorithm.is_eagle() else hidden.NULL
    return batch


@contextmanager
def page_tables(runner: Any, kv_lens: Sequence[int]) -> Iterator[list[Any]]:
    """Within it the page tables of requests 1, 2 and so on name slots for so many keys each.

    Yields the slots, a tensor a sequence. Each has whole pages of its own, as those of a served
    batch do, as long as the pool has enough.
    """
    import torch

    table = runner.req_to_token_pool.req_to_token
    # Page 0 is padding's.
    first, most = 1, runner.max_total_num_tokens // PAGE * PAGE
    slots = []
    for i, kv_len in enumerate(kv_lens):
        places = first * PAGE + torch.arange(kv_len, dtype=table.dtype, device=table.device)
        slots.append(places % most)
        table[1 + i, :kv_len] = slots[i]
        first += -(-kv_len // PAGE)
    try:
        yield slots
    finally:
        table[1 : 1 + len(kv_lens), : max(kv_lens)] = 0


@contextmanager
def no_events_left(runner: Any) -> Iterator[None]:
    """The scheduler would take a made-up pass's event for that of the first one it launches."""
    try:
        yield
    finally:
        for name in _READ_DONE:
            if hasattr(runner, name):
                setattr(runner, name, None)


def longest(runner: Any) -> int:
    """Most keys of a made-up sequence in this engine."""
    slots, context_len = runner.max_total_num_tokens, runner.model_config.context_len
    return int(min(slots, context_len, _LONGEST)) - 1


def requests(runner: Any) -> int:
    """Most sequences of a made-up batch in this engine."""
    # Row 0 of the page tables is padding's.
    return len(runner.req_to_token_pool.req_to_token) - 1


def slots_for(runner: Any, kv_lens: Sequence[int]) -> bool:
    """Whether the pool has slots of its own for each sequence."""
    pages = 1 + sum(-(-kv_len // PAGE) for kv_len in kv_lens)
    return bool(pages * PAGE <= runner.max_total_num_tokens)
