"""Request traces: each format, and the message about a file that is neither."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nsa_tune import UsageError
from nsa_tune.autotune.workload.requests import TraceRequest, read_requests
from nsa_tune.autotune.workload.weighted_batches import weighted_batches

MOONCAKE = """\
{"timestamp": 1500, "input_length": 700, "output_length": 20, "hash_ids": [0, 7]}

{"timestamp": 500, "input_length": 513, "output_length": 3, "hash_ids": [0, 1]}
{"timestamp": 600, "input_length": 10, "output_length": 0, "hash_ids": [2]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_mooncakes_requests_come_in_order_of_arrival_with_their_blocks(trace: Path) -> None:
    trace.write_text(MOONCAKE)

    assert read_requests(trace) == [
        TraceRequest(0.0, 513, 3, (0, 1)),
        TraceRequest(1.0, 700, 20, (0, 7)),
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_azures_requests_have_no_blocks(trace: Path, newline: str) -> None:
    trace.write_bytes(AZURE.replace("\n", newline).encode())

    first, second = read_requests(trace)

    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579)
    assert first.blocks == ()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # As in the trace of 2024, where a whole second has no fraction.
        ("2024-05-10 00:00:00.500000+00:00", "2024-05-10 00:00:01+00:00"),
        # As in the trace of 2023. In New York this second came an hour after the one before.
        ("2023-11-05 01:59:59.9000000", "2023-11-05 02:00:00.4000000"),
    ],
)
def test_azures_times_do_not_depend_on_where_they_are_read(
    one: str, other: str, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{one},3,4\n{other},3,4\n")
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        first, second = read_requests(trace)
    finally:
        monkeypatch.undo()
        time.tzset()

    assert second.arrival_s - first.arrival_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request"),
        ("when,what\n1,2\n", "not a trace that nsa-tune reads"),
        (AZURE.splitlines()[0] + "\n", "has no request"),
        (AZURE + "yesterday,1,2\n", "line 4 of"),
        (AZURE + "2023-11-16 18:15:50,many,2\n", "line 4 of"),
        (AZURE + "2023-11-16 18:15:50\n", "line 4 of"),
        (MOONCAKE + '{"timestamp": 1}\n', "line 5 of"),
        (MOONCAKE + "{\n", "line 5 of"),
        (MOONCAKE + MOONCAKE.splitlines()[0] + " {}\n", "line 5 of"),
        (MOONCAKE + "[]\n", "line 5 of"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_with_a_reason(
    trace: Path, text: str, message: str
) -> None:
    trace.write_text(text)

    with pytest.raises(UsageError, match=message):
        read_requests(trace)


def test_a_missing_file_and_one_that_is_not_text_are_refused(trace: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_requests(trace)
    trace.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a trace"):
        read_requests(trace)


_HOSTILE = (
    '{"timestamp": 0, "input_length": 1, "output_length": 1000000000000}',
    '{"timestamp": 0, "input_length": 1000000000000, "output_length": 1}',
    '{"timestamp": NaN, "input_length": 1, "output_length": 1}',
    '{"timestamp": "nan", "input_length": 1, "output_length": 1}',
    '{"timestamp": Infinity, "input_length": 1, "output_length": 1}',
    '{"timestamp": 1e400, "input_length": 1, "output_length": 1}',
    '{"timestamp": 0, "input_length": 1e400, "output_length": 1}',
    '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1e400]}',
    '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": '
    + str([1] * 40_000) + "}",
    '{"timestamp": 0, "input_length": 1, "output_length": ' + "9" * 5000 + "}",
    "[1]",
    "[" * 100_000,
)  # fmt: skip


def test_what_a_request_lacks_is_named(trace: Path) -> None:
    trace.write_text('{"segments": [["user 3", 200]], "output_length": 16}\n')

    with pytest.raises(UsageError, match=r"line 1 of .* is not a request: it has no 'timestamp';"):
        read_requests(trace)


@pytest.mark.parametrize("line", _HOSTILE, ids=range(len(_HOSTILE)))
def test_a_request_without_end_is_refused(trace: Path, line: str) -> None:
    trace.write_text(MOONCAKE + line + "\n")

    with pytest.raises(UsageError, match=r"line 5 of .* is not a request: .*; docs/replay\.md"):
        read_requests(trace)


@pytest.mark.parametrize(
    "line",
    ["2023-11-16 18:15:46.68,1,1000000000000", f"2023-11-16 18:15:46.68,1,{'1' * 200_000}",
     "9999-99-99,1,1", "0001-01-01 00:00:00.0,1,1"],
    ids=range(4),
)  # fmt: skip
def test_a_request_of_azure_without_end_is_refused(trace: Path, line: str) -> None:
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{line}\n")

    try:
        read_requests(trace)
    except UsageError as error:
        assert "line 2" in str(error)
    else:
        assert line.startswith("0001"), "the first year is a time"


def test_a_pipe_is_no_trace(trace: Path) -> None:
    os.mkfifo(trace)

    with pytest.raises(UsageError, match="not a regular file"):
        read_requests(trace)
    with pytest.raises(UsageError, match="not a regular file"):
        weighted_batches(trace)


def test_a_line_without_end_is_refused(trace: Path) -> None:
    trace.write_text(MOONCAKE + "{" + " " * 2**22)

    with pytest.raises(UsageError, match="line 5 has more than 4194304 bytes"):
        read_requests(trace)


def test_a_simulation_ends(
    trace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsa_tune.autotune.workload.weighted_batches._MOST_PASSES", 50)
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1000000}\n')

    assert weighted_batches(trace)
    assert "drawn from the first 50 passes" in caplog.text


SIMPLE = """\
{"arrival_s": 2, "input_tokens": 1100, "output_tokens": 7, "shared": "a", "shared_tokens": 1030}
{"arrival_s": 2.5, "input_tokens": 20, "output_tokens": 1}
"""


def test_ones_own_requests_share_whole_blocks(trace: Path) -> None:
    trace.write_text(SIMPLE)

    assert read_requests(trace) == [
        TraceRequest(0.0, 1100, 7, (("a", 0), ("a", 1))),
        TraceRequest(0.5, 20, 1),
    ]


def test_a_trace_without_requests_has_none(trace: Path) -> None:
    trace.write_text('{"arrival_s": 1, "input_tokens": 0, "output_tokens": 1}\n')

    assert read_requests(trace) == []


def test_more_shared_tokens_than_tokens_are_refused(trace: Path) -> None:
    trace.write_text(
        '{"arrival_s": 1, "input_tokens": 9, "output_tokens": 1, "shared": "a", '
        '"shared_tokens": 1024}\n'
    )

    with pytest.raises(UsageError, match="line 1"):
        read_requests(trace)
