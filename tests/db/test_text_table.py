"""The text form of a table."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nsa_tune._errors import StoreCorrupt, StoreError, StoreMissing, StoreNewer
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.text_table import (
    checked_measurement,
    format_table,
    read_key,
    read_text,
)
from tests.records import KEY, failed, ok, table, tables

_OLDEST_AGE_US = (datetime.max - datetime.min) // timedelta(microseconds=1)


def _written(text: str, tmp_path: Path) -> Path:
    path = tmp_path / "a.tsv"
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(original=tables())
def test_a_table_survives_its_text(original: Table, tmp_path: Path) -> None:
    path = _written(format_table(original), tmp_path)

    read = read_text(path)

    assert set(read.measurements) == set(original.measurements)
    assert replace(read, measurements=(), source="") == replace(
        original, measurements=(), source=""
    )
    assert read_key(path) == original.key
    assert format_table(read) == format_table(original)


def test_the_text_is_frozen() -> None:
    text = format_table(table(ok("extend:1920+128"), failed("extend:0+64", "mla", "no\tkernel\n")))

    assert text == (
        "# format = nsa-tune-table 1\n"
        "# gpu = NVIDIA H100 80GB HBM3\n"
        "# arch = sm90\n"
        "# sms = 132\n"
        "# shared_memory_optin = 232448\n"
        "# memory = 85899345920\n"
        "# l2 = 52428800\n"
        "# driver = 580.95.05\n"
        "# model = deepseek-v3.2\n"
        "# heads = 128\n"
        "# kv_layout = fp8_packed\n"
        "# protocol = cuda-graph-1\n"
        "# measured_at = 2026-11-20T12:00:00.000000+00:00\n"
        "# rows = 2\n"
        "# content = 630402ec865d688f2420151e88c5db6a\n"
        "# library = sgl-flash-mla 1.0.0\n"
        "# library = torch 2.13.0\n"
        "point\tbatch\tarm\tstatus\tlatency_us\tlow_us\thigh_us\tsamples\terror\treason\n"
        "prefill\textend:0+64\tmla\tfailed\t-\t-\t-\t0\t-\tno\\tkernel\\n\n"
        "prefill\textend:1920+128\tmha/fa3\tok\t100\t50\t200\t30\t0.001\t-\n"
    )


def test_the_text_with_costs_of_a_pass_is_frozen(tmp_path: Path) -> None:
    rows = (ok("extend:0+64"), replace(ok("extend:1920+128"), pass_us=21.4567))
    lines = format_table(table(*rows)).splitlines()

    assert lines[0] == "# format = nsa-tune-table 2"
    assert lines[-3:] == [
        "point\tbatch\tarm\tstatus\tlatency_us\tlow_us\thigh_us\tsamples\terror\treason\tpass_us",
        "prefill\textend:0+64\tmha/fa3\tok\t100\t50\t200\t30\t0.001\t-\t-",
        "prefill\textend:1920+128\tmha/fa3\tok\t100\t50\t200\t30\t0.001\t-\t21.46",
    ]
    read = read_text(_written("\n".join([*lines, ""]), tmp_path))
    assert [row.pass_us for row in read.measurements] == [None, 21.46]


@pytest.mark.parametrize(("costs", "version"), [((None, None), 1), ((None, 0.0), 2), ((3, 4), 2)])
def test_the_first_format_is_written_where_it_suffices(
    costs: tuple[float | None, ...], version: int, tmp_path: Path
) -> None:
    rows = [replace(ok(f"extend:{i}+1"), pass_us=cost) for i, cost in enumerate(costs)]
    text = format_table(table(*rows))

    assert text.startswith(f"# format = nsa-tune-table {version}\n")
    assert ("\tpass_us\n" in text) == (version == 2)
    read = read_text(_written(text, tmp_path))
    assert tuple(row.pass_us for row in read.measurements) == costs


@pytest.mark.parametrize(
    ("cell", "complaint"),
    [
        ("-1", "a cost of -1.0 us a pass cannot be"), ("inf", "a cost of inf us a pass"),
        ("nan", "a cost of nan us a pass"), ("dear", "could not convert"),
    ],
)  # fmt: skip
def test_a_cost_of_a_pass_that_cannot_be_is_told_with_its_line(
    cell: str, complaint: str, tmp_path: Path
) -> None:
    text = format_table(table(replace(ok("extend:0+1"), pass_us=21.0)))
    assert text.endswith("\t21\n")

    with pytest.raises(StoreCorrupt, match=complaint) as caught:
        read_text(_written(text.replace("\t21\n", f"\t{cell}\n"), tmp_path))
    assert "line 19" in str(caught.value)


def test_a_row_has_the_columns_of_its_format(tmp_path: Path) -> None:
    second = format_table(table(replace(ok("extend:0+1"), pass_us=21.0)))

    with pytest.raises(StoreCorrupt, match="10 cells, where a row has 11"):
        read_text(_written(second.replace("\t21\n", "\n"), tmp_path))
    with pytest.raises(StoreCorrupt, match="the columns must be: point"):
        read_text(_written(second.replace("table 2", "table 1"), tmp_path))


def test_rows_are_sorted_with_numbers_in_their_order() -> None:
    rows = [ok("extend:0+1024"), ok("extend:0+512", "mla/b"), ok("extend:0+512", "mla/a")]
    random.Random(1).shuffle(rows)

    lines = format_table(table(*rows)).splitlines()[-3:]

    assert [line.split("\t")[1:3] for line in lines] == [
        ["extend:0+512", "mla/a"],
        ["extend:0+512", "mla/b"],
        ["extend:0+1024", "mha/fa3"],
    ]


def test_latencies_keep_four_significant_digits(tmp_path: Path) -> None:
    path = _written(format_table(table(ok("extend:0+1", latency_us=123456.789))), tmp_path)

    (row,) = read_text(path).measurements

    assert row.latency_us == 123500.0


def test_a_lone_surrogate_in_a_reason_is_written_as_its_escape(tmp_path: Path) -> None:
    path = _written(format_table(table(failed("extend:0+1", "mla", "no \udcff.so"))), tmp_path)

    assert read_text(path).measurements[0].reason == "no \\udcff.so"


def test_windows_line_ends_are_read(tmp_path: Path) -> None:
    text = format_table(table(ok("extend:0+1"), failed("extend:0+2", "mla", "no\r\nkernel")))
    path = tmp_path / "a.tsv"
    path.write_bytes(text.replace("\n", "\r\n").encode())

    assert format_table(read_text(path)) == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(ages=[_OLDEST_AGE_US, 10**17])
@given(ages=st.lists(st.integers(0, _OLDEST_AGE_US) | st.integers(0, 2), min_size=1, max_size=8))
def test_every_row_keeps_its_own_time(ages: list[int], tmp_path: Path) -> None:
    newest = datetime.max.replace(tzinfo=UTC)
    rows = [ok(f"extend:0+{i + 1}") for i in range(len(ages))]
    times = {
        (row.point, row.batch, row.arm): (newest - timedelta(microseconds=age)).isoformat(
            timespec="microseconds"
        )
        for row, age in zip(rows, ages, strict=True)
        if age
    }
    at = newest.isoformat(timespec="microseconds")
    text = format_table(replace(table(*rows[::-1], measured_at=at), times=times))

    read = read_text(_written(text, tmp_path))

    assert read.times == times
    assert ("# ages = " in text) == any(ages)
    assert format_table(read) == text


def test_times_that_are_no_times_are_not_written() -> None:
    some = table(ok("extend:0+1"), ok("extend:0+2"))
    cell = ("prefill", "extend:0+1", "mha/fa3")

    for time in (
        "", "yesterday", "2026-11-20T11:00:00", "2027-01-01T00:00:00+00:00",
        "0001-01-01T00:00:00+14:00",
    ):  # fmt: skip
        assert "# ages" not in format_table(replace(some, times={cell: time}))
    assert "# ages" not in format_table(
        replace(some, measured_at="now", times={cell: "2026-11-20T11:00:00+00:00"})
    )


@pytest.mark.parametrize(
    ("ages", "complaint"),
    [
        ("5x1", "1 ages for 2 rows"),
        ("5x1 0x2", "'0x2' is no age of so many of the 2 rows"),
        ("5x999999", "no age"),
        ("-5x2", "no age"),
        ("5", "no age"),
        ("", "no age"),
        ("99999999999999999x2", "ages: "),
    ],
)
def test_ages_of_other_rows_are_refused(ages: str, complaint: str, tmp_path: Path) -> None:
    text = format_table(table(ok("extend:0+1"), ok("extend:0+2")))
    text = re.sub("# content = .*\n", f"# ages = {ages}\n", text)

    with pytest.raises(StoreCorrupt, match=complaint):
        read_text(_written(text, tmp_path))


def test_unknown_facts_in_the_head_are_passed_over(tmp_path: Path) -> None:
    text = format_table(table(ok("extend:0+1"))).replace("# sms", "# host = node7\n# sms")
    text = re.sub("# content = .*\n", "", text)

    assert read_text(_written(text, tmp_path)).key == KEY


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("# format = nsa-tune-table 1", "latency,arm", "line 1: not a table of nsa-tune"),
        ("# heads = 128", "# heads = many", "line 10: heads is 'many'"),
        ("# heads = 128\n", "", "no line '# heads"),
        ("# heads = 128", "# gpu = H200", "line 10: not a new"),
        ("# rows = 4", "# rows = 5", "4 rows, where the head says 5"),
        ("point\tbatch", "batch\tpoint", "line 18: the columns"),
        ("\tok\t100", "\tfine\t100", "line 20: status 'fine'"),
        ("\tok\t100", "\tok\tfast", "line 20: could not convert"),
        ("\tok\t100", "\tok\t-", "line 20: a successful measurement needs"),
        ("\tok\t100", "\tok\t0", "line 20: a latency of 0.0"),
        ("\tok\t100", "\tok\tnan", "line 20: a latency of nan"),
        ("\tok\t100", "\tok\tinf", "line 20: a latency of inf"),
        ("\t30\t", "\t-3\t", "line 20: samples '-3'"),
        ("no\\tkernel", "no\\qkernel", "line 19: \\q is no escape"),
        ("no\\tkernel", "no\tkernel", "line 19: 11 cells"),
        ("mla/b", "mla/a", "line 22: a second row"),
    ],
)  # fmt: skip
def test_damage_is_told_with_its_line(old: str, new: str, complaint: str, tmp_path: Path) -> None:
    text = format_table(
        table(
            failed("extend:0+1", "mla", "no\tkernel"), ok("extend:0+2"),
            ok("extend:0+3", "mla/a"), ok("extend:0+3", "mla/b"),
        )
    )  # fmt: skip
    assert old in text

    with pytest.raises(StoreCorrupt) as caught:
        read_text(_written(text.replace(old, new, 1), tmp_path))

    assert complaint in str(caught.value)
    assert "a.tsv" in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    text = format_table(table(ok("extend:0+1"), ok("extend:0+2", latency_us=345.6)))

    for length in range(len(text)):
        with pytest.raises(StoreError):
            read_text(_written(text[:length], tmp_path))


def test_a_newer_format_says_upgrade(tmp_path: Path) -> None:
    text = format_table(table()).replace("nsa-tune-table 1", "nsa-tune-table 3")

    with pytest.raises(StoreNewer, match="upgrade"):
        read_text(_written(text, tmp_path))


def test_bytes_that_are_no_text_are_told_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(format_table(table()).encode().replace(b"sm90", b"\xff\xfe"))

    with pytest.raises(StoreCorrupt, match="line 3: not UTF-8"):
        read_text(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing, match=r"there is no file .*a\.tsv"):
        read_text(tmp_path / "a.tsv")


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="directory"):
        read_text(tmp_path)


def test_wrong_measurements_keep_their_latency(tmp_path: Path) -> None:
    wrong = Measurement(
        "prefill", "extend:0+1", "mla", Status.WRONG, 10.0, 9.0, 11.0, 5, float("inf"), "off"
    )

    assert read_text(_written(format_table(table(wrong)), tmp_path)).measurements == (wrong,)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, b"p"), (1, None), (2, 3), (3, "fine"), (3, None), (4, None), (4, 0.0),
        (5, float("inf")), (6, float("nan")), (6, -1.0), (4, "9.5"), (7, -1),
        (7, 2.5), (8, "x"), (9, None), (10, -2), (10, True),
        (11, -0.5), (11, float("inf")), (11, float("nan")), (11, "7"), (11, True),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused(place: int, value: Any) -> None:
    row: list[Any] = ["p", "decode:n1:1", "a", "ok", 9.5, 9.25, 9.75, 5, None, "", 0, None]
    assert checked_measurement(*row).latency_us == 9.5
    row[place] = value

    with pytest.raises(ValueError, match=r"\S"):
        checked_measurement(*row)
