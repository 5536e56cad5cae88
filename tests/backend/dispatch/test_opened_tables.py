"""Tables that a dispatcher is opened from: found, fitting, damaged, refused."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa_tune import Batch, NoTunedData, UsageError
from nsa_tune.backend.dispatch.decide import Verdict
from nsa_tune.backend.hardware import nvml
from nsa_tune.db.text_table import format_table
from tests.backend.fake_point import (
    KEY,
    table_of,
)
from tests.backend.machine import TIMES, opened, written

_COLD, _WARM = Batch.extend([0], [64]), Batch.extend([1024], [8])


pytestmark = pytest.mark.usefixtures("machine")


def test_a_table_answers(tmp_path: Path) -> None:
    path = written(tmp_path / "t.tsv", table_of(TIMES))

    found = opened(path)

    assert found.plan(_COLD).prefill_path == "mha"
    assert found.plan(_WARM).prefill_path == "mla"
    assert found.source == f"{path}, measured 2025-01-01T00:00:00Z"
    assert found.table is not None
    assert found.table.key == KEY


def test_no_gpu_means_this_machine(tmp_path: Path) -> None:
    path = written(tmp_path / "t.tsv", table_of(TIMES))

    assert opened(path, gpu=None).table is not None


def test_shipped_tables_answer_on_a_machine_without_that_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: ())
    written(tmp_path / "shipped" / "test-gpu.tsv", table_of(TIMES))

    found = opened()

    assert found.plan(_WARM).prefill_path == "mla"
    assert found.source.startswith("shipped:test-gpu")


@pytest.mark.parametrize("here", [True, False])
def test_of_several_tables_the_local_versions_win_where_the_gpu_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    other = replace(KEY, driver="2.0", libraries=(("torch", "2.1"),))
    written(tmp_path / "shipped" / "ours.tsv", table_of(TIMES, KEY, "2025-01-01T00:00:00Z"))
    written(tmp_path / "shipped" / "newer.tsv", table_of(TIMES, other, "2025-06-01T00:00:00Z"))
    monkeypatch.setattr(nvml, "gpu_names", lambda: ("Test GPU",) if here else ())

    assert opened().source.partition(",")[0] == ("shipped:ours" if here else "shipped:newer")


def test_the_source_says_in_what_the_table_differs_from_this_machine(tmp_path: Path) -> None:
    other = replace(KEY, driver="2.0", libraries=(("torch", "2.1"),))
    path = written(tmp_path / "t.tsv", table_of(TIMES, other))

    source = opened(path).source

    assert "driver: measured with 2.0, here 1.0; torch: measured with 2.1, here 2.0" in source


@pytest.mark.parametrize(("here", "version"), [(True, "2.0"), (False, "2.1")])
def test_guards_are_given_the_versions_that_will_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool, version: str
) -> None:
    path = written(tmp_path / "t.tsv", table_of(TIMES, replace(KEY, libraries=(("torch", "2.1"),))))
    monkeypatch.setattr(nvml, "gpu_names", lambda: ("Test GPU",) if here else ())

    assert opened(path).setting.libraries == {"torch": version}


@pytest.mark.parametrize(
    "change",
    [{"model": "gpt-2"}, {"heads": 48}, {"heads": 0}, {"kv_dtype": "int4"}],
    ids=str,
)
def test_a_request_that_cannot_be_is_a_usage_error(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        opened(**change)


def _missing(path: Path) -> None:
    del path


def _truncated(path: Path) -> None:
    text = format_table(table_of(TIMES))
    path.write_text(text[: len(text) // 2])


def _text(path: Path) -> None:
    path.write_text("not a table")


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE birds (name TEXT)")
    connection.close()


def _bad_batch(path: Path) -> None:
    table = table_of(TIMES)
    rows = (replace(table.measurements[0], batch="extend:0+0"), *table.measurements[1:])
    path.write_text(format_table(replace(table, measurements=rows)))


_DAMAGES = [
    (_missing, "t.tsv", "there is no"),
    (_missing, "t.db", "there is no"),
    (_truncated, "t.tsv", "cut short"),
    (_text, "t.tsv", "not a table of nsa-tune"),
    (_text, "t.db", "not an SQLite database"),
    (_foreign, "t.db", "not one of nsa-tune"),
    (_bad_batch, "t.tsv", "impossible batch"),
]


@pytest.mark.parametrize(("damage", "name", "clause"), _DAMAGES)
def test_an_unusable_table_means_the_rule_and_a_logged_reason(
    damage: Callable[[Path], None],
    name: str,
    clause: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / name
    damage(path)

    with caplog.at_level(logging.WARNING, "nsa_tune"):
        found = opened(path)

    assert found.table is None
    assert found.plan(_WARM).prefill_path == "mha"
    assert found.plan(_WARM).reasons["prefill_path"].verdict is Verdict.BASELINE
    assert str(path) in caplog.text
    assert clause in caplog.text
    assert str(path) in found.source


@pytest.mark.parametrize(("damage", "name", "clause"), _DAMAGES)
def test_strict_refuses_an_unusable_table(
    damage: Callable[[Path], None], name: str, clause: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    damage(path)

    with pytest.raises(NoTunedData, match=clause) as caught:
        opened(path, strict=True)
    assert caught.value.exit_code == 3


def test_strict_names_the_fields_that_differ_from_the_nearest_table(tmp_path: Path) -> None:
    path = written(tmp_path / "t.tsv", table_of(TIMES))

    with pytest.raises(NoTunedData) as caught:
        opened(path, gpu="NVIDIA H200", heads=64, strict=True)

    assert str(caught.value) == (
        "nothing is tuned for deepseek-v3.2 with 64 local heads and KV layout fp8_packed on "
        f"'NVIDIA H200'; the nearest table, {path}, differs in gpu ('Test GPU' there), heads "
        "('128' there); measure with `nsa-tune run`"
    )


def test_a_table_that_cannot_be_compiled_gives_way_to_the_next(tmp_path: Path) -> None:
    written(tmp_path / "shipped" / "good.tsv", table_of(TIMES, measured_at="2025-01-01T00:00:00Z"))
    bad = tmp_path / "shipped" / "newer.tsv"
    _bad_batch(bad)
    bad.write_text(bad.read_text().replace("2025-01-01", "2025-09-01"))

    assert opened().source.startswith("shipped:good")
