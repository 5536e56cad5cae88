"""New tokens as rows of verify passes: tokens, positions and slots, and the same attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.engines.sglang.pass_mode.rows.verify import as_verify, requests_of
from tests.engines.sglang.pass_mode.fakes import Mode, batch
from tests.engines.sglang.pass_mode.rows.model import Model

sequences = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5)
widths = st.integers(1, 5)


def _batch(lens: list[tuple[int, int]]) -> Any:
    return batch([one[0] for one in lens], [one[1] for one in lens])


def _tokens(lens: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(request, position) of each new token."""
    return [(i + 1, prefix + token) for i, (prefix, new) in enumerate(lens) for token in range(new)]


@given(sequences, widths)
def test_each_new_token_is_a_row_of_its_sequence(lens: list[tuple[int, int]], width: int) -> None:
    extend = _batch(lens)
    rows = as_verify(extend, width)
    verify = rows.forward_batch
    owners = verify.req_pool_indices.repeat_interleave(width)

    assert verify.forward_mode is verify.global_forward_mode is Mode.TARGET_VERIFY
    assert rows.requests == requests_of(extend.extend_seq_lens_cpu, width)
    assert len(verify.input_ids) == len(verify.positions) == rows.requests * width
    found = zip(owners[rows.tokens].tolist(), verify.positions[rows.tokens].tolist(), strict=True)
    assert list(found) == _tokens(lens)
    assert torch.equal(verify.input_ids[rows.tokens], extend.input_ids)
    assert torch.equal(verify.out_cache_loc[rows.tokens], extend.out_cache_loc)
    ends = torch.tensor(extend.extend_seq_lens_cpu).cumsum(0) - 1
    assert rows.ends == rows.tokens[ends].tolist()
    assert verify.extend_seq_lens_cpu is verify.extend_prefix_lens_cpu is None


@given(sequences, widths)
def test_a_requests_rows_follow_what_it_has_before_them(
    lens: list[tuple[int, int]], width: int
) -> None:
    extend = _batch(lens)
    verify = as_verify(extend, width).forward_batch
    expected = verify.seq_lens[:, None] + torch.arange(width)

    assert torch.equal(verify.positions.view(-1, width), expected)
    for name in ("seq_lens_cpu", "orig_seq_lens"):
        assert torch.equal(getattr(verify, name).long(), verify.seq_lens)
    assert verify.seq_lens.dtype == extend.seq_lens.dtype
    assert verify.orig_seq_lens.dtype == torch.int32
    assert verify.seq_lens_sum == verify.seq_lens.sum()


@given(sequences, widths)
def test_rows_that_are_left_out_write_where_nobody_reads(
    lens: list[tuple[int, int]], width: int
) -> None:
    """And but for sequences shorter than a request they read what is there."""
    rows = as_verify(_batch(lens), width)
    verify = rows.forward_batch
    dropped = torch.ones(len(verify.input_ids), dtype=torch.bool)
    dropped[rows.tokens] = False

    assert not verify.out_cache_loc[dropped].any()
    assert verify.out_cache_loc[rows.tokens].all()
    longest = {i + 1: max(prefix + new, width) for i, (prefix, new) in enumerate(lens)}
    owners = verify.req_pool_indices.repeat_interleave(width).tolist()
    positions = verify.positions.tolist()
    assert all(at < longest[owner] for owner, at in zip(owners, positions, strict=True))


@given(sequences, widths)
def test_the_batch_itself_is_not_changed(lens: list[tuple[int, int]], width: int) -> None:
    extend = _batch(lens)
    before = copy.deepcopy(vars(extend))
    as_verify(extend, width).part(0, 1)

    for name, value in before.items():
        now = getattr(extend, name)
        same = torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value
        assert same, name


@given(sequences, widths, st.integers(1, 10))
def test_parts_together_are_the_whole(lens: list[tuple[int, int]], width: int, most: int) -> None:
    rows = as_verify(_batch(lens), width)
    starts = range(0, rows.requests, most)
    parts = [rows.part(start, min(start + most, rows.requests)) for start in starts]

    assert all(part.requests <= most for part in parts)
    for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens_cpu"):
        joined = torch.cat([getattr(part.forward_batch, name) for part in parts])
        assert torch.equal(joined, getattr(rows.forward_batch, name))
    first = [start * width for start in starts]
    ends = [row + end for row, part in zip(first, parts, strict=True) for end in part.ends]
    assert ends == rows.ends
    tokens = [row + part.tokens for row, part in zip(first, parts, strict=True)]
    assert torch.equal(torch.cat(tokens), rows.tokens)


@pytest.mark.parametrize(
    ("new", "width", "starts"),
    [
        ((4,), 4, [10]),
        ((5,), 4, [10, 11]),  # the second begins earlier, within the new tokens
        ((1,), 4, [7]),  # within the prefix
        ((3, 9), 4, [9, 10, 14, 15]),
    ],
)
def test_the_last_request_of_a_sequence_ends_where_it_does(
    new: tuple[int, ...], width: int, starts: list[int]
) -> None:
    rows = as_verify(batch([10] * len(new), list(new)), width)

    assert rows.forward_batch.seq_lens.tolist() == starts


def test_a_sequence_shorter_than_a_request_begins_at_its_start() -> None:
    rows = as_verify(batch([0, 1], [1, 2]), 4)

    assert rows.forward_batch.seq_lens.tolist() == [0, 0]
    assert rows.tokens.tolist() == [0, 5, 6]


@settings(max_examples=60, deadline=None)
@given(sequences, widths, st.integers(1, 8), st.integers(0, 2**31))
def test_verify_passes_over_rows_compute_what_the_prefill_computes(
    lens: list[tuple[int, int]], width: int, most: int, seed: int
) -> None:
    """In one pass and in parts, over several layers, and the pool is left alike."""
    model = Model(len(lens) + 1, 64, seed)
    extend = model.extend(lens)
    before = model.pool.clone()
    expected = model(extend)
    pool, model.pool = model.pool, before

    rows = as_verify(extend, width)
    parts = [
        rows.part(start, min(start + most, rows.requests))
        for start in range(0, rows.requests, most)
    ]
    found = torch.cat([part.of_tokens(model(part.forward_batch)) for part in parts])

    torch.testing.assert_close(found, expected)
    # Slot 0 is padding's.
    torch.testing.assert_close(model.pool[:, :, 1:], pool[:, :, 1:], equal_nan=True)
