"""The doctor's view of the plug-in, in environments that are right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa_tune.engines.vllm.releases import release_of
from tests.engines.sglang.tables import GPU, table_file
from tests.engines.site import wrong
from tests.engines.vllm.site import Site
from tests.engines.wheels import Wheel

_DOCTOR = """
import os
from nsa_tune.backend.hardware import detect
detect.local_device_name = lambda: os.environ["GPU"]
from nsa_tune import cli
cli.main(["doctor", "--engine", "vllm"])
"""


@pytest.fixture
def site(newest: Wheel, tmp_path: Path) -> Site:
    return Site(tmp_path / "site", newest)


def test_all_is_well_where_everything_is(wheel: Wheel, tmp_path: Path) -> None:
    site = Site(tmp_path / "site", wheel)
    found = site.health(NSA_TUNE_DB=str(table_file(tmp_path)), GPU=GPU)

    assert wrong(found) == set()
    assert found["vllm"][1] == f"vLLM {wheel.version}; the plug-in was checked with 0.31 to 0.33"
    assert "deepseek-v3.2 with 128 local heads" in found["table"][1]
    release = release_of(wheel.version)
    assert release is not None
    names = {f"{what} {one.name}" for one in release.symbols for what in ("source of", "hook on")}
    assert {name for name in found if name.startswith(("source of", "hook on"))} == names


def test_the_allow_list_is_named(site: Site) -> None:
    found = site.health(VLLM_PLUGINS="other")

    assert "allowed" in wrong(found)
    assert found["allowed"][1] == "VLLM_PLUGINS=other leaves nsa_tune out"


def test_an_engine_that_is_not_there_is_named(site: Site) -> None:
    no_vllm = (
        "from nsa_tune.engines.releases import KnownReleases\n"
        "KnownReleases.installed_version = lambda known: None"
    )
    found = site.health(no_vllm)

    assert wrong(found) == {"vllm"}
    assert "vLLM is not installed in this environment: install nsa-tune into" in found["vllm"][1]
    assert "run the same command there" in found["vllm"][1]


def test_the_doctor_of_the_command_line_finds_a_builder_that_has_gone(
    site: Site, tmp_path: Path
) -> None:
    variables = {"NSA_TUNE_DB": str(table_file(tmp_path)), "GPU": GPU}
    well = site.run(_DOCTOR, **variables)
    site.module("vllm.v1.attention.backends.mla.flashmla_sparse", "")

    ill = site.run(_DOCTOR, **variables)

    assert (well.returncode, ill.returncode) == (0, 5), well.stderr + ill.stderr
    assert well.stdout.splitlines()[-1].startswith("OK: this machine is ready to steer vLLM")
    assert ill.stdout.splitlines()[-1].startswith("This machine cannot steer vLLM: ")
