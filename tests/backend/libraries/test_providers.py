"""Who answers for a kernel library: the first installed distribution, found without importing."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from nsa_tune import LibraryMissing
from nsa_tune.backend import libraries as providers


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on sys.path to install made-up distributions into."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site: Path, distribution: str, version: str, module: str, source: str = "") -> None:
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    package = site.joinpath(*module.split("."))
    package.mkdir(parents=True, exist_ok=True)
    for folder in (package, *package.parents):
        if folder == site:
            break
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text(source)


def test_a_missing_library_names_the_command_that_installs_it() -> None:
    assert providers.answering("flash_mla") is None
    with pytest.raises(LibraryMissing, match="flash_mla is not installed: pip install sgl-flash"):
        providers.load("flash_mla")


def test_the_distribution_that_answers_is_recorded_without_importing_it(site: Path) -> None:
    install(site, "sgl-flash-mla", "9.1", "flash_mla", "raise RuntimeError('imported')")

    found = providers.answering("flash_mla")
    assert found == providers.Answering("sgl-flash-mla", "9.1", "flash_mla")
    assert "flash_mla" not in sys.modules


def test_the_first_of_several_distributions_wins(site: Path) -> None:
    install(site, "sglang-kernel", "0.4.4", "sgl_kernel.flash_mla")
    found = providers.answering("flash_mla")
    assert found is not None
    assert (found.distribution, found.module) == ("sglang-kernel", "sgl_kernel.flash_mla")

    install(site, "sgl-flash-mla", "1.0.0", "flash_mla")
    found = providers.answering("flash_mla")
    assert found is not None
    assert found.distribution == "sgl-flash-mla"


@pytest.mark.parametrize(
    ("library", "module"),
    [
        ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface"),
        ("deep_gemm", "vllm.third_party.deep_gemm"),
    ],
)
def test_vllm_answers_with_the_builds_that_it_brings_without_being_imported(
    site: Path, library: str, module: str
) -> None:
    install(site, "vllm", "0.33.0", module)
    (site / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")

    assert providers.answering(library) == providers.Answering("vllm", "0.33.0", module)
    assert "vllm" not in sys.modules


def test_a_vllm_that_was_built_without_a_library_does_not_answer_for_it(site: Path) -> None:
    install(site, "vllm", "0.33.0", "vllm.third_party.deep_gemm")

    assert providers.answering("flash_mla") is None
    assert providers.answering("deep_gemm") is not None


def test_a_source_build_answers_where_no_wheel_does(site: Path) -> None:
    install(site, "flash_mla", "1.0.0+9241ae3", "flash_mla")
    found = providers.answering("flash_mla")

    assert found is not None
    assert (found.distribution, found.version) == ("flash-mla", "1.0.0+9241ae3")


def test_metadata_without_its_module_does_not_answer(site: Path) -> None:
    install(site, "sgl-deep-gemm", "0.2", "elsewhere")

    assert providers.answering("deep_gemm") is None


def test_a_loaded_library_is_the_module_of_who_answers(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "flashinfer-python", "0.7", "flashinfer", "WHO = 'made up'")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)

    assert providers.load("flashinfer").WHO == "made up"
    monkeypatch.delitem(sys.modules, "flashinfer")


def test_every_library_is_known_to_the_key() -> None:
    from nsa_tune.backend.hardware.detect import _DISTRIBUTIONS

    names = {name for library in providers.PROVIDERS.values() for name, _ in library.sources}
    assert names <= set(_DISTRIBUTIONS)
    assert metadata.version("torch")


def test_an_optional_library_is_missing_until_all_that_it_needs_is_installed(site: Path) -> None:
    others = {"sglang_q8", "sglang_triton_decode", "sglang_topk_v2"}
    assert providers.missing() == {"sglang_triton", *others}

    install(site, "sglang", "0.5.22", "sglang.kernels.ops.attention.dsa.triton_sparse_mla_prefill")
    assert providers.missing() == others
    found = providers.answering("sglang_triton")
    assert found is not None
    assert (found.distribution, found.version) == ("sglang", "0.5.22")
    assert "sglang" not in sys.modules


def test_no_library_that_others_need_is_optional() -> None:
    optional = {name for name, one in providers.PROVIDERS.items() if one.optional}

    assert optional == {
        "sglang_q8",
        "sglang_triton",
        "sglang_triton_decode",
        "sglang_topk_v2",
    }
