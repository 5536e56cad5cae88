"""The soak: what recorded passes tell of memory."""

from __future__ import annotations

from typing import Any

from benchmarks.engine.soak import growth_of, steps_of


def _reading(reserved_mib: int, q: int = 0, kv: int = 0) -> dict[str, Any]:
    known = {"q": q, "kv": kv} if q else {}
    memory = dict.fromkeys(("used_mib", "peak_mib", "host_mib"), reserved_mib)
    return {"mode": "EXTEND", "reserved_mib": reserved_mib, **memory, **known}


def test_growth_is_from_the_second_quarter_to_the_last() -> None:
    assert growth_of([1, 9, 5, 5, 6, 6, 7, 7]) == {"early": 5, "late": 7, "growth": 2, "max": 9}
    assert growth_of([1, 2, 3]) is None


def test_a_step_is_named_beside_the_logits_of_its_pass() -> None:
    first = [_reading(100, 8, 1024)] * 5
    largest = _reading(612, 8192, 16384)
    later = [_reading(612, 8, 1024)] * 5
    other = _reading(712, 8, 2048)

    found = list(steps_of([*first, largest, *later, other]))

    assert found == [
        {"pass": 5, "grown_mib": 512, "logits_mib": 512, "largest_so_far": True},
        {"pass": 11, "grown_mib": 100, "logits_mib": 0, "largest_so_far": False},
    ]


def test_the_first_quarter_fills_caches() -> None:
    assert not list(steps_of([_reading(0), _reading(500, 8, 8), *[_reading(500)] * 8]))
    assert not list(steps_of([]))
