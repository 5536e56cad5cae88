"""What every test gets: no settings of the person who runs it, and a home of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from nsa_tune.db import places
from nsa_tune.db.exchange import import_text, write_text
from nsa_tune.db.store import Store
from tests.reports.browsing import ARGUMENTS, BROWSER
from tests.reports.synthetic import real_table
from tests.shell import Shell

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Triton reads this when it is first imported: without a GPU its kernels run interpreted.
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

# No deadline: how long an example takes says more about the machine than about the code.
settings.register_profile("nsa-tune", deadline=None, max_examples=60)
settings.load_profile("nsa-tune")


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directories that are not there yet. `mktemp` lists all those before it, at each test."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, homes: Iterator[Path]) -> Path:
    """Scrub NSA_TUNE_*, XDG_* and proxies, and point HOME to an empty directory, which is
    returned."""
    for name in list(os.environ):
        if name.startswith(("NSA_TUNE_", "XDG_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    home = next(homes)
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Shell:
    """Runs commands where no table ships."""
    monkeypatch.setattr(places, "shipped", list)
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "nowhere"))
    return Shell(capsys)


@pytest.fixture(scope="session")
def _measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    path, text = folder / "some.db", folder / "some.tsv"
    with Store.open(path) as store:
        for heads in (128, 16):
            write_text(real_table(heads=heads), text)
            import_text(store, text)
    return path


@pytest.fixture
def database(_measured: Path, tmp_path: Path) -> Path:
    """A database with the made-up H100's tables of two head counts, this test's own."""
    return Path(shutil.copy(_measured, tmp_path))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, headless; tests that want it are skipped where there is none.

    Of one module: while it is open, no test of this process can run an event loop of its own.
    """
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield browser
        browser.close()
