"""The order in which `benchmarks.arms` tries what it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.arms import Row, in_turns


def _rows(*names: str) -> list[list[Row]]:
    return [[Row(name, "arm", "tiny", 4, "bf16")] for name in names]


def test_each_point_has_its_first_batch_before_any_has_its_second() -> None:
    tried = [iter(_rows("prefill", "prefill", "prefill")), iter(_rows("decode"))]

    found = [(i, rows[0].point) for i, rows in in_turns(tried)]

    assert found == [(0, "prefill"), (1, "decode"), (0, "prefill"), (0, "prefill")]


def test_an_error_is_raised_before_any_other_point_goes_on() -> None:
    def breaks() -> Iterator[list[Row]]:
        yield _rows("prefill")[0]
        raise RuntimeError("the context is lost")

    later = iter(_rows("decode", "decode"))
    with pytest.raises(RuntimeError, match="lost"):
        list(in_turns([breaks(), later]))

    assert len(list(later)) == 1


def test_nothing_to_try() -> None:
    assert not list(in_turns([]))
    assert not list(in_turns([iter(())]))
