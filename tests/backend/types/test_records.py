"""Keys: what tells two tables apart."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from nsa_tune.backend.types.records import Key
from tests.records import KEY, failed, ok


def test_digest_is_frozen() -> None:
    # Databases name their keys by it: a change here makes every table in the field unknown.
    assert KEY.digest == "294e99ab1ab06fc2"


@pytest.mark.parametrize("name", [field.name for field in fields(Key)])
def test_every_field_changes_the_digest(name: str) -> None:
    other = {"heads": 64, "libraries": (("torch", "2.13.1"),)}.get(name, "other")
    assert replace(KEY, **{name: other}).digest != KEY.digest  # type: ignore[arg-type]


def test_a_key_does_not_differ_from_itself() -> None:
    assert list(KEY.differences(KEY)) == []


def test_differences_name_each_field_and_library() -> None:
    other = replace(KEY, heads=64, libraries=(("torch", "2.14.0"), ("triton", "3.9.0")))

    assert list(KEY.differences(other)) == [
        ("sgl-flash-mla", "1.0.0", "absent"),
        ("torch", "2.13.0", "2.14.0"),
        ("triton", "absent", "3.9.0"),
        ("heads", "128", "64"),
    ]


def test_a_layer_s_share_of_a_pass_is_added_to_all_its_times() -> None:
    row = replace(ok("extend:0+64", latency_us=100.0), pass_us=30.0)
    shared = row.amortised(10)

    assert (shared.latency_us, shared.low_us, shared.high_us) == (103.0, 53.0, 203.0)
    assert shared.pass_us == 30.0
    assert row.amortised(1).latency_us == 130.0


def test_where_nothing_is_shared_a_row_stays_as_it_is() -> None:
    rows = [ok("extend:0+64"), failed("extend:0+64", "mla", "no kernel")]
    rows.append(replace(rows[0], pass_us=0.0))
    rows.append(replace(rows[1], pass_us=5.0))

    assert [row.amortised(61) for row in rows] == rows
