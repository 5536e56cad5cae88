"""The run without vLLM: an engine in its place, what is written, and the pack's host side."""

from __future__ import annotations

import importlib.metadata
import json
import re
import runpy
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.vllm import host, run
from benchmarks.vllm.cases import Case
from benchmarks.vllm.engine import Options, Prompts, model_folder
from benchmarks.vllm.measured import Pass
from benchmarks.vllm.pack import RECIPE

_OPTIONS = Options(heads=16, layers=2, kv_dtype="fp8", chunk=512, longest=4096, kv_gib=1.0)


class _Engine:
    """Answers as an engine, and notes what it was asked for."""

    steered = 1
    builders: tuple[dict[str, str], ...] = ()

    def __init__(self, *_: Any, fails: str = "") -> None:
        self.asked: list[tuple[Prompts, Prompts, bool]] = []
        self._fails = fails

    def run(self, heads: Prompts, tails: Prompts, *, plugin: bool, held: bool) -> Pass:
        assert not held
        self.asked.append((heads, tails, plugin))
        if self._fails:
            raise RuntimeError(self._fails)
        way = "sparse kernel" if plugin else "decode kernel"
        return Pass(1.0 if plugin else 2.0, (way,), [{1: -1.0} for _ in tails])


def test_each_round_has_new_tokens_and_the_same_for_off_and_on() -> None:
    engine = _Engine()
    found = run.measure(engine, Case(64, 8, 1, 1), 3, Random(1)).record()

    assert [plugin for *_, plugin in engine.asked] == [False, True, False] * 4
    heads, tails = [one for one, _, _ in engine.asked], [one for _, one, _ in engine.asked]
    assert all(one == heads[0] for one in heads)
    assert [len(one) for one in (*heads[0], *tails[0])] == [64, 1024, 8, 1]
    rounds = [tails[i : i + 3] for i in range(0, len(tails), 3)]
    assert all(one == each[0] for each in rounds for one in each)
    assert len({tuple(each[0][0]) for each in rounds}) == 4
    assert (len(found["rounds"]), found["ratio"]["median"]) == (3, 2.0)


def _main(monkeypatch: pytest.MonkeyPatch, out: Path, engine: Any) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(run, "Engine", engine)
    monkeypatch.setattr(run, "set_environment", lambda: None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name}'s")
    code = run.main(["--cases", "0:8:1,64:8:2", "--rounds", "2", "--out", str(out)])
    return code, json.loads((out / "vllm-deepseek-v3.2-fp8-16.json").read_text())


def test_all_cases_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = _main(monkeypatch, tmp_path, _Engine)
    assert (code, found["stage"]) == (0, "done")
    assert [one["case"] for one in found["cases"]] == ["0+8 x1", "64+8 x2"]
    assert found["versions"]["vllm"] == "vllm's"


def test_a_case_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = _main(monkeypatch, tmp_path, lambda *_: _Engine(fails="out of memory"))
    assert code == 0
    assert [one["failed"] for one in found["cases"]] == ["RuntimeError: out of memory"] * 2


def test_a_broken_context_ends_the_run_and_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = _main(monkeypatch, tmp_path, lambda *_: _Engine(fails="CUDA error: x"))
    assert code == 1
    assert len(found["cases"]) == 1 and "CUDA error: x" in found["failed"]
    assert "CUDA error: x" in capsys.readouterr().err


def test_an_engine_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any) -> Any:
        raise ImportError("no vLLM")

    code, found = _main(monkeypatch, tmp_path, start)
    assert (code, found["stage"]) == (1, "start")
    assert "no vLLM" in found["failed"]


@pytest.mark.parametrize("heads", [16, 128])
def test_the_model_has_dense_layers_and_the_wanted_heads(tmp_path: Path, heads: int) -> None:
    folder = model_folder(_OPTIONS._replace(heads=heads), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_attention_heads"] == heads
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] == 2
    assert "quantization_config" not in config
    assert (config["index_topk"], config["kv_lora_rank"]) == (2048, 512)


def test_the_entry_point_is_the_projects_own(tmp_path: Path) -> None:
    host.add_entry_point(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    (entry,) = found.entry_points
    project = (Path(host.__file__).parents[2] / "pyproject.toml").read_text()
    assert entry.group in project
    assert re.search(rf'^{entry.name} = "{re.escape(entry.value)}"', project, re.MULTILINE)


def test_the_environment_names_checkout_and_libraries(tmp_path: Path) -> None:
    script = host.environment(tmp_path, Path("/checkout"), "/cuda/lib")
    assert f"export PYTHONPATH=/checkout:{tmp_path}/site\n" in script
    assert "export LD_LIBRARY_PATH=/cuda/lib:" in script
    assert "export VLLM_PLUGINS=nsa_tune\n" in script


@pytest.mark.parametrize(
    ("name", "shrunk"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/_flashmla_C.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        ("vllm/third_party/deep_gemm/_C_extension.abi3.so", False),
        ("vllm/cumem_allocator.abi3.so", False),
        ("vllm/_custom_ops.py", False),
    ],
)
def test_libraries_with_device_code_are_shrunk(name: str, shrunk: bool) -> None:
    assert bool(re.fullmatch(RECIPE.libraries, name)) == shrunk
    assert not re.match(RECIPE.dropped, name)


def test_stand_ins_are_for_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    module = runpy.run_path(str(RECIPE.stand_ins / "sitecustomize.py"))
    finder = module["Finder"](frozenset({"opentelemetry"}))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:-1], finder])
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        del sys.modules[name]
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()

    trace = importlib.import_module("opentelemetry.trace")
    assert issubclass(type("Own", (trace.Span,), {}), trace.Span)
    assert trace.decorate(test_stand_ins_are_for_packages_that_are_missing) is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("opentelemetry.sdk.trace")
    assert module["NAMES"] >= {"xgrammar", "cv2"}
