"""A step's prefills, found in its lengths, against counting one request after the other."""

from __future__ import annotations

from operator import add

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch
from nsa_tune._errors import BatchError
from nsa_tune.engines.vllm.lengths import Prefills, prefills_of

DECODE_TOKENS = st.sampled_from([1, 2, 4])
PREFIXES = st.integers(0, 200_000)


def _prefills_of(prefixes: list[int], news: list[int], decode_tokens: int) -> Prefills | None:
    starts = torch.zeros(len(news) + 1, dtype=torch.int32)
    starts[1:] = torch.cumsum(torch.tensor(news), 0)
    lens = torch.tensor(list(map(add, prefixes, news)), dtype=torch.int32)
    return prefills_of(starts, lens, decode_tokens)


@given(st.data(), DECODE_TOKENS, st.booleans())
def test_prefills_are_what_comes_behind_the_decodes(
    data: st.DataObject, decode_tokens: int, padded: bool
) -> None:
    """Behind the first longer request others may be as short as a decode, but not with drafts."""
    decodes = data.draw(st.lists(st.integers(1, decode_tokens), max_size=4))
    extends = data.draw(st.lists(st.integers(1, 9000), max_size=4))
    news = [*decodes, *extends, *[0] * padded]
    if not news:
        return
    prefixes = [data.draw(PREFIXES) for _ in news]
    first = next((i for i, new in enumerate(news) if new > decode_tokens), None)

    prefills = _prefills_of(prefixes, news, decode_tokens)

    if first is None or padded or min(news[first:]) <= decode_tokens > 1:
        assert prefills is None
        return
    before, behind = prefixes[first:], news[first:]
    sums = Batch.extend(before, behind).sums
    assert prefills == (sums, before, behind, first > 0, sum(news))


def test_lengths_that_are_missing_are_no_prefills() -> None:
    starts = torch.arange(0, 28, 9, dtype=torch.int32)
    lens = torch.full((3,), 500, dtype=torch.int32)

    assert prefills_of(starts, lens, 1) is not None
    assert prefills_of(starts, lens[1:], 1) is None
    longer = prefills_of(starts, torch.cat([lens, lens]), 1)
    assert longer is not None
    assert len(longer.prefix_lens) == 3


def test_products_of_lengths_pass_32_bits() -> None:
    prefixes, news = [160_000] * 64, [900] * 64
    prefills = _prefills_of(prefixes, news, 1)

    assert prefills is not None
    assert prefills.sums == Batch.extend(prefixes, news).sums


def test_lengths_of_31_bits_do_not_wrap_around() -> None:
    """Garbage as of a buffer that nobody has filled: an error, and no small sums."""
    starts = torch.arange(0, 28, 9, dtype=torch.int32)
    lens = torch.full((3,), 2**31 - 1, dtype=torch.int32)

    with pytest.raises(BatchError, match="kv_tokens < 2"):
        prefills_of(starts, lens, 1)
    # From the largest int32 to the smallest it is one more, in 32 bits.
    starts[-2:] = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    assert prefills_of(starts, torch.full_like(lens, 500), 1) is None
