"""New tokens as rows of decode passes: tokens, positions and slots, and the same attention."""

from __future__ import annotations

import copy
from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.engines.sglang.pass_mode.rows.decode import as_decode
from tests.engines.sglang.pass_mode.fakes import Mode, batch
from tests.engines.sglang.pass_mode.rows.model import Model

sequences = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5)


@given(sequences)
def test_each_new_token_is_a_row_of_its_sequence(lens: list[tuple[int, int]]) -> None:
    prefix_lens, extend_lens = [one[0] for one in lens], [one[1] for one in lens]
    extend = batch(prefix_lens, extend_lens)
    rows = as_decode(extend)
    decode = rows.forward_batch

    assert decode.forward_mode is decode.global_forward_mode is Mode.DECODE
    assert rows.requests == decode.batch_size == sum(extend_lens)
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
    starts = range(0, rows.requests, most)
    parts = [rows.part(start, min(start + most, rows.requests)) for start in starts]

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


@settings(max_examples=40, deadline=None)
@given(sequences, st.integers(1, 25), st.integers(0, 2**31))
def test_decode_passes_over_rows_compute_what_the_prefill_computes(
    lens: list[tuple[int, int]], most: int, seed: int
) -> None:
    """In one pass and in parts, over several layers, and the pool is left alike."""
    model = Model(len(lens) + 1, 64, seed)
    extend = model.extend(lens)
    before = model.pool.clone()
    expected = model(extend)
    pool, model.pool = model.pool, before

    rows = as_decode(extend)
    found = [
        model(rows.part(start, min(start + most, rows.requests)).forward_batch)
        for start in range(0, rows.requests, most)
    ]

    torch.testing.assert_close(torch.cat(found), expected)
    torch.testing.assert_close(model.pool, pool, equal_nan=True)
