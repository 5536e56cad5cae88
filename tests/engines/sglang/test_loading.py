"""SGLang's own plug-in loader, from the wheel, with the entry point, in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.site import Site
from tests.engines.sglang.wheels import Wheel

MODULE = "sglang.srt.layers.attention.dsa_backend"
CLASS = f"{MODULE}.DeepseekSparseAttnBackend"
_LOAD = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
from sglang.srt import plugins
{before}
plugins.load_plugins()
{between}
early = "sglang.srt.layers.attention.dsa_backend" in sys.modules
from nsa_tune.engines.symbols import hooks_on
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend as Backend
names = ("__init__", "set_dsa_prefill_impl", "_build_paged_mqa_schedule_2d_ctx_lens")
heavy = [name for name in ("torch", "numpy", "pandas") if name in sys.modules]
print(json.dumps({{
    "hooks": [hooks_on(getattr(Backend, name)) for name in names], "early": early, "heavy": heavy,
}}))
"""
_TWICE = "plugins._plugins_loaded = False\nplugins.load_plugins()"


@pytest.fixture
def site(oldest: Wheel, tmp_path: Path) -> Site:
    """The loader and the registry are the same in every release."""
    return Site(tmp_path / "site", oldest)


def _loaded(site: Site, before: str = "", between: str = "", **variables: str) -> tuple[Any, str]:
    return site.printed(_LOAD.format(before=before, between=between), **variables)


def test_each_method_is_hooked_once_when_the_engine_imports_it(
    wheel: Wheel, tmp_path: Path
) -> None:
    found, log = _loaded(Site(tmp_path / "site", wheel))

    assert found == {"hooks": [1, 1, 1], "early": False, "heavy": []}
    assert "Executed general plugin: nsa_tune" in log


@pytest.mark.parametrize(
    ("before", "between"),
    [
        ("", _TWICE),
        ("import sglang.srt.layers.attention.dsa_backend", ""),
        ("import sglang.srt.layers.attention.dsa_backend", _TWICE),
        ("", "from nsa_tune.engines.sglang import register\nregister()"),
    ],
    ids=["loaded twice", "imported before", "imported before, loaded twice", "called again"],
)
def test_it_is_hooked_once_however_often_it_is_loaded(
    site: Site, before: str, between: str
) -> None:
    assert _loaded(site, before, between)[0]["hooks"] == [1, 1, 1]


_OTHER = """
import builtins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
builtins.others = []
def hook(original, *arguments, **keywords):
    others.append("{method}")
    return original(*arguments, **keywords)
HookRegistry.register("{target}", hook, HookType.AROUND)
"""
_CALL = """
from sglang.srt import plugins
plugins.load_plugins()
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend as Backend
from nsa_tune.engines.symbols import hooks_on
names = ("__init__", "set_dsa_prefill_impl", "_build_paged_mqa_schedule_2d_ctx_lens")
backend = object.__new__(Backend)
backend.set_dsa_prefill_impl(None)
backend._build_paged_mqa_schedule_2d_ctx_lens(1, 2, 3, 4)
import json
print(json.dumps([others, [hooks_on(getattr(Backend, name)) for name in names]]))
"""


@pytest.mark.parametrize(
    "method", ["set_dsa_prefill_impl", "_build_paged_mqa_schedule_2d_ctx_lens"]
)
@pytest.mark.parametrize("name", ["another", "zanother"])
def test_hooks_of_another_plug_in_run_once_and_so_do_these(
    wheel: Wheel, method: str, name: str, tmp_path: Path
) -> None:
    """Its hook makes SGLang's registry import the backend while it applies hooks."""
    site = Site(tmp_path / "site", wheel)
    site.plugin(name, _OTHER.format(method=method, target=f"{CLASS}.{method}"))
    done = site.run(_CALL)
    assert done.returncode == 0, done.stderr

    assert json.loads(done.stdout.splitlines()[-1]) == [[method], [1, 1, 1]]


def test_the_allow_list_leaves_it_out(site: Site) -> None:
    assert _loaded(site, SGLANG_PLUGINS="other")[0]["hooks"] == [0, 0, 0]
    assert _loaded(site, SGLANG_PLUGINS="other,nsa_tune")[0]["hooks"] == [1, 1, 1]


@pytest.mark.parametrize(("value", "hooks"), [("1", 0), ("true", 0), ("0", 1), ("", 1)])
def test_the_off_switch_leaves_everything_alone(site: Site, value: str, hooks: int) -> None:
    found, log = _loaded(site, NSA_TUNE_DISABLE=value)

    assert found["hooks"] == [hooks] * 3
    assert ("SGLang is left alone" in log) == (not hooks)


def test_an_unknown_release_is_left_alone_with_one_line(oldest: Wheel, tmp_path: Path) -> None:
    site = Site(tmp_path / "site", oldest, version="0.5.16")
    found, log = _loaded(site)

    assert found["hooks"] == [0, 0, 0]
    assert log.count("SGLang 0.5.16 is left alone: the plug-in was checked with 0.5.17") == 1


def test_a_release_that_is_newer_than_known_is_hooked_if_it_has_all_that_is(
    newest: Wheel, tmp_path: Path
) -> None:
    site = Site(tmp_path / "site", newest, version="0.9.0")

    assert _loaded(site)[0]["hooks"] == [1, 1, 1]


def test_a_newer_release_without_one_of_the_methods_has_no_hook_at_all(
    newest: Wheel, tmp_path: Path
) -> None:
    site = Site(tmp_path / "site", newest, version="0.9.0")
    where = "sglang/srt/model_executor/runner_backend/breakable_cuda_graph_backend.py"
    site.write(where, "class BreakableCudaGraphBackend:\n    def replay(self, key): pass\n")
    outcome, log = _loaded(site)

    assert outcome["hooks"] == [0, 0, 0]
    assert "SGLang 0.9.0 is left alone" in log


def test_a_method_of_another_signature_is_left_alone_and_named(site: Site) -> None:
    path = site.folder / "sglang/srt/layers/attention/dsa_backend.py"
    site.backend(path.read_text().replace("forward_batch=None", "forward_batch, when"))
    found, log = _loaded(site)

    assert found["hooks"] == [1, 0, 1]
    assert "set_dsa_prefill_impl takes (self, forward_batch, when)" in log


def test_a_method_that_has_gone_is_named(site: Site) -> None:
    path = site.folder / "sglang/srt/layers/attention/dsa_backend.py"
    site.backend(path.read_text().replace("_build_paged", "_make_paged"))
    late = "DeepseekSparseAttnBackend._build_paged_mqa_schedule_2d_ctx_lens = None"
    done = site.run(_LOAD.format(before="", between=f"from {MODULE} import *\n{late}"))
    found = json.loads(done.stdout.splitlines()[-1])

    assert found["hooks"] == [1, 1, 0]
    assert f"not hooked: {MODULE}.{late.partition(' ')[0]} is not there" in done.stderr


def test_a_fault_of_the_plug_in_does_not_reach_the_engine(site: Site) -> None:
    """Its own loader would swallow it: here it does not even see one."""
    broken = (
        "import nsa_tune.engines.plugin as i\n"
        "def broken(*a): raise RuntimeError('made up')\n"
        "i.when_imported = broken"
    )
    found, log = _loaded(site, before=broken)

    assert found["hooks"] == [0, 0, 0]
    assert "installing the plug-in failed, so SGLang decides by itself: RuntimeError" in log
    assert "Failed to execute general plugin" not in log


def test_a_backend_that_cannot_be_imported_raises_as_it_would_without(site: Site) -> None:
    site.backend("raise ImportError('no deep_gemm here')")
    done = site.run(_LOAD.format(before="", between=""))

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: no deep_gemm here"
