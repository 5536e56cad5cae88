"""New tokens as rows of decode passes: tokens, positions and slots, and the same attention."""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.backend.engines.sglang.pass_mode.decode_rows import as_decode, last_rows
from tests.backend.engines.sglang.pass_mode.fakes import Mode, batch

sequences = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5)


@given(sequences)
def test_each_new_token_is_a_row_of_its_sequence(lens: list[tuple[int, int]]) -> None:
    prefix_lens, extend_lens = [one[0] for one in lens], [one[1] for one in lens]
    extend = batch(prefix_lens, extend_lens)
    rows = as_decode(extend)
    decode = rows.forward_batch

    assert decode.forward_mode is decode.global_forward_mode is Mode.DECODE
    assert rows.batch_size == decode.batch_size == sum(extend_lens)
    expected = [
        (i + 1, prefix + token) for i, (prefix, new) in enumerate(lens) for token in range(new)
    ]
    assert decode.req_pool_indices.tolist() == [request for request, _ in expected]
    assert decode.positions.tolist() == [position for _, position in expected]
    for name in ("seq_lens", "seq_lens_cpu", "orig_seq_lens"):
        assert getattr(decode, name).tolist() == [position + 1 for _, position in expected]
    assert decode.seq_lens.dtype == extend.seq_lens.dtype
    assert decode.orig_seq_lens.dtype == torch.int32
    assert decode.seq_lens_sum == sum(position + 1 for _, position in expected)
    assert decode.input_ids is extend.input_ids
    assert decode.out_cache_loc is extend.out_cache_loc
    assert decode.extend_seq_lens_cpu is decode.extend_prefix_lens_cpu is None
    assert rows.ends == [end - 1 for end in accumulate(extend_lens)]


@given(sequences)
def test_the_batch_itself_is_not_changed(lens: list[tuple[int, int]]) -> None:
    extend = batch([one[0] for one in lens], [one[1] for one in lens])
    before = copy.deepcopy(vars(extend))
    rows = as_decode(extend)
    rows.part(0, 1)

    for name, value in before.items():
        now = getattr(extend, name)
        same = torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value
        assert same, name


@given(sequences, st.integers(1, 30))
def test_parts_together_are_the_whole(lens: list[tuple[int, int]], most: int) -> None:
    rows = as_decode(batch([one[0] for one in lens], [one[1] for one in lens]))
    whole = rows.forward_batch
    starts = range(0, rows.batch_size, most)
    parts = [rows.part(start, min(start + most, rows.batch_size)) for start in starts]

    assert all(part.forward_batch.batch_size <= most for part in parts)
    for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens_cpu"):
        joined = torch.cat([getattr(part.forward_batch, name) for part in parts])
        assert torch.equal(joined, getattr(whole, name))
    ends = [s + end for s, part in zip(starts, parts, strict=True) for end in part.ends]
    assert ends == rows.ends
    assert sum(part.forward_batch.seq_lens_sum for part in parts) == whole.seq_lens_sum


def test_a_part_that_is_the_whole_is_not_copied() -> None:
    rows = as_decode(batch([3], [5]))

    assert rows.part(0, 5).forward_batch is rows.forward_batch


@pytest.mark.parametrize(
    ("ends", "expected"), [([2], [2]), ([0, 3], [0, 3]), ([3, 1, 0], [3, 1, 0])]
)
def test_the_last_rows_are_taken(ends: list[int], expected: list[int]) -> None:
    logits = torch.arange(8.0).view(4, 2)
    found = last_rows(logits, ends)
    copied = found.clone()
    logits.zero_()  # as the next replay of the same graph does

    assert torch.equal(found, copied)
    assert found[:, 0].tolist() == [2.0 * row for row in ends]


def test_a_part_without_ends_has_no_rows() -> None:
    assert last_rows(torch.zeros(4, 2), []) is None


class _Model:
    """Two layers of causal attention over one pool of keys, paged by a table of slots.

    As in SGLang each layer writes the keys of all new tokens before any of them attends.
    """

    width = 8

    def __init__(self, requests: int, longest: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        slots = torch.randperm(requests * longest, generator=generator)
        self.table = slots.view(requests, longest)
        self.embedding = torch.randn(4096, self.width, generator=generator, dtype=torch.double)
        self.weights = torch.randn(
            2, 3, self.width, self.width, generator=generator, dtype=torch.double
        )
        self.pool = torch.full((2, 2, len(slots), self.width), torch.nan, dtype=torch.double)

    def _layer(self, hidden: torch.Tensor, batch: Any, layer: int) -> torch.Tensor:
        query, key, value = hidden @ self.weights[layer]
        self.pool[layer, 0, batch.out_cache_loc] = key
        self.pool[layer, 1, batch.out_cache_loc] = value
        return hidden + torch.stack(
            [
                self._attend(query[row], batch_row, layer)
                for row, batch_row in enumerate(self._keys(batch))
            ]
        )

    def _attend(self, query: torch.Tensor, slots: torch.Tensor, layer: int) -> torch.Tensor:
        key, value = self.pool[layer, 0, slots], self.pool[layer, 1, slots]
        weights = (key @ query / self.width**0.5).softmax(0)
        return torch.matmul(weights, value)

    def _keys(self, batch: Any) -> list[torch.Tensor]:
        """The slots that each new token attends to, as the mode has it."""
        requests, kv_lens = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        if batch.forward_mode is Mode.DECODE:
            return [self.table[r, :kv] for r, kv in zip(requests, kv_lens, strict=True)]
        return [
            self.table[request, : kv - new + token + 1]
            for request, kv, new in zip(requests, kv_lens, batch.extend_seq_lens_cpu, strict=True)
            for token in range(new)
        ]

    def __call__(self, batch: Any) -> torch.Tensor:
        hidden = self.embedding[batch.input_ids]
        for layer in range(2):
            hidden = self._layer(hidden, batch, layer)
        return hidden


@settings(max_examples=40, deadline=None)
@given(sequences, st.integers(1, 25), st.integers(0, 2**31))
def test_decode_passes_over_rows_compute_what_the_prefill_computes(
    lens: list[tuple[int, int]], most: int, seed: int
) -> None:
    """In one pass and in parts, over several layers, and the pool is left alike."""
    model = _Model(len(lens) + 1, 64, seed)
    prefix_lens, extend_lens = [one[0] for one in lens], [one[1] for one in lens]
    if any(prefix_lens):
        kept = [i for i, prefix in enumerate(prefix_lens) if prefix]
        earlier = batch([0] * len(kept), [prefix_lens[i] for i in kept])
        earlier.req_pool_indices = torch.tensor([i + 1 for i in kept])
        earlier.out_cache_loc = torch.cat([model.table[i + 1, : prefix_lens[i]] for i in kept])
        model(earlier)
    extend = batch(prefix_lens, extend_lens)
    extend.out_cache_loc = torch.cat(
        [model.table[i + 1, prefix : prefix + new] for i, (prefix, new) in enumerate(lens)]
    )
    before = model.pool.clone()
    expected = model(extend)
    pool, model.pool = model.pool, before

    rows = as_decode(extend)
    found = [
        model(rows.part(start, min(start + most, rows.batch_size)).forward_batch)
        for start in range(0, rows.batch_size, most)
    ]

    torch.testing.assert_close(torch.cat(found), expected)
    torch.testing.assert_close(model.pool, pool, equal_nan=True)
