"""The runtime path loads the standard library only, and no more of the package than it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.text_table import format_table
from tests.backend.fake_point import DEVICE, KEY

_HEAVY = ("torch", "triton", "numpy", "pandas", "typer", "rich", "platformdirs")

_IMPORT = "import nsa_tune"
_IMPORT_ALL = "from nsa_tune import *"
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
_REGISTER = """
from nsa_tune.engines.{engine} import register
register()
assert len(sys.meta_path) > 5, "nothing is hooked"
"""
_LOADERS = "import importlib.metadata, logging, sys"
"""What a process has that loads entry points, and logs what comes of it."""
_LIST = "\nimport sys\nprint(*sys.modules)\n"
_MOST_MODULES = 30


def _modules(code: str, home: Path) -> set[str]:
    """The modules that a fresh interpreter has after `code`."""
    result = subprocess.run(
        [sys.executable, "-c", code + _LIST],
        env={
            **os.environ,
            "PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{home}",
            "HOME": str(home),
            "XDG_DATA_HOME": str(home / "data"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def _packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def _install(engine: str, version: str, folder: Path) -> None:
    """Make `folder` say that the engine is installed there."""
    info = folder / f"{engine}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")


def test_importing_the_package_loads_few_modules(tmp_path: Path) -> None:
    loaded = _modules(_IMPORT, tmp_path) - _modules("pass", tmp_path)

    assert len(loaded) < _MOST_MODULES, sorted(loaded)


@pytest.mark.parametrize(("engine", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_registering_a_plugin_loads_few_modules(engine: str, version: str, tmp_path: Path) -> None:
    _install(engine, version, tmp_path)

    loaded = _modules(_LOADERS + _REGISTER.format(engine=engine), tmp_path)
    loaded -= _modules(_LOADERS, tmp_path)

    assert len(loaded) < _MOST_MODULES, sorted(loaded)


def test_the_package_imports_the_standard_library_only(tmp_path: Path) -> None:
    before = _packages(_modules("pass", tmp_path))
    after = _packages(_modules(_IMPORT_ALL, tmp_path))

    assert after - before - set(sys.stdlib_module_names) == {"nsa_tune"}


@pytest.mark.parametrize("name", _HEAVY)
def test_opening_planning_and_explaining_load_nothing_heavy(name: str, tmp_path: Path) -> None:
    assert name not in _after_planning(tmp_path)


_MODULES: dict[str, set[str]] = {}


def _after_planning(home: Path) -> set[str]:
    if "plan" not in _MODULES:
        path = home / "t.tsv"
        path.write_text(format_table(_table()))
        _MODULES["plan"] = _packages(_modules(_PLAN.format(db=str(path)), home))
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
