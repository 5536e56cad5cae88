"""A machine of tests: the made-up GPU, the made-up point, and no table but what a test writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_tune import Dispatcher
from nsa_tune.backend.dispatch import opening
from nsa_tune.backend.hardware import detect, nvml
from nsa_tune.backend.types.records import Table
from nsa_tune.db import places
from nsa_tune.db.text_table import format_table
from tests.backend.fake_point import DEVICE, FAKE, Times, linear

if TYPE_CHECKING:
    import pytest

TIMES: Times = {
    "mha/dense": linear(0.1, 0.2, 5),
    "mla/wide": linear(0.4, 0.01, 12),
    "mla/packed": linear(0.5, 0, 18),
}
SLOW_DENSE: Times = {**TIMES, "mha/dense": linear(5, 5, 500)}
"""With these MLA wins everywhere."""


def set_up(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Make this process believe that it runs on that machine."""
    for name in ("DB", "DISABLE", "FORCE", "ASSERT_HIT", "DEMOTE_FAILED", "LOG"):
        monkeypatch.delenv(f"NSA_TUNE_{name}", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(home / "site"))
    monkeypatch.setattr(places, "_SHIPPED", home / "shipped")
    monkeypatch.setattr(nvml, "gpu_names", lambda: ("Test GPU",))
    monkeypatch.setitem(detect.KNOWN, "Test GPU", DEVICE)
    monkeypatch.setattr(detect, "driver_version", lambda: "1.0")
    monkeypatch.setattr(detect, "library_versions", lambda: (("torch", "2.0"),))
    monkeypatch.setattr(opening, "POINTS", {FAKE.name: FAKE})


def written(path: Path, table: Table) -> Path:
    """`path` with `table` as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_table(table))
    return path


def opened(db: Path | None = None, **changes: Any) -> Dispatcher:
    """The dispatcher of the made-up GPU."""
    asked: dict[str, Any] = {
        "gpu": "Test GPU", "model": "deepseek-v3.2", "heads": 128, "kv_dtype": "fp8"
    }  # fmt: skip
    return Dispatcher.open(db, **{**asked, **changes})
