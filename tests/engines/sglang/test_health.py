"""The doctor's view of the plug-in, in environments that are right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa_tune.engines.sglang import last_start
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.releases import RELEASES, checked
from tests.engines.sglang.site import Site
from tests.engines.sglang.tables import GPU, table_file
from tests.engines.sglang.wheels import Wheel
from tests.engines.site import wrong


@pytest.fixture
def site(oldest: Wheel, tmp_path: Path) -> Site:
    return Site(tmp_path / "site", oldest)


def test_all_is_well_where_everything_is(wheel: Wheel, tmp_path: Path) -> None:
    site = Site(tmp_path / "site", wheel)
    found = site.health(NSA_TUNE_DB=str(table_file(tmp_path)), GPU=GPU)

    assert wrong(found) == set()
    assert found["sglang"][1].startswith(f"SGLang {wheel.version}; ")
    assert "deepseek-v3.2 with 128 local heads" in found["table"][1]
    assert found["hook on prefill"][1].endswith("set_dsa_prefill_impl is hooked")
    names = {
        f"{what} {one.name}" for one in wheel.release.symbols for what in ("source of", "hook on")
    }
    assert {name for name in found if name.startswith(("source of", "hook on"))} == names


@pytest.mark.parametrize(
    ("what", "name", "switch"),
    [
        ("topk", "topk", "NSA_TUNE_TOPK"),
        ("decode", "decode", "NSA_TUNE_DECODE"),
        ("padding", "padding", "NSA_TUNE_COPIES"),
    ],
)
def test_it_is_said_whose_kernels_run(
    newest: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, name: str,
    switch: str,
) -> None:  # fmt: skip
    site = Site(tmp_path / "site", newest)

    assert site.health()[name][1].startswith("nothing is known yet")
    monkeypatch.setenv("XDG_DATA_HOME", str(site.folder / "data"))
    assert last_start.keep(what, "it was faster")
    assert site.health()[name][1].endswith(": it was faster")
    off = site.health(**{switch: "0"})[name]
    assert off == (True, f"{switch} is set to 0: SGLang's kernel runs")


def test_remembered_pass_times_are_shown(
    newest: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept in the user's folder, which is the site's own here."""
    site = Site(tmp_path / "site", newest)
    nothing = site.health()
    assert "none are remembered yet" in nothing["pass times"][1]
    assert "has not started" in nothing["start"][1]
    monkeypatch.setenv("XDG_DATA_HOME", str(site.folder / "data"))
    key = {
        "gpu": GPU, "sglang": "0.5.23", "model": "deepseek-v3.2", "layers": 61, "heads": 16,
        "kv_dtype": "bf16",
    }  # fmt: skip
    took = [
        PassTime(PassMode.ENGINE, 256, 16513, 112_000.0, selects=True),
        PassTime(PassMode.DECODE_GRAPH, 256, 16513, 40_000.0),
    ]
    assert remembered.save(PassTimes(key, took))
    assert last_start.keep("start", "the plug-in took 3.5 s")

    assert site.health()["start"][1].endswith(": the plug-in took 3.5 s")
    assert site.health()["pass times"] == (
        True,
        f"{GPU}, SGLang 0.5.23, deepseek-v3.2, 61 layers, 16 local heads, bf16 KV: 2 times; 256 "
        "new tokens behind 16384 take 112.0 ms in SGLang's own graph and 40.0 ms by decode graphs",
    )


def test_a_replay_that_has_changed_is_named(newest: Wheel, tmp_path: Path) -> None:
    site = Site(tmp_path / "site", newest)
    where = "sglang/srt/model_executor/runner_backend/breakable_cuda_graph_backend.py"
    site.write(where, "class BreakableCudaGraphBackend:\n    def replay(self, key): pass\n")
    found = site.health(NSA_TUNE_DB=str(table_file(tmp_path)), GPU=GPU)

    assert wrong(found) == {"source of replay", "hook on replay"}
    assert "takes (self, key)" in found["hook on replay"][1]


def test_no_table_is_named(site: Site) -> None:
    found = site.health()

    assert wrong(found) == {"table"}
    assert found["table"][1] == "nothing is measured for 'No GPU': run `nsa-tune run`"


_HOOKS = {f"hook on {symbol.name}" for symbol in RELEASES[0].symbols}


def test_the_allow_list_is_named(site: Site) -> None:
    found = site.health(SGLANG_PLUGINS="other")

    assert wrong(found) == {"table", "allowed"} | _HOOKS
    assert found["allowed"][1] == "SGLANG_PLUGINS=other leaves nsa_tune out"


def test_the_off_switch_is_named(site: Site) -> None:
    assert wrong(site.health(NSA_TUNE_DISABLE="1")) == {"table", "switch"} | _HOOKS


def test_a_missing_entry_point_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real installation beside the tests would bring one."""
    site.without_entry_point()
    no_others = "import sys\nfrom importlib import metadata\n" + (
        "metadata.entry_points = lambda group: ()\n"
    )
    found = site.health(no_others)

    assert found["entry point"][0] is False
    assert "install nsa-tune where SGLang is installed" in found["entry point"][1]


def test_a_silent_failure_is_found(site: Site) -> None:
    """A method that does not let itself be replaced: the engine serves without the hook."""
    path = site.folder / "sglang/srt/layers/attention/dsa_backend.py"
    fixed = (
        "class Fixed(type):\n"
        "    def __setattr__(cls, name, value):\n"
        "        if 'prefill' in name:\n"
        "            raise ValueError('made up')\n"
        "        super().__setattr__(name, value)\n\n"
    )
    kind = "class DeepseekSparseAttnBackend"
    site.backend(fixed + path.read_text().replace(f"{kind}:", f"{kind}(metaclass=Fixed):"))
    found = site.health()

    assert wrong(found) == {"table", "hook on prefill"}
    assert "set_dsa_prefill_impl failed" in found["hook on prefill"][1]
    assert "ValueError: made up" in found["hook on prefill"][1]


def test_a_hook_under_another_plug_ins_replacement_is_found(site: Site) -> None:
    """SGLang puts the replacement over the hook, and nothing calls the hook any more."""
    site.plugin(
        "another",
        "from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        "def replacement(self, forward_batch=None): pass\n"
        "HookRegistry.register(\n"
        "    'sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend'\n"
        "    '.set_dsa_prefill_impl', replacement, HookType.REPLACE)\n",
    )
    found = site.health()

    assert wrong(found) == {"table", "hook on prefill"}


def test_an_engine_that_cannot_be_imported_is_named(site: Site) -> None:
    path = site.folder / "sglang/srt/layers/attention/dsa_backend.py"
    site.backend("import deep_gemm_is_not_here\n" + path.read_text())
    found = site.health()

    assert {"hook on backend", "hook on prefill", "hook on indexer"} <= wrong(found)
    assert "No module named 'deep_gemm_is_not_here'" in found["hook on backend"][1]


def test_an_engine_that_ends_the_process_is_named(site: Site) -> None:
    path = site.folder / "sglang/srt/layers/attention/dsa_backend.py"
    site.backend(path.read_text() + "\nimport os\nos._exit(7)\n")

    assert "ended with 7" in site.health()["hook on backend"][1]


def test_a_changed_signature_is_named(site: Site) -> None:
    path = site.folder / "sglang/srt/layers/attention/dsa_backend.py"
    site.backend(path.read_text().replace("forward_batch=None", "forward_batch, when"))
    found = site.health()

    assert wrong(found) == {"table", "source of prefill", "hook on prefill"}
    assert found["source of prefill"][1].endswith("(self, forward_batch, when)")
    assert "takes (self, forward_batch, when)" in found["hook on prefill"][1]


def test_the_working_directory_hides_no_module_and_the_import_path_goes_along(
    site: Site, tmp_path: Path
) -> None:
    """As from a console script: its own folder is on the path, not the working directory."""
    (tmp_path / "json.py").write_text("raise RuntimeError('not the one of Python')")
    elsewhere = f"""
import os, sys
sys.path.remove("")
del os.environ["PYTHONPATH"]
os.chdir({str(tmp_path)!r})
"""
    found = site.health(elsewhere)

    assert wrong(found) == {"table"}


def test_an_unknown_release_ends_the_examination(oldest: Wheel, tmp_path: Path) -> None:
    found = Site(tmp_path / "site", oldest, version="0.5.16").health()

    assert wrong(found) == {"table", "sglang"}
    assert found["sglang"][1] == f"SGLang 0.5.16; the plug-in was checked with {checked()}"


_DOCTOR = """
import os, sys
from nsa_tune.backend.hardware import detect
detect.local_device_name = lambda: os.environ["GPU"]
from nsa_tune import cli
cli.main(["doctor", "--engine", "sglang"])
"""


def test_the_doctor_of_the_command_line_finds_a_hook_that_failed_silently(
    site: Site, tmp_path: Path
) -> None:
    variables = {"NSA_TUNE_DB": str(table_file(tmp_path)), "GPU": GPU}
    well = site.run(_DOCTOR, **variables)
    site.backend("class DeepseekSparseAttnBackend:\n    pass\n")

    ill = site.run(_DOCTOR, **variables)

    assert (well.returncode, ill.returncode) == (0, 5), well.stderr + ill.stderr
    assert well.stdout.splitlines()[-1].startswith("OK: this machine is ready to steer SGLang")
    assert ill.stdout.splitlines()[-1].startswith("This machine cannot steer SGLang: ")
