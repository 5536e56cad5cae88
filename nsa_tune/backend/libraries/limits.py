"""Limits of any library: what probes find, and what must fit into a device's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Limit, Setting

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
        if any(here[name] != there.get(name) for name in distributions if name in here)
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


def at_most(most: int, size: Callable[[Batch], int], why: Callable[[int], str]) -> Limit:
    """Forbids batches whose `size` passes `most`; `why` is the clause for such a size."""

    def limit(batch: Batch) -> str | None:
        found = size(batch)
        return None if found <= most else why(found)

    return limit


def at_most_rows(most: int, why: str) -> Limit:
    """Forbids more than `most` query tokens; `why` goes on after "N rows"."""
    return at_most(most, attrgetter("q_tokens"), lambda rows: f"{rows} rows {why}")


def index_offsets(setting: Setting, why: str) -> Limit:
    """Forbids rows whose selections pass 32-bit offsets."""
    return at_most_rows((2**31 - 1) // setting.profile.index_topk, why)


def quarter_of_memory(needed: Callable[[Batch], int], what: str, setting: Setting) -> Limit | None:
    """Forbids more than a quarter of the device's memory; None where the memory is unknown.

    Args:
        needed: bytes that a batch needs.
        what: what they are, in the plural.
        setting: has the device.
    """
    if not setting.device.memory:
        return None
    return at_most(setting.device.memory // 4, needed, lambda size: _beyond_memory(size, what))


def rows_in_quarter_of_memory(
    row_bytes: int, what: str, setting: Setting, more_rows: int = 0
) -> Limit | None:
    """The same for `row_bytes` a query token, of which there are `more_rows` more."""
    if not setting.device.memory:
        return None
    return at_most(
        max(setting.device.memory // 4 // row_bytes - more_rows, 0),
        attrgetter("q_tokens"),
        lambda rows: _beyond_memory((rows + more_rows) * row_bytes, what),
    )


def _beyond_memory(size: int, what: str) -> str:
    return f"{size / 2**30:.1f} GiB of {what} pass a quarter of the device's memory"
