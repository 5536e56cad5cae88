"""Which rows of an arm's output are compared with the reference, and how far off the worst is."""

from __future__ import annotations

import torch

_ROWS = 24
_ENDS = 8
_LEAST = 1e-6
"""A row may have no value but 0, such as the score of a single key."""


def checked_rows(starts_q: torch.Tensor, seed: int) -> torch.Tensor:
    """Rows to compare: the ends of the batch and of its sequences, and some drawn by `seed`.

    Args:
        starts_q: [sequences + 1] first row of each sequence, and the number of rows.

    Returns:
        [rows] int64 on the same device, ascending.
    """
    device, total = starts_q.device, int(starts_q[-1])
    ends = torch.cat((starts_q[:-1], starts_q[1:] - 1))
    generator = torch.Generator(device="cpu").manual_seed(seed)
    some = torch.randint(total, (_ROWS,), generator=generator)
    edges = ends[torch.linspace(0, len(ends) - 1, min(len(ends), _ENDS)).long().to(device)]
    rows: torch.Tensor = torch.unique(torch.cat((edges, some.to(device))))
    return rows


def row_error(output: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Relative error of one row against its `reference` ([width] fp32), as a number that is still
    on the device; not finite where anything of `output` is not."""
    off = (output.float() - reference).norm()
    error: torch.Tensor = off / reference.norm().clamp_min(_LEAST)
    return error


def worst_error(output: torch.Tensor, rows: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest relative error of a row of `output`; inf when any of it is not finite.

    Args:
        output: [all rows, heads, width].
        rows: [rows] those to compare.
        reference: [rows, heads, width] fp32.
    """
    if not bool(torch.isfinite(output).all()):
        return float("inf")
    difference = output[rows].float() - reference
    return float((difference.norm(dim=(1, 2)) / reference.norm(dim=(1, 2))).max())
