"""Waiting for a module to be imported by somebody else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_tune.engines.post_import import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that nobody has imported."""
    (tmp_path / "nsa_tune_waits.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "nsa_tune_waits"
    sys.modules.pop("nsa_tune_waits", None)
    sys.meta_path[:] = finders


def test_nothing_is_imported_for_it(module: str) -> None:
    when_imported(module, lambda: pytest.fail("called too early"))

    assert module not in sys.modules


def test_it_is_called_once_when_the_module_is_complete(module: str) -> None:
    seen: list[int] = []
    when_imported(module, lambda: seen.append(sys.modules[module].VALUE))
    for _ in range(2):
        importlib.import_module(module)

    assert seen == [1]


def test_a_module_that_is_there_is_not_waited_for(module: str) -> None:
    importlib.import_module(module)
    seen: list[bool] = []
    when_imported(module, lambda: seen.append(True))

    assert seen == [True]


def test_two_may_wait_for_one_module(module: str) -> None:
    seen: list[str] = []
    for name in ("a", "b"):
        when_imported(module, lambda name=name: seen.append(name))  # type: ignore[misc]
    importlib.import_module(module)

    assert sorted(seen) == ["a", "b"]


def test_the_module_keeps_its_own_loader_and_no_finder_stays(module: str) -> None:
    before = list(sys.meta_path)
    when_imported(module, lambda: None)
    imported = importlib.import_module(module)

    assert sys.meta_path == before
    assert imported.__spec__ is not None
    assert imported.__spec__.loader is imported.__loader__
    assert type(imported.__loader__).__name__ == "SourceFileLoader"


def test_a_module_that_fails_fails_as_before(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("raise LookupError('broken')\n")
    when_imported(module, lambda: pytest.fail("it was not imported"))

    with pytest.raises(LookupError, match="broken"):
        importlib.import_module(module)


def test_a_module_that_is_not_there_is_missing_as_before(module: str) -> None:
    when_imported(f"{module}_not", lambda: pytest.fail("it was not imported"))

    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{module}_not")


def test_a_finder_of_old_is_passed_over(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    when_imported(module, lambda: seen.append(1))
    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], object(), *sys.meta_path[1:]])

    importlib.import_module(module)

    assert seen == [1]
