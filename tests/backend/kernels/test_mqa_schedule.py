"""The paged-logits schedule: kernel against reference, and what every schedule must hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune.backend.kernels.mqa_schedule import (
    SEGMENT,
    Split,
    mqa_schedule,
    mqa_schedule_reference,
)

CPU = torch.device("cpu")
_splits = pytest.mark.parametrize("split", list(Split))


def contexts(lens: list[int], next_n: int = 1) -> torch.Tensor:
    last = torch.tensor(lens, dtype=torch.int32)[:, None]
    back = torch.arange(next_n - 1, -1, -1, dtype=torch.int32)
    return (last - back).contiguous()


def as_deep_gemm(lens: list[int], next_n: int, sms: int, split: Split) -> list[list[int]]:
    """The loops of sm90_paged_mqa_logits.cuh, paged_mqa_logits.cuh and sm100_*.cuh, one by one."""
    segments = [-(-length // SEGMENT) for length in lens]
    unit = next_n if split is Split.WHOLE_ROWS else (1 if next_n == 1 else -(-next_n // 2))
    ends = [sum(segments[: i + 1]) * unit for i in range(len(lens))]
    each, rest = divmod(ends[-1], sms)
    schedule = []
    for sm in range(sms + 1):
        pivot = sms - rest
        more = max(sm - pivot, 0) if split is Split.LAST_MORE else min(sm, rest)
        start = sm * each + more
        row = sum(end <= start for end in ends)
        offset = start - (ends[row - 1] if row else 0)
        if row == len(lens):
            schedule.append([row * unit, 0])
        elif split is Split.WHOLE_ROWS:
            schedule.append([row * unit, offset // unit])
        else:
            schedule.append([row * unit + offset // segments[row], offset % segments[row]])
    return schedule


@_splits
@given(
    lens=st.lists(st.integers(8, 20000), min_size=1, max_size=60),
    next_n=st.integers(1, 4),
    sms=st.sampled_from([1, 4, 78, 132]),
)
@settings(max_examples=40)
def test_the_reference_deals_as_deep_gemms_source(
    split: Split, lens: list[int], next_n: int, sms: int
) -> None:
    reference = mqa_schedule_reference(contexts(lens, next_n), sms, split)

    assert reference.tolist() == as_deep_gemm(lens, next_n, sms, split)


@_splits
@pytest.mark.parametrize("next_n", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 31, 32, 257, 2000])
def test_the_kernel_equals_the_reference_bit_for_bit(
    kernel_device: torch.device, split: Split, next_n: int, rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    lens = torch.randint(4, 9000, (rows,), generator=generator).tolist()
    given_lens = contexts(lens, next_n).to(kernel_device)

    out = mqa_schedule(given_lens, 12, split)

    assert out.dtype == torch.int32
    assert torch.equal(out, mqa_schedule_reference(given_lens, 12, split))


def test_fewer_segments_than_sms_leave_the_other_sms_without_work(
    kernel_device: torch.device,
) -> None:
    out = mqa_schedule(contexts([5, 5]).to(kernel_device), 6, Split.LAST_MORE)

    assert out.tolist() == [[0, 0]] * 5 + [[1, 0], [2, 0]]
