"""Pass times that are kept from one start of an engine to the next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from nsa_tune.engines.sglang.health import summary
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes

KEY: Mapping[str, object] = {"gpu": "made up", "layers": None, "decode_sizes": [1, 2]}
TIMES = PassTimes(KEY, [PassTime(PassMode.ENGINE, 8, 4, 10.0)])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    found = remembered.folder()
    assert found is not None
    assert found.is_relative_to(tmp_path)
    return found


def _file(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def _path(key: Mapping[str, object]) -> Path:
    found = remembered._path(key)
    assert found is not None
    return found


def test_nothing_is_remembered_at_first() -> None:
    assert remembered.load(KEY) is None
    assert list(remembered.remembered()) == []


def test_what_was_saved_is_loaded(folder: Path) -> None:
    assert remembered.save(TIMES)
    again = remembered.load(KEY)

    assert again is not None and (again.key, again.times) == (TIMES.key, TIMES.times)
    assert [one.key for one in remembered.remembered()] == [TIMES.key]
    assert _file(folder).suffix == ".json"  # and no half-written part beside it


def test_saving_again_replaces(folder: Path) -> None:
    remembered.save(TIMES)
    remembered.save(PassTimes(KEY, [PassTime(PassMode.ENGINE, 8, 4, 20.0)]))

    again = remembered.load(KEY)
    assert again is not None and again.pass_us(PassMode.ENGINE, 8, 4) == pytest.approx(20.0)
    assert _file(folder)


@pytest.mark.parametrize("changes", [{"gpu": "other"}, {"layers": 61}, {"more": 1}])
def test_another_key_has_none(changes: dict[str, object]) -> None:
    remembered.save(TIMES)

    assert remembered.load({**KEY, **changes}) is None


def test_a_file_under_another_keys_name_is_not_believed(folder: Path) -> None:
    remembered.save(TIMES)
    _file(folder).rename(_path({**KEY, "gpu": "other"}))

    assert remembered.load({**KEY, "gpu": "other"}) is None


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\xff\xfe\x00", b"[]", b"[" * 100_000, TIMES.as_text().encode()[:-5], b"1e999",
        TIMES.as_text().replace('"q_tokens": 8', '"q_tokens": 1e999').encode(),
    ],
)  # fmt: skip
def test_a_corrupt_file_is_as_none(folder: Path, data: bytes) -> None:
    remembered.save(TIMES)
    _file(folder).write_bytes(data)

    assert remembered.load(KEY) is None
    assert list(remembered.remembered()) == []


def test_a_huge_file_is_not_read(folder: Path) -> None:
    remembered.save(TIMES)
    text = TIMES.as_text()
    _file(folder).write_text(text + " " * (remembered._MOST_BYTES - len(text)))
    assert remembered.load(KEY) is not None

    _file(folder).write_text(text + " " * (remembered._MOST_BYTES - len(text) + 1))
    assert remembered.load(KEY) is None


def test_what_is_no_file_is_not_read(folder: Path) -> None:
    _path(KEY).mkdir(parents=True)

    assert remembered.load(KEY) is None
    assert list(remembered.remembered()) == []
    assert not remembered.save(TIMES)


def test_a_folder_that_cannot_be_written_keeps_nothing_and_why_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")

    assert not remembered.save(TIMES) and f"not kept in {folder}: File exists" in caplog.text
    assert remembered.load(KEY) is None
    assert list(remembered.remembered()) == []


def test_a_key_that_says_little_is_summed_up_too() -> None:
    line = summary(TIMES)

    assert line.startswith("made up, SGLang unknown, ")
    assert "1 times; 256 new tokens behind 16384 take an unmeasured time" in line


def test_memory_beside_the_engines_own_is_summed_up() -> None:
    memory_mib = {"dense graphs": 126, "peak of a measured pass": 900}

    assert "memory" not in summary(TIMES)
    line = summary(PassTimes(KEY, TIMES.times, None, memory_mib))
    assert line.endswith("; memory: dense graphs 126 MiB, peak of a measured pass 900 MiB")


def test_times_with_other_kernels_are_kept_beside_them(folder: Path) -> None:
    for number, kernel in enumerate(("", "fa3", "flashmla_sparse", "fa3")):
        kernels = {"8/4/0/0": kernel} if kernel else {}
        assert remembered.save(PassTimes(KEY, TIMES.times, "a table", kernels=kernels))
        os.utime(max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns), ns=(0, number))

    assert [one.kernels for one in remembered.remembered()].count({"8/4/0/0": "fa3"}) == 1
    assert len(list(remembered.remembered())) == 3
    found = remembered.load(KEY)
    assert found is not None and found.kernels == {"8/4/0/0": "fa3"}


def test_the_newest_is_the_one_that_was_written_last() -> None:
    other = PassTimes({**KEY, "layers": 61}, TIMES.times)
    for number, times in enumerate((other, TIMES)):
        remembered.save(times)
        os.utime(_path(times.key), ns=(number, number))

    found = remembered.newest(lambda key: key["gpu"] == "made up")

    assert found is not None and (found[0], found[1].key) == (_path(KEY), TIMES.key)
    fitting = remembered.newest(lambda key: key["layers"] == 61)
    assert fitting is not None and fitting[1].key == other.key
    assert remembered.newest(lambda key: False) is None


def test_what_ships_counts_where_this_machine_has_measured_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no outcome of a start here: it is neither loaded nor shown."""
    monkeypatch.setattr(remembered, "SHIPPED", tmp_path / "shipped")
    assert remembered.save(TIMES)
    folder.rename(remembered.SHIPPED)

    assert remembered.load(KEY) is None
    assert list(remembered.remembered()) == []
    shipped = remembered.newest(lambda key: key == KEY)
    assert shipped is not None and shipped[0].parent == remembered.SHIPPED
    assert remembered.save(TIMES)
    measured = remembered.newest(lambda key: key == KEY)
    assert measured is not None and measured[0].parent == folder
