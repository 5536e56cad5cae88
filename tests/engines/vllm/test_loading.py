"""vLLM's own plug-in loader, from the wheel, with the entry point, in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nsa_tune.engines.vllm.releases import RELEASES
from tests.engines.vllm.site import Site
from tests.engines.wheels import Wheel

MODULE = "vllm.v1.attention.backends.mla.flashmla_sparse"
_LOAD = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
from vllm import plugins
{before}
plugins.load_general_plugins()
{between}
from nsa_tune.engines.symbols import hooks_on
from nsa_tune.engines.vllm.releases import RELEASES
from importlib import import_module
from pkgutil import resolve_name
symbols = RELEASES[-1].symbols
early = [one.module for one in symbols if one.module in sys.modules]
def hooks(one):
    import_module(one.module)
    return hooks_on(resolve_name(one.target))
found = {{one.name: hooks(one) for one in symbols}}
heavy = [name for name in ("torch", "numpy", "pandas") if name in sys.modules]
print(json.dumps({{"hooks": found, "early": early, "heavy": heavy}}))
"""
_TWICE = "plugins.plugins_loaded = False\nplugins.load_general_plugins()"
_ALL = {symbol.name: 1 for symbol in RELEASES[-1].symbols}
_NONE = dict.fromkeys(_ALL, 0)


@pytest.fixture
def site(newest: Wheel, tmp_path: Path) -> Site:
    """The loader is the same in every release."""
    return Site(tmp_path / "site", newest)


def _loaded(site: Site, before: str = "", between: str = "", **variables: str) -> tuple[Any, str]:
    return site.printed(_LOAD.format(before=before, between=between), **variables)


def test_each_method_is_hooked_once_when_the_engine_imports_it(
    wheel: Wheel, tmp_path: Path
) -> None:
    found, _ = _loaded(Site(tmp_path / "site", wheel))

    assert found == {"hooks": _ALL, "early": [], "heavy": []}


@pytest.mark.parametrize(
    ("before", "between"),
    [
        ("", _TWICE),
        (f"import {MODULE}", ""),
        (f"import {MODULE}", _TWICE),
        ("", "from nsa_tune.engines.vllm import register\nregister()"),
    ],
    ids=["loaded twice", "imported before", "imported before, loaded twice", "called again"],
)
def test_it_is_hooked_once_however_often_it_is_loaded(
    site: Site, before: str, between: str
) -> None:
    assert _loaded(site, before, between)[0]["hooks"] == _ALL


def test_the_allow_list_leaves_it_out(site: Site) -> None:
    assert _loaded(site, VLLM_PLUGINS="other")[0]["hooks"] == _NONE
    assert _loaded(site, VLLM_PLUGINS="other,nsa_tune")[0]["hooks"] == _ALL


def test_the_off_switch_leaves_everything_alone(site: Site) -> None:
    found, log = _loaded(site, NSA_TUNE_DISABLE="1")

    assert found["hooks"] == _NONE
    assert log.count("vLLM is left alone") == 1


@pytest.mark.parametrize("version", ["0.30.0", "0.34.0", "1.0.0"])
def test_an_unknown_release_is_left_alone_with_one_line(
    newest: Wheel, tmp_path: Path, version: str
) -> None:
    found, log = _loaded(Site(tmp_path / "site", newest, version=version))

    assert found["hooks"] == _NONE
    assert (
        log.count(f"vLLM {version} is left alone: the plug-in was checked with 0.31 to 0.33") == 1
    )


def test_a_method_of_another_signature_is_left_alone_and_named(site: Site) -> None:
    path = site.folder / f"{MODULE.replace('.', '/')}.py"
    site.module(MODULE, path.read_text().replace("fast_build=False", "quickly=False"))
    found, log = _loaded(site)

    assert found["hooks"] == {**_ALL, "flashmla_build": 0}
    assert "FlashMLASparseMetadataBuilder.build takes (self, common_prefix_len" in log


def test_a_fault_of_the_plug_in_does_not_reach_the_engine(site: Site) -> None:
    """vLLM calls it without a guard of its own."""
    broken = (
        "import nsa_tune.engines.plugin as i\n"
        "def broken(*a): raise RuntimeError('made up')\n"
        "i.when_imported = broken"
    )
    found, log = _loaded(site, before=broken)

    assert found["hooks"] == _NONE
    assert "installing the plug-in failed, so vLLM decides by itself: RuntimeError" in log


def test_a_module_that_cannot_be_imported_raises_as_it_would_without(site: Site) -> None:
    site.module(MODULE, "raise ImportError('no kernels here')")
    done = site.run(_LOAD.format(before="", between=""))

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: no kernels here"
