"""A vLLM engine in this process, whose steps are timed and whose plug-in can be switched."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.engine.weights import initialise
from benchmarks.vllm.measured import Outputs, Pass, way_of
from nsa_tune.engines.vllm.prefill import ATTRIBUTE

__all__ = ["Engine", "Options", "model_folder", "set_environment"]

_MODELS = Path(__file__).parents[1] / "engine" / "models"
VOCABULARY = 16384
_INTERMEDIATE = 2304
"""Width of an MLP: that of one of eight ranks. There are no experts: this is about attention."""
_TOP = 20
"""Log-probabilities that vLLM returns of each next token."""
_HELD_CYCLES = 10**8
"""Some 50 ms, longer than a host takes to launch a step."""
_QUERIES = "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl"

Prompts = Sequence[list[int]]


class Options(NamedTuple):
    """What is fixed when the engine starts."""

    heads: int
    layers: int
    kv_dtype: str
    chunk: int
    """The most tokens of a step."""
    longest: int
    """The most tokens of a request."""
    kv_gib: float
    model: str = "deepseek-v3.2"


def set_environment() -> None:
    """What vLLM reads from the environment, before it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def model_folder(options: Options, parent: Path) -> Path:
    """A folder with the config.json of the model, made below `parent`."""
    config = json.loads((_MODELS / f"{options.model}.json").read_text())
    del config["quantization_config"]
    layers, heads = options.layers, options.heads
    config |= {"num_hidden_layers": layers, "first_k_dense_replace": layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    config |= {"intermediate_size": _INTERMEDIATE, "vocab_size": VOCABULARY}
    config |= {"num_nextn_predict_layers": 0}
    folder = parent / f"{options.model}-{layers}-{heads}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


class Engine:
    """Runs prompts with the plug-in on or off."""

    def __init__(self, options: Options, models: Path) -> None:
        _fit()
        self._steps: list[float] = []
        self._ways: list[str] = []
        self._cached: set[int] = set()
        self._held = False
        self._runner: Any = None
        self._time_steps()
        vllm = import_module("vllm")
        self._llm = vllm.LLM(
            model=str(model_folder(options, models)), load_format="dummy", dtype="bfloat16",
            skip_tokenizer_init=True, kv_cache_dtype=options.kv_dtype, enforce_eager=True,
            max_model_len=options.longest, max_num_batched_tokens=options.chunk, max_num_seqs=64,
            kv_cache_memory_bytes=int(options.kv_gib * 2**30), enable_prefix_caching=True,
            async_scheduling=False, seed=1, disable_log_stats=True,
        )  # fmt: skip
        self._sampling = vllm.SamplingParams(
            max_tokens=1, temperature=0, logprobs=_TOP, detokenize=False
        )
        self._generate([[5] * 100])
        builders = list(self._builders())
        self._steered = [(one, vars(one)[ATTRIBUTE]) for one in builders if ATTRIBUTE in vars(one)]
        self.builders = [_described(one) for one in builders]
        """What vLLM prepares its steps with."""
        for kind in {type(one) for one in builders if hasattr(one, "_prefill_backend")}:
            self._note_ways(kind)

    @property
    def steered(self) -> int:
        """How many builders the plug-in steers."""
        return len(self._steered)

    def run(self, heads: Prompts, tails: Prompts, *, plugin: bool, held: bool = False) -> Pass:
        """Fill the cache with `heads`, then time `tails` behind them; `held`: with the GPU held
        back until the host has launched a step, whose time is the GPU's alone then."""
        self._abort()
        self._held = False
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not empty its prefix cache: requests are running")
        self._switch(on=False)
        if any(heads):
            self._generate([[*head, 1] for head in heads])
        self._switch(on=plugin)
        self._held = held
        outputs = self._generate([[*head, *tail] for head, tail in zip(heads, tails, strict=True)])
        cached = {len(head) for head in heads}
        if self._cached != cached:
            raise RuntimeError(f"{self._cached} tokens were cached where {cached} should be")
        return Pass(sum(self._steps), tuple(self._ways), outputs)

    def _abort(self) -> None:
        """Let go of the requests of a batch that failed: they would run with the next one."""
        engine = self._llm.llm_engine
        left = list(engine.output_processor.request_states)
        if left:
            engine.abort_request(left, internal=True)

    def _generate(self, prompts: Prompts) -> Outputs:
        self._steps.clear()
        self._ways.clear()
        given = [{"prompt_token_ids": list(one)} for one in prompts]
        found = self._llm.generate(given, self._sampling, use_tqdm=False)
        self._cached = {one.num_cached_tokens for one in found}
        tops = (one.outputs[0].logprobs[0] for one in found)
        return [{token: value.logprob for token, value in top.items()} for top in tops]

    def _switch(self, *, on: bool) -> None:
        for builder, steering in self._steered:
            vars(builder).pop(ATTRIBUTE, None)
            if on:
                setattr(builder, ATTRIBUTE, steering)

    def _builders(self) -> Iterator[Any]:
        for groups in self._runner.attn_groups:
            for group in groups:
                yield from group.metadata_builders

    def _time_steps(self) -> None:
        """Time each step of vLLM's model runner, whichever of its two is used."""
        for name in ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"):
            kind = import_module(name).GPUModelRunner
            kind.execute_model = self._timed(kind.execute_model)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def execute(runner: Any, *rest: Any, **named: Any) -> Any:
            self._runner = runner
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if self._held:
                torch.cuda._sleep(_HELD_CYCLES)
            begin.record()
            found = original(runner, *rest, **named)
            end.record()
            torch.cuda.synchronize()
            self._steps.append(begin.elapsed_time(end))
            return found

        return execute

    def _note_ways(self, kind: Any) -> None:
        own, dense = kind.build, not hasattr(kind, "require_uniform_decodes")

        def build(builder: Any, *rest: Any, **named: Any) -> Any:
            metadata = own(builder, *rest, **named)
            self._ways.append(way_of(metadata, dense=dense))
            return metadata

        kind.build = build


def _described(builder: Any) -> dict[str, str]:
    names = ("reorder_batch_threshold", "fp8_use_mixed_batch", "require_uniform_decodes")
    found = {name: str(getattr(builder, name, None)) for name in names}
    return {"class": type(builder).__name__} | found


def _fit() -> None:
    """Let vLLM 0.33 run with PyTorch 2.11 and what a pack has."""
    import torch

    if not hasattr(torch.accelerator, "empty_host_cache"):
        vars(torch.accelerator)["empty_host_cache"] = lambda: None
    # The names of the allocator's settings are others there; it only saves memory at start.
    worker = import_module("vllm.v1.worker.gpu_worker").Worker
    worker._scoped_allocator_max_split = lambda *_, **__: nullcontext()
    # vLLM's own random weights are within 0.001: outputs would be alike whatever attention does.
    loader = import_module("vllm.model_executor.model_loader.dummy_loader").DummyModelLoader
    loader.load_weights = lambda _, model, __: initialise(model)
    if find_spec("cutlass") is None:
        _without_cute()


def _without_cute() -> None:
    """CuTe's kernel is for Blackwell, but vLLM imports its module before it looks at the GPU."""
    module: Any = ModuleType(_QUERIES)
    module.fused_q_cutedsl = None
    module.is_fused_q_cutedsl_supported = lambda *_, **__: False
    sys.modules[_QUERIES] = module
