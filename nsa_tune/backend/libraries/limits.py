"""Limits of any library: what probes find, and what must fit into a device's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nsa_tune.backend.types.formula import Limit
from nsa_tune.backend.types.point import Setting

PROBED: dict[str, str] = {
    "flashmla_schedule_rows": "most rows that FlashMLA schedules at full speed",
    "flashmla_schedule_ns_per_row": "nanoseconds a row that its slow schedule takes",
    "flashmla_decode_rows": "most rows on which FlashMLA's decode kernel is right",
    "deep_gemm_metadata_rows": "most rows that DeepGEMM schedules",
    "deep_gemm_next_n": "most queries a row that DeepGEMM's paged logits take",
}
"""Name of each limit that a probe can store in a table, and what it says. A row is a query token
as the kernel sees it."""


_LIBRARIES = {
    # Not sglang: its replacement of the schedule hands over to theirs.
    "flashmla": ("sgl-flash-mla", "sglang-kernel", "sgl-kernel", "flash-mla"),
    "deep_gemm": ("sgl-deep-gemm", "deep-gemm"),
}
"""By what the names of limits begin with: the distributions that they are limits of."""


def probed_elsewhere(
    names: Iterable[str], there: Mapping[str, str], here: Mapping[str, str]
) -> frozenset[str]:
    """Those of the limits `names` that were probed with other versions of their library: `there`
    and `here` are versions by distribution. One that is not installed here has no version."""
    differing = {
        begin
        for begin, distributions in _LIBRARIES.items()
        if any(here[one] != there.get(one) for one in distributions if one in here)
    }
    return frozenset(name for name in names if name.startswith(tuple(differing)))


def bound(setting: Setting, name: str, formula: int | None, most: int) -> int | None:
    """The smaller of `formula` and the probed limit `name`; None where nothing says how far one may
    go: there is no formula, and no probe of these libraries.

    A probe alone is believed up to `most`, which no build passes.
    """
    probed = setting.limits.get(name)
    if formula is None:
        elsewhere = name in setting.limits_elsewhere
        return None if probed is None or elsewhere else min(probed, most)
    return formula if probed is None else min(probed, formula)


def quarter_of_memory(
    needed: str, what: str, setting: Setting, passed: str = ""
) -> tuple[Limit, ...]:
    """The limit that `needed`, a formula of bytes, stays within a quarter of the device's memory;
    none where the memory is unknown. `passed` is the same as a bound, where there is one."""
    if not setting.device.memory:
        return ()
    why = f"{{{needed} / 1073741824:.1f}} GiB of {what} pass a quarter of the device's memory"
    return (Limit(passed or f"{needed} > {setting.device.memory // 4}", why),)


def rows_in_quarter_of_memory(
    row_bytes: int, what: str, setting: Setting, more_rows: int = 0
) -> tuple[Limit, ...]:
    """The same for `row_bytes` a query token, of which there are `more_rows` more."""
    rows = f"(q_tokens + {more_rows})" if more_rows else "q_tokens"
    most = setting.device.memory // 4 // row_bytes - more_rows
    return quarter_of_memory(f"{rows} * {row_bytes}", what, setting, f"q_tokens > {max(most, 0)}")
