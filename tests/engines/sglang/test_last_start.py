"""The line that one start keeps for the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa_tune.engines.sglang import last_start


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "nsa-tune"


def test_a_line_is_found_again_and_replaced(folder: Path) -> None:
    assert last_start.kept("topk") is None

    assert last_start.keep("topk", "first") and last_start.keep("topk", "second")

    assert str(last_start.kept("topk")).endswith(": second")
    assert last_start.kept("decode") is None
    assert [path.name for path in folder.iterdir()] == ["topk-last-start.txt"]


@pytest.mark.parametrize("content", [b"two\nlines", b"\x1b[31mred", b"\xff\xfe", b"x" * 1001])
def test_what_is_no_line_is_not_shown(folder: Path, content: bytes) -> None:
    assert last_start.keep("topk", "fine")
    (folder / "topk-last-start.txt").write_bytes(content)

    assert last_start.kept("topk") is None


@pytest.mark.parametrize("name", ["", "topk-last-start.txt/in the way"])
def test_what_cannot_be_written_is_no_failure(folder: Path, name: str) -> None:
    """A file where the folder was to be, or a folder where the file was."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("in the way")

    assert not last_start.keep("topk", "anything")
    assert last_start.kept("topk") is None
