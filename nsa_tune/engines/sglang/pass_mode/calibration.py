"""Measuring what passes take in this engine, with passes that it might serve.

They run as served ones do, on one stream and with the host's work in them. Their new keys go to
the pool's slot 0, which SGLang keeps for padding, and what they read are slots that hold nothing
yet. So the engine's state is as before.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.steering.steering import Steering
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.prefill import changed

MEASURED = 2
"""Which passes are measured; part of the key, so that others are not taken for them."""

_CONTEXTS = (2048, 16384, 65536)
"""Keys before a few new tokens."""
_FEW = 1024
"""New tokens up to which these are measured."""
_MANY = 2048
"""New tokens from which on eager passes are measured: fewer never make up for the launches."""
_PROMPT = 512
"""Tokens of a short prompt, of which many come in one pass: the fewer keys, the less attention."""
_TURN = 512
"""New tokens of a sequence that continues a short one."""
_SHORT_TURN = 128
"""The same in batches of many sequences, where MHA expands many more keys than are new."""
_ROWS = (8, 32, 64, 128, 256, 512, 1024)
"""Rows of decode graphs that are measured, where they were captured, and the most that were."""
_USUAL = (PassMode.ENGINE, PassMode.TABLE_KERNEL)
_LONGEST = 2**17
"""Longer sequences are not measured: how many more an engine could hold makes no difference."""
_SPACING, _FAR_SPACING = 2, 4
"""Graphs are measured whose sizes differ by so many times; SGLang's own list has 58 up to 8192.
Behind long prefixes fewer are: most of them wait for the host, and then all take as long."""
_SMALLEST = 64
"""Of the smaller graphs only the smallest: all of them wait for the host."""
_WARM_UPS, _REPEATS = 1, 3
_READ_DONE = ("war_fastpath_read_done_event", "shared_read_done_event")
"""A ModelRunner's field, by release: the event after which the pass that was launched last reads
nothing any more that the scheduler writes. A pass without one is waited for as a whole."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A pass to measure: sequences of `lens` new tokens, each behind a prefix."""

    mode: PassMode
    size: int
    """Tokens of the graph that runs it; new tokens where none does."""
    prefix: int
    lens: tuple[int, ...]

    @property
    def padding(self) -> int:
        """Tokens of the graph that are not new."""
        return self.size - sum(self.lens)

    @property
    def longest(self) -> int:
        """Keys of the longest sequence."""
        return self.prefix + max(self.lens)

    @property
    def context(self) -> int:
        """Mean keys of a new token, rounded up: this very batch lies within what was measured."""
        pairs = sum(self.prefix * new + new * (new + 1) // 2 for new in self.lens)
        return -(-pairs // sum(self.lens))


def measure(runner: Any, steering: Steering) -> list[PassTime]:
    """Measure each way to run a prefill in `runner`, SGLang's ModelRunner."""
    try:
        return _measured(runner, steering)
    finally:
        # The scheduler would take a measured pass's event for that of the first one it launches.
        for name in _READ_DONE:
            if hasattr(runner, name):
                setattr(runner, name, None)


def _measured(runner: Any, steering: Steering) -> list[PassTime]:
    found = []
    most = runner.attn_backend.dsa_index_topk
    for case in _cases(runner, steering):
        batch = _extend(runner, case.prefix, case.lens)
        with _slots_to_read(runner, case.longest, len(case.lens)):
            pass_us, host_us = _timed_us(runner, steering, case.mode, batch)
            if case.mode is not PassMode.TABLE_KERNEL or changed(runner.attn_backend):
                selects = case.mode is not PassMode.DECODE_GRAPH and case.longest > most
                found.append(
                    PassTime(
                        case.mode, case.size, case.context, pass_us, selects, host_us, case.padding
                    )
                )
    return found


def contexts(runner: Any) -> list[int]:
    """Keys before a few new tokens that this engine has room for; part of the key.

    Not the room itself: the pool's size differs a little from start to start.
    """
    return [context for context in _CONTEXTS if context + _FEW <= _room(runner)]


def _room(runner: Any) -> int:
    """Most keys of a sequence that is measured in this engine."""
    slots, context_len = runner.max_total_num_tokens, runner.model_config.context_len
    return int(min(slots, context_len, _LONGEST)) - 1


def _cases(runner: Any, steering: Steering) -> Iterator[_Case]:
    """The passes to measure: those that this engine has room for."""
    room = _room(runner)
    # Row 0 of the page tables is padding's.
    requests = len(runner.req_to_token_pool.req_to_token) - 1
    for case in _wanted(runner, steering):
        if case.longest <= room and len(case.lens) <= requests:
            yield case


def _wanted(runner: Any, steering: Steering) -> Iterator[_Case]:
    most = runner.attn_backend.dsa_index_topk
    sizes = sorted(runner.prefill_cuda_graph_runner.capture_num_tokens)
    yield from _prefills(steering, sizes, most)
    for rows in sorted({*_ROWS, *steering.rows[-1:]} & set(steering.rows)):
        for prefix in (0, *_CONTEXTS):
            # A batch to measure is made as for a prefill graph.
            if rows <= sizes[-1]:
                yield _Case(PassMode.DECODE_GRAPH, rows, prefix, (rows,))


def _spaced(sizes: Sequence[int], spacing: int = _SPACING) -> list[int]:
    """Those of the ascending sizes to measure: the largest, the smallest, and enough between."""
    kept = list(sizes[-1:])
    for size in reversed(sizes[:-1]):
        if size >= _SMALLEST and spacing * size <= kept[-1]:
            kept.append(size)
    return sorted({*kept, *sizes[:1]})


def _padded(sizes: Sequence[int], most: int) -> Iterator[_Case]:
    """The largest graph with as few tokens as it ever has, where it can have much padding."""
    size, below = sizes[-1], sizes[-2] if len(sizes) > 1 else 0
    if size >= _MANY and below and _SPACING * below <= size:
        for mode in _USUAL:
            yield _Case(mode, size, 0, _lens(below + 1, most))


def _prefills(steering: Steering, sizes: Sequence[int], most: int) -> Iterator[_Case]:
    for size in _spaced(sizes):
        own = (*_USUAL, PassMode.EAGER) if size >= _MANY else _USUAL
        yield from _short(steering, own, size, most)
        for mode in _USUAL if size >= _MANY else ():
            yield _Case(mode, size, 0, _lens(size, _PROMPT))
    yield from _padded(sizes, most)
    for size in _spaced([size for size in sizes if size <= _FEW], _FAR_SPACING):
        for prefix in _CONTEXTS:
            for mode in _USUAL:
                yield _Case(mode, size, prefix, (size,))


def _short(steering: Steering, own: Sequence[PassMode], size: int, most: int) -> Iterator[_Case]:
    """Passes of `size` new tokens in sequences of at most `most` keys: prompts, and turns."""
    for mode in (*own, *steering.dense):
        yield _Case(mode, size, 0, _lens(size, most))
    mla = tuple(mode for mode in steering.dense if mode is PassMode.DENSE_MLA_GRAPH)
    for turn in (_TURN, _SHORT_TURN) if size >= _MANY else (_TURN,):
        turns = _lens(size, turn)
        for mode in (*own, *mla):
            yield _Case(mode, size, most - max(turns), turns)


def _lens(q_tokens: int, most: int) -> tuple[int, ...]:
    """Sequences of at most `most` tokens, together `q_tokens`."""
    full, rest = divmod(q_tokens, most)
    return (most,) * full + ((rest,) if rest else ())


def _extend(runner: Any, prefix: int, lens: Sequence[int]) -> Any:
    """A prefill batch as the scheduler makes it: sequences of `lens`, each behind a prefix."""
    import torch

    graphs = runner.prefill_cuda_graph_runner
    q_tokens, device = sum(lens), graphs.device
    size = min(one for one in graphs.capture_num_tokens if one >= q_tokens)
    batch = copy.copy(graphs.capture_prepare(size)[0])
    kv_lens = [prefix + new for new in lens]
    starts = [sum(lens[:i]) for i in range(len(lens))]
    long = {"dtype": torch.int64, "device": device}
    batch.batch_size = len(lens)
    batch.input_ids = torch.randint(0, runner.model_config.vocab_size, (q_tokens,), **long)
    batch.positions = torch.cat([torch.arange(prefix, kv, **long) for kv in kv_lens])
    batch.out_cache_loc = torch.zeros(q_tokens, **long)
    batch.req_pool_indices = torch.arange(1, len(lens) + 1, **long)
    batch.seq_lens = torch.tensor(kv_lens, **long)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_cpu = torch.tensor(kv_lens)
    batch.seq_lens_sum = sum(kv_lens)
    batch.extend_num_tokens = q_tokens
    # Later releases have renamed it.
    renamed = hasattr(batch, "global_num_token_non_padded_cpu")
    setattr(batch, f"{'global_' if renamed else ''}num_token_non_padded_cpu", q_tokens)
    batch.extend_seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    batch.extend_prefix_lens = torch.full((len(lens),), prefix, dtype=torch.int32, device=device)
    batch.extend_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
    batch.extend_prefix_lens_cpu = [prefix] * len(lens)
    batch.extend_seq_lens_cpu = list(lens)
    batch.extend_logprob_start_lens_cpu = list(lens)
    batch.next_token_logits_buffer = None
    hidden = type(batch.capture_hidden_mode)
    # The draft layer reads all hidden states.
    batch.capture_hidden_mode = hidden.FULL if runner.spec_algorithm.is_eagle() else hidden.NULL
    return batch


@contextmanager
def _slots_to_read(runner: Any, kv_len: int, sequences: int) -> Iterator[None]:
    """The requests' page tables name different slots, as those of a served batch do."""
    import torch

    table = runner.req_to_token_pool.req_to_token
    slots = torch.arange(kv_len, dtype=table.dtype, device=table.device)
    for i in range(sequences):
        # Whole pages, for a page of the pool has one sequence's keys.
        start = (i * kv_len // 64) * 64
        table[1 + i, :kv_len] = (start + slots) % (runner.max_total_num_tokens // 64 * 64)
    try:
        yield
    finally:
        table[1 : 1 + sequences, :kv_len] = 0


def _timed_us(runner: Any, steering: Steering, mode: PassMode, batch: Any) -> tuple[float, float]:
    """Median microseconds of a pass, and until the host had launched it, from its first call."""
    import torch

    took, launched = [], []
    steering.forced = mode
    try:
        for i in range(_WARM_UPS + _REPEATS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            runner._forward_raw(copy.copy(batch), None)
            host_s = time.perf_counter() - begin
            torch.cuda.synchronize()
            if i >= _WARM_UPS:
                took.append((time.perf_counter() - begin) * 1e6)
                launched.append(host_s * 1e6)
    finally:
        steering.forced = None
    return statistics.median(took), statistics.median(launched)
