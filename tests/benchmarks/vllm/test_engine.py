"""The engine of a run, with vLLM's own builder in a vLLM that only schedules; and the names that a
run needs, in the wheel's sources."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.vllm import engine as engine_module
from benchmarks.vllm.cases import BLOCK
from benchmarks.vllm.engine import Engine, Options
from nsa_tune import Dispatcher
from nsa_tune.backend.baselines import VLLM_0_33_0
from nsa_tune.engines.vllm.facts import facts_of
from nsa_tune.engines.vllm.prefill import ATTRIBUTE, Prefill, steer
from nsa_tune.engines.vllm.priced import priced
from tests.engines.vllm.engine import LAYERS, builder_of, config, stand_in_modules, step_of
from tests.engines.vllm.engine import Engine as Sources
from tests.engines.vllm.wheels import wheel_of
from tests.engines.wheels import Unreachable, Wheel

_OPTIONS = Options(heads=16, layers=2, kv_dtype="fp8", chunk=4096, longest=65536, kv_gib=1.0)
_VERSION = "0.33.0"
"""Which a pack has."""
_LONG = list(range(8192))


@pytest.fixture(scope="module")
def wheel() -> Wheel:
    try:
        return wheel_of(_VERSION)
    except Unreachable as reason:
        pytest.skip(f"the sources of vLLM {_VERSION} cannot be had: {reason}")


class _Runner:
    """Prepares steps by vLLM's builder, and computes nothing."""

    attn_groups: Any = ()

    def execute_model(self, lens: list[tuple[int, int]]) -> None:
        for groups in self.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    builder.build(0, step_of(lens))


class _Indexers:
    """A builder of another kind."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> None:
        del common_prefix_len, common_attn_metadata


class _LLM:
    """Finds whole blocks again, and computes all prompts of a call in one step."""

    builders: Sequence[Any] = ()
    given: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        type(self).given = given
        self._runner = sys.modules["vllm.v1.worker.gpu.model_runner"].GPUModelRunner()
        self._runner.attn_groups = [[SimpleNamespace(metadata_builders=self.builders)]]
        self._blocks: set[tuple[int, ...]] = set()
        self.aborted: list[str] = []
        self.output_processor = SimpleNamespace(request_states={})
        self.llm_engine = self

    def abort_request(self, request_ids: list[str], *, internal: bool) -> None:
        assert internal
        self.aborted += request_ids

    def generate(
        self, prompts: list[dict[str, list[int]]], sampling: Any, *, use_tqdm: bool
    ) -> list[Any]:
        assert not use_tqdm and sampling.max_tokens == 1
        tokens = [one["prompt_token_ids"] for one in prompts]
        cached = [self._cached(one) for one in tokens]
        self._runner.execute_model(
            [(known, len(one) - known) for known, one in zip(cached, tokens, strict=True)]
        )
        for one in tokens:
            ends = range(BLOCK, len(one) + 1, BLOCK)
            self._blocks |= {tuple(one[:end]) for end in ends}
        top = {7: SimpleNamespace(logprob=-1.5), 8: SimpleNamespace(logprob=-2.5)}
        output = SimpleNamespace(logprobs=[top])
        return [SimpleNamespace(num_cached_tokens=one, outputs=[output]) for one in cached]

    def _cached(self, tokens: list[int]) -> int:
        ends = range(BLOCK, len(tokens), BLOCK)
        return max((end for end in ends if tuple(tokens[:end]) in self._blocks), default=0)

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        assert reset_running_requests
        self._blocks.clear()
        return True


class _Event:
    """A step takes two milliseconds."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Take note of nothing."""

    def elapsed_time(self, other: _Event) -> float:
        del other
        return 2.0


def _module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture
def steered(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """FlashMLA's builder under the hooks, with the plug-in attached; vLLM's modules around it."""
    runners = ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner")
    modules = [
        *stand_in_modules().values(),
        _module("vllm", LLM=_LLM, SamplingParams=SimpleNamespace),
        *(_module(one, GPUModelRunner=type("GPUModelRunner", (_Runner,), {})) for one in runners),
        _module("vllm.v1.worker.gpu_worker", Worker=type("Worker", (), {})),
        _module(
            "vllm.model_executor.model_loader.dummy_loader",
            DummyModelLoader=type("DummyModelLoader", (), {}),
        ),
    ]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, engine_module._QUERIES, ModuleType("before"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    table = Dispatcher.open(
        gpu="NVIDIA H100 80GB HBM3", model="deepseek-v3.2", heads=16, kv_dtype="fp8", strict=True,
        baseline=VLLM_0_33_0, layers=61,
    )  # fmt: skip
    builder = builder_of(Sources(wheel).flashmla(hooked=True), config())
    facts = facts_of(builder, LAYERS)
    priced_table = priced(table, facts.layers, facts.workspace_tokens)
    steer(builder, Prefill(builder, priced_table, facts, None))
    monkeypatch.setattr(_LLM, "builders", (_Indexers(), builder))
    monkeypatch.setattr(torch.cuda, "_sleep", partial(setattr, builder, "held_cycles"))
    return builder


def test_the_same_batch_runs_off_and_on(steered: Any, tmp_path: Path) -> None:
    engine = Engine(_OPTIONS, tmp_path)
    assert engine.steered == 1
    assert [one["class"] for one in engine.builders] == [
        "_Indexers", "FlashMLASparseMetadataBuilder",
    ]  # fmt: skip
    tail = list(range(9, 2009))

    off = engine.run([_LONG], [tail], plugin=False)
    assert ATTRIBUTE not in vars(steered)
    on = engine.run([_LONG], [tail], plugin=True, held=True)
    assert steered.held_cycles == 10**8
    assert ATTRIBUTE in vars(steered)

    assert (off.ms, on.ms) == (2.0, 2.0)
    assert (off.ways, on.ways) == (("decode kernel",), ("sparse kernel",))
    assert off.outputs == on.outputs == [{7: -1.5, 8: -2.5}]


def test_a_batch_without_a_prefix(steered: Any, tmp_path: Path) -> None:
    del steered
    engine = Engine(_OPTIONS, tmp_path)
    tails = [[i] * 100 for i in range(2, 6)]
    ways = [engine.run([[]] * 4, tails, plugin=one).ways for one in (False, True, False)]

    assert ways == [("as decodes",), ("MHA",), ("as decodes",)]


def test_a_prefix_that_is_not_found_again_is_an_error(
    steered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch would be another one than is said."""
    del steered
    engine = Engine(_OPTIONS, tmp_path)
    monkeypatch.setattr(_LLM, "_cached", lambda *_: 64)

    with pytest.raises(RuntimeError, match=r"\{64\} tokens were cached where \{8192\}"):
        engine.run([_LONG], [[9, 9]], plugin=True)


def test_what_a_failed_batch_left_does_not_run_with_the_next(steered: Any, tmp_path: Path) -> None:
    del steered
    engine = Engine(_OPTIONS, tmp_path)
    engine._llm.output_processor.request_states["left"] = object()
    engine.run([[]], [[9] * 100], plugin=True)

    assert engine._llm.aborted == ["left"]


# --- what a run takes for granted of vLLM


def _parameters(wheel: Wheel, module: str, path: str) -> list[str]:
    definition = wheel.definition(module.replace(".", "/") + ".py", path)
    assert isinstance(definition, ast.FunctionDef)
    return [one.arg for one in (*definition.args.args, *definition.args.kwonlyargs)]


def _fields(wheel: Wheel, file: str, name: str) -> set[str]:
    body = wheel.definition(file, name).body
    return {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}


def test_vllm_takes_the_arguments_of_a_run(wheel: Wheel, steered: Any, tmp_path: Path) -> None:
    del steered
    engine = Engine(_OPTIONS, tmp_path)
    own = _parameters(wheel, "vllm.entrypoints.llm", "LLM.__init__")
    known = {*own, *_fields(wheel, "vllm/engine/arg_utils.py", "EngineArgs")}

    assert _LLM.given.keys() <= known
    assert vars(engine._sampling).keys() <= _fields(
        wheel, "vllm/sampling_params.py", "SamplingParams"
    )


@pytest.mark.parametrize(
    ("module", "path", "parameters"),
    [
        ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.execute_model",
         ["self", "scheduler_output"]),
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model",
         ["self", "scheduler_output"]),
        ("vllm.v1.worker.gpu_worker", "Worker._scoped_allocator_max_split",
         ["self", "max_split_size_mb"]),
        ("vllm.model_executor.model_loader.dummy_loader", "DummyModelLoader.load_weights",
         ["self", "model", "model_config"]),
        ("vllm.entrypoints.llm", "LLM.reset_prefix_cache", ["self", "reset_running_requests"]),
        ("vllm.v1.engine.llm_engine", "LLMEngine.abort_request",
         ["self", "request_ids", "internal"]),
    ],
)  # fmt: skip
def test_what_is_replaced_or_called_is_there(
    wheel: Wheel, module: str, path: str, parameters: list[str]
) -> None:
    assert _parameters(wheel, module, path)[: len(parameters)] == parameters


def test_both_runners_keep_their_builders_in_groups(wheel: Wheel) -> None:
    for module in ("vllm/v1/worker/gpu/model_runner.py", "vllm/v1/worker/gpu_model_runner.py"):
        assert "self.attn_groups" in wheel.text(module)
    assert "metadata_builders" in _fields(wheel, "vllm/v1/worker/utils.py", "AttentionGroup")


def test_the_kernel_for_blackwell_is_asked_for_where_it_is_left_out(wheel: Wheel) -> None:
    text = wheel.text("vllm/models/deepseek_v32/common/kernels.py")
    assert f"from {engine_module._QUERIES} import" in text
    assert wheel.text(engine_module._QUERIES.replace(".", "/") + ".py")


def test_unfinished_requests_are_known_by_their_internal_names(wheel: Wheel) -> None:
    text = ast.unparse(
        wheel.definition("vllm/v1/engine/output_processor.py", "OutputProcessor.abort_requests")
    )
    assert "self.request_states.get(request_id)" in text


def test_the_number_of_cached_tokens_is_known_without_statistics(wheel: Wheel) -> None:
    """A run switches statistics off."""
    text = wheel.text("vllm/v1/engine/output_processor.py")
    assert "engine_core_output.prefill_stats.num_cached_tokens" in text
    assert "log_stats" not in ast.unparse(
        wheel.definition("vllm/v1/request.py", "Request.take_prefill_stats")
    )
