"""Rows of arms that failed: how they are made, and what the text of their reason says.

A database keeps nothing of a failure but its reason, so the reason's first words also say whether
the arm is to blame. A later run reads them back.
"""

from __future__ import annotations

from dataclasses import replace

from nsa_tune.backend.types.records import Measurement, Status

_WORKER = "worker lost: "
_INPUTS = "inputs: "
_ELSEWHERE = "other processes hold"
_OUT_OF_MEMORY = (
    "memoryerror:",
    "outofmemoryerror:",
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
)
_LONGEST_EXCEPTION = 300
_LONGEST = 400
"""Characters of a stored reason, prefix included."""


def reason_of(failure: Exception) -> str:
    """The type and the text of `failure` in one line of at most 300 characters."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:_LONGEST_EXCEPTION]


def failed_row(point: str, batch: str, arm: str, reason: str) -> Measurement:
    """The row of an arm that failed on a batch, for `reason`."""
    return Measurement(point, batch, arm, Status.FAILED, reason=reason)


def with_worker(row: Measurement) -> Measurement:
    """`row`, marked: its arm also took the worker process down."""
    return replace(row, reason=f"{_WORKER}{row.reason}"[:_LONGEST])


def with_inputs(row: Measurement) -> Measurement:
    """`row`, marked: making the batch's input tensors failed, before any arm ran."""
    return replace(row, reason=f"{_INPUTS}{row.reason}"[:_LONGEST])


def held_elsewhere(row: Measurement, bytes_held: int) -> Measurement:
    """`row`, marked: memory ran out while other processes held `bytes_held` of it."""
    reason = f"{_ELSEWHERE} {bytes_held / 2**30:.1f} GiB; {row.reason}"
    return replace(row, reason=reason[:_LONGEST])


def cost_a_worker(row: Measurement) -> bool:
    """Whether `with_worker` marked `row`."""
    return row.reason.startswith(_WORKER)


def failed_before_arms(row: Measurement) -> bool:
    """Whether `with_inputs` marked `row`."""
    return row.reason.startswith(_INPUTS)


def may_pass_later(row: Measurement) -> bool:
    """Whether `held_elsewhere` marked `row`: the arm may succeed once that memory is free."""
    return row.status is Status.FAILED and row.reason.startswith(_ELSEWHERE)


def out_of_memory(row: Measurement) -> bool:
    """Whether `row` failed because memory ran out."""
    text = row.reason.lower()
    return row.status is Status.FAILED and any(words in text for words in _OUT_OF_MEMORY)
