"""The soak: what recorded passes tell of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine.soak import growth_of, main, steps_of

if TYPE_CHECKING:
    import pytest


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


def test_recorded_passes_of_a_run_that_was_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = tmp_path / "passes.jsonl"
    lines = [json.dumps(_reading(10, 8, 64) | {"pass_mode": "decode_graph"})] * 4
    passes.write_text("\n".join([*lines, lines[0][:20]]))

    main([str(passes)])

    found = json.loads(capsys.readouterr().out)
    assert found["ways"] == {"decode_graph": 4}
    assert found["memory_mib"]["reserved_mib"]["growth"] == 0
    assert found["reserved_steps"] == []
