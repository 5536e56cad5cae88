"""Which table fits this machine, and how a miss explains itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nsa_tune.backend.dispatch.matching import Here, differing, in_order, nothing_for
from nsa_tune.backend.hardware import detect, nvml
from nsa_tune.backend.types.records import Table
from nsa_tune.db import places
from nsa_tune.db.reader import Wanted
from nsa_tune.db.text_table import format_table
from tests.backend.fake_point import KEY, linear, table_of

_TIMES = {"mla/wide": linear(1, 1, 1)}
_HERE = Here("1.0", (("torch", "2.0"),))


def _table(name: str, driver: str = "1.0", torch: str = "2.0") -> Table:
    key = replace(KEY, driver=driver, libraries=(("torch", torch),))
    return replace(table_of(_TIMES, key), source=name)


def test_here_is_a_machine_with_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "gpu_names", lambda: ("Test GPU", "Other GPU"))
    monkeypatch.setattr(detect, "driver_version", lambda: "7.0")
    monkeypatch.setattr(detect, "library_versions", lambda: (("torch", "2.9"),))

    assert Here.of("Other GPU") == Here("7.0", (("torch", "2.9"),))
    assert Here.of("Third GPU") is None
    # A processor has no driver of NVIDIA's, whatever sits beside it.
    assert Here.of(detect.cpu_name()) == Here("", (("torch", "2.9"),))


def test_elsewhere_nothing_differs() -> None:
    assert differing(_table("newest", driver="2.0"), None) == []


def test_differences_name_both_sides() -> None:
    here = Here("1.0", (("torch", "2.1"), ("triton", "3.0")))

    assert differing(_table("x"), here) == [
        "torch: measured with 2.0, here 2.1",
        "triton: measured with absent, here 3.0",
    ]


def test_an_optional_library_matters_only_to_a_table_that_was_measured_with_it() -> None:
    engine = (("sglang", "0.5.17"), ("tilelang", "0.1.11"), ("torch", "2.0"))
    without, table = _table("x"), _table("y")
    measured = replace(table, key=replace(table.key, libraries=engine))

    assert differing(without, Here("1.0", engine)) == []
    assert differing(measured, Here("1.0", engine)) == []
    assert differing(measured, _HERE) == [
        "sglang: measured with 0.5.17, here absent",
        "tilelang: measured with 0.1.11, here absent",
    ]
    assert differing(measured, Here("1.0", (*engine[:1], ("tilelang", "0.1.12"), engine[2]))) == [
        "tilelang: measured with 0.1.11, here 0.1.12"
    ]


@pytest.fixture
def no_other_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NSA_TUNE_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "site"))
    monkeypatch.setattr(places, "_SHIPPED", tmp_path / "shipped")


@pytest.mark.usefixtures("no_other_tables")
@pytest.mark.parametrize(
    ("here", "order"), [(_HERE, ["exact", "new", "newer"]), (None, ["new", "newer", "exact"])]
)
def test_tables_of_this_driver_and_these_libraries_come_before_newer_ones(
    here: Here | None, order: list[str], tmp_path: Path
) -> None:
    (tmp_path / "shipped").mkdir()
    tables = {"exact": _table(""), "newer": _table("", torch="1.9"), "new": _table("", driver="2")}
    for year, (name, table) in enumerate(tables.items(), 2025):
        dated = replace(table, measured_at=f"{year}-01-01T00:00:00Z")
        (tmp_path / "shipped" / f"{name}.tsv").write_text(format_table(dated))

    found = in_order(None, Wanted(KEY.gpu, KEY.model, KEY.heads, KEY.kv_layout), here)

    assert [stored.head.source for stored in found] == [f"shipped:{name}" for name in order]


@pytest.mark.usefixtures("no_other_tables")
def test_a_miss_without_any_table_says_what_to_do() -> None:
    text = nothing_for(None, Wanted("Test GPU", "glm-5", 64, "bf16"))

    assert text == (
        "nothing is tuned for glm-5 with 64 local heads and KV layout bf16 on 'Test GPU', nor is "
        "there a table for anything else; measure with `nsa-tune run`"
    )


@pytest.mark.usefixtures("no_other_tables")
def test_a_miss_names_the_fields_of_the_nearest_table(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    for name, heads, layout in (("near", 16, "fp8_packed"), ("far", 16, "bf16")):
        key = replace(KEY, heads=heads, kv_layout=layout)
        (shipped / f"{name}.tsv").write_text(format_table(table_of(_TIMES, key)))
    (shipped / "broken.tsv").write_text("nonsense")

    text = nothing_for(None, Wanted("Test GPU", "deepseek-v3.2", 64, "fp8_packed"))

    assert "shipped:near, differs in heads ('16' there); measure with" in text


@pytest.mark.usefixtures("no_other_tables")
def test_a_key_under_which_nothing_succeeded_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "failed.tsv"
    path.write_text(format_table(table_of(_TIMES)))

    text = nothing_for(path, Wanted(KEY.gpu, KEY.model, KEY.heads, KEY.kv_layout))

    assert f"in {path} no measurement succeeded" in text
