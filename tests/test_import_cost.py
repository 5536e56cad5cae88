"""The runtime path loads the standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.text_table import format_table
from tests.backend.fake_point import DEVICE, KEY

_HEAVY = ("torch", "triton", "numpy", "pandas", "sqlite_utils", "typer", "rich", "platformdirs")

_IMPORT = "import nsa_tune"
_PLAN = """
from nsa_tune import Batch, Dispatcher
d = Dispatcher.open({db!r}, gpu="Test GPU", model="deepseek-v3.2", heads=128, kv_dtype="fp8")
assert d.table is not None
plan = d.plan(Batch.extend([1920], [128]))
assert plan.prefill_path == "mla", plan
assert d.captured(8, next_n=2).batch.captured
assert "prefill_path" in d.explain(Batch.extend([1920], [128]))
dict(plan.reasons)
"""
_LIST = "\nimport sys\nprint(*sys.modules)\n"


def _modules(code: str, home: Path) -> set[str]:
    """The top-level names of the modules that a fresh interpreter has after `code`."""
    result = subprocess.run(
        [sys.executable, "-c", code + _LIST],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "HOME": str(home),
            "XDG_DATA_HOME": str(home / "data"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in result.stdout.split()}


def test_the_package_imports_the_standard_library_only(tmp_path: Path) -> None:
    before, after = _modules("pass", tmp_path), _modules(_IMPORT, tmp_path)

    assert after - before - set(sys.stdlib_module_names) == {"nsa_tune"}


@pytest.mark.parametrize("name", _HEAVY)
def test_opening_planning_and_explaining_load_nothing_heavy(name: str, tmp_path: Path) -> None:
    assert name not in _after_planning(tmp_path)


_MODULES: dict[str, set[str]] = {}


def _after_planning(home: Path) -> set[str]:
    if "plan" not in _MODULES:
        path = home / "t.tsv"
        path.write_text(format_table(_table()))
        _MODULES["plan"] = _modules(_PLAN.format(db=str(path)), home)
        assert "nsa_tune" in _MODULES["plan"]
    return _MODULES["plan"]


def _table() -> Table:
    """MLA twice as fast as MHA, whatever the batch."""
    rows = [
        Measurement("prefill", f"extend:{prefix}+{new}", arm, Status.OK, us, us, us, samples=9)
        for prefix in (64, 512, 1920)
        for new in (1, 16, 128)
        for arm, us in (("mha/fa3", 20.0), ("mla/flashmla_sparse", 10.0))
    ]
    return Table(KEY, DEVICE, tuple(rows), "made up", "2025-01-01T00:00:00Z")
