"""The soak: memory of two engines side by side."""

from __future__ import annotations

from typing import Any

from benchmarks.engine.compare import soak_table


def _row(requests: int, *reserved_mib: int) -> dict[str, Any]:
    curve = [[9, one, 3, 4, 5, 6] for one in reserved_mib]
    return {
        "seconds": 60.0, "requests": requests, "passes": 2 * requests, "wrong_answers": [],
        "table_events": {}, "ways": {"engine": requests}, "curve": curve,
    }  # fmt: skip


def test_two_curves_are_compared_after_the_same_requests() -> None:
    ours = [_row(4, 10, 11, 12, 11), _row(8, 13, 14, 15, 16)]
    default = [_row(9, 20, 21, 22, 23, 24, 25, 26, 27, 99)]

    table = soak_table({"plug-in": ours, "default": default})

    assert table.columns == ("", "plug-in", "default")
    assert ("requests", "8", "9") in table.rows
    assert (
        "reserved_mib", "10 10 11 12 12 13 14 15 16", "20 20 21 22 23 24 25 26 27"
    ) in table.rows  # fmt: skip


def test_a_soak_that_was_cut_off_at_once_is_no_error() -> None:
    table = soak_table({"plug-in": [_row(1)], "default": [_row(2, 5)]})
    assert ("reserved_mib", "", "") in table.rows
