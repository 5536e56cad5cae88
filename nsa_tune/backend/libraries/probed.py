"""Limits that were found by experiment, and how they join a formula: the smaller one counts."""

from __future__ import annotations

from nsa_tune.backend.types.point import Setting

__all__ = ["PROBED", "bound"]

PROBED: dict[str, str] = {
    "flashmla_schedule_rows": "most rows that FlashMLA schedules at full speed",
    "flashmla_schedule_ns_per_row": "nanoseconds a row that its slow schedule takes",
    "flashmla_decode_rows": "most rows on which FlashMLA's decode kernel is right",
    "deep_gemm_metadata_rows": "most rows that DeepGEMM schedules",
    "deep_gemm_next_n": "most queries a row that DeepGEMM's paged logits take",
}
"""Name of each limit that a probe can store in a table, and what it says. A row is a query token
as the kernel sees it."""


def bound(setting: Setting, name: str, formula: int | None) -> int | None:
    """The smaller of `formula` and the probed limit `name`; None where neither is known."""
    probed = setting.limits.get(name)
    if probed is None or formula is None:
        return formula if probed is None else probed
    return min(probed, formula)
