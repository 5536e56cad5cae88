"""Combined window and extra indices: the Triton kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from nsa_tune.backend.kernels.combine_indices import (
    combine_indices,
    combined_width,
)


def combine_indices_reference(
    window: torch.Tensor,
    window_lengths: torch.Tensor,
    extra: torch.Tensor,
    extra_lengths: torch.Tensor,
    shift: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`combine_indices` in plain torch."""
    width = combined_width(window.shape[1], extra.shape[1])
    out = torch.full((window.shape[0], width), -1, dtype=torch.int32, device=window.device)
    lengths = window_lengths.clone()
    for row, count in enumerate(window_lengths.tolist()):
        out[row, :count] = window[row, :count]
        more = int(extra_lengths[row])
        chosen = extra[row, :more]
        out[row, count : count + more] = torch.where(chosen >= 0, chosen + shift, -1)
        lengths[row] += more
    return out, lengths


def part(rows: int, columns: int, most: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random indices below `most` and uneven lengths, the full and the empty one among them."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(most, (rows, columns), generator=generator).int()
    lengths = torch.randint(columns + 1, (rows,), generator=generator).int()
    lengths[0], lengths[-1] = columns, 0
    return indices, lengths


def test_extra_indices_are_shifted_by_the_window_tokens_and_follow_the_window() -> None:
    window, extra = torch.tensor([[4, 5, 6]]).int(), torch.tensor([[0, 7, 9]]).int()
    two = torch.tensor([2]).int()

    indices, lengths = combine_indices_reference(window, two, extra, two, shift=100)

    assert indices.shape == (1, 128)
    assert indices[0, :4].tolist() == [4, 5, 100, 107]
    assert (indices[0, 4:] == -1).all()
    assert lengths.tolist() == [4]


@pytest.mark.parametrize(("columns", "more"), [(128, 512), (128, 1024), (128, 64), (16, 300)])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_the_kernel_equals_the_reference_on_uneven_lengths(
    rows: int, columns: int, more: int, kernel_device: torch.device
) -> None:
    window, window_lengths = part(rows, columns, 1000, 1)
    extra, extra_lengths = part(rows, more, 10**6, 2)

    indices, lengths = combine_indices(
        window.to(kernel_device), window_lengths.to(kernel_device),
        extra.to(kernel_device), extra_lengths.to(kernel_device), 1000,
    )  # fmt: skip

    expected = combine_indices_reference(window, window_lengths, extra, extra_lengths, 1000)
    assert indices.shape[1] == combined_width(columns, more)
    assert torch.equal(indices.cpu(), expected[0])
    assert torch.equal(lengths.cpu(), expected[1])


def test_an_empty_extra_index_stays_empty(kernel_device: torch.device) -> None:
    window, one = torch.zeros(1, 128).int(), torch.ones(1).int()
    extra = torch.full((1, 64), -1).int()

    window, one, extra = (t.to(kernel_device) for t in (window, one, extra))
    indices, lengths = combine_indices(window, one, extra, one, 50)

    assert indices[0, :2].tolist() == [0, -1]
    assert lengths.tolist() == [2]


def test_rows_of_a_wider_table_are_read_by_their_stride(kernel_device: torch.device) -> None:
    window, lengths = part(4, 200, 1000, 4)
    lengths = lengths.clamp_max(128)
    extra, more = part(4, 96, 1000, 5)
    window, lengths, extra, more = (t.to(kernel_device) for t in (window, lengths, extra, more))

    indices, _ = combine_indices(window[:, :128], lengths, extra, more, 10)

    assert torch.equal(
        indices,
        combine_indices_reference(window[:, :128], lengths, extra, more, 10)[0],
    )
