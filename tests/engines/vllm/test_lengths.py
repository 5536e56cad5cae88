"""A step's prefills, found in its lengths, against counting one request after the other."""

from __future__ import annotations

from operator import add

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch
from nsa_tune._errors import BatchError
from nsa_tune.engines.vllm.lengths import longest, prefills_of

DECODES = st.sampled_from([0, 1, 39, 40, 41, 300])
EXTENDS = st.sampled_from([0, 1, 2, 39, 40, 41, 90])
NEWS = st.integers(1, 9000)


def _prefills_of(
    prefixes: list[int], news: list[int], decode_tokens: int
) -> tuple[object, ...] | None:
    starts = torch.zeros(len(news) + 1, dtype=torch.int32)
    starts[1:] = torch.cumsum(torch.tensor(news), 0)
    lens = torch.tensor(list(map(add, prefixes, news)), dtype=torch.int32)
    found = prefills_of(starts, lens, len(news), decode_tokens)
    if found is None:
        return None
    sums, of_each, kv_lens, has_decodes, end = found
    assert longest(of_each) == max(of_each)
    return sums, list(of_each), list(kv_lens), has_decodes, end


@given(st.data(), DECODES, EXTENDS, st.sampled_from([1, 2, 4]), st.booleans())
def test_prefills_are_what_comes_behind_the_decodes(
    data: st.DataObject, decodes: int, extends: int, decode_tokens: int, padded: bool
) -> None:
    """Behind the first longer request others may be as short as a decode."""
    news = [data.draw(st.integers(1, decode_tokens)) for _ in range(min(decodes, 3))]
    news += [1] * (decodes - len(news))
    news += [data.draw(NEWS) for _ in range(min(extends, 5))]
    news += [decode_tokens + 7] * (decodes + extends - len(news))
    news += [0] * padded
    if not news:
        return
    prefixes = [data.draw(st.integers(0, 200_000)) for _ in news[:5]]
    prefixes += [1000] * (len(news) - len(prefixes))
    first = next((i for i, new in enumerate(news) if new > decode_tokens), None)
    found = _prefills_of(prefixes, news, decode_tokens)

    if first is None or padded:
        assert found is None
        return
    behind, before = news[first:], prefixes[first:]
    sums = Batch.extend(before, behind).sums
    assert found == (sums, behind, list(map(add, before, behind)), first > 0, sum(news))


@pytest.mark.parametrize("requests", [3, 100])
def test_lengths_that_are_missing_are_no_prefills(requests: int) -> None:
    starts = torch.arange(0, 9 * requests + 1, 9, dtype=torch.int32)
    lens = torch.full((requests,), 500, dtype=torch.int32)

    assert prefills_of(starts, lens, requests, 1) is not None
    assert prefills_of(starts, lens[1:], requests, 1) is None
    longer = prefills_of(starts, torch.cat([lens, lens]), requests, 1)
    assert longer is not None
    assert len(longer[2]) == requests


def test_products_of_lengths_pass_32_bits() -> None:
    prefixes, news = [160_000] * 64, [900] * 64
    found = _prefills_of(prefixes, news, 1)

    assert found is not None
    assert found[0] == Batch.extend(prefixes, news).sums


@pytest.mark.parametrize("decode_tokens", [1, 4])
@pytest.mark.parametrize("extends", [1, 40, 41, 60])
def test_many_decodes_before_few_or_many_extends(extends: int, decode_tokens: int) -> None:
    news = [1] * 50 + [decode_tokens + 1 + i for i in range(extends)]
    prefixes = [60_000] * 50 + [1000 + i for i in range(extends)]
    found = _prefills_of(prefixes, news, decode_tokens)

    assert found is not None
    assert found[0] == Batch.extend(prefixes[50:], news[50:]).sums
    assert found[1:] == (
        news[50:], list(map(add, prefixes[50:], news[50:])), True, sum(news)
    )  # fmt: skip


@pytest.mark.parametrize("requests", [3, 100])
def test_lengths_of_31_bits_do_not_wrap_around(requests: int) -> None:
    """Garbage as of a buffer that nobody has filled: an error, and no small sums."""
    starts = torch.arange(0, 9 * requests + 1, 9, dtype=torch.int32)
    lens = torch.full((requests,), 2**31 - 1, dtype=torch.int32)

    with pytest.raises(BatchError, match="kv_tokens < 2"):
        prefills_of(starts, lens, requests, 1)
    # From the largest int32 to the smallest it is one more, in 32 bits.
    starts[-2:] = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    assert prefills_of(starts, torch.full_like(lens, 500), requests, 1) is None
