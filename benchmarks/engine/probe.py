"""An SGLang plug-in that times each forward pass on the GPU and switches configurations between.

It does nothing unless `NSA_ENGINE_PROBE` holds its settings as JSON (`Settings`). GPU time is taken
between two events on the forward stream, so it holds the gaps that the host leaves. Nothing waits
for the GPU: events are read in later passes, once they have happened.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.engine.configurations import Configuration, dumped, parsed
from benchmarks.engine.control import Control
from benchmarks.engine.placing import VARIABLE as FAULT
from benchmarks.engine.placing import fail_captures, start_with_fault
from benchmarks.engine.profiling import profiled
from benchmarks.engine.weights import index_by_content, initialise

__all__ = ["VARIABLE", "Probe", "Settings", "Switch", "register"]

VARIABLE = "NSA_ENGINE_PROBE"
_SWITCH = "nsa_tune.engines.sglang.switch"
_EXTENDS = "nsa_tune.engines.extends"
_MODE = "nsa_tune.engines.sglang.pass_mode.mode"
_DENSE = "nsa_tune.engines.sglang.pass_mode.whole_pass.dense_graphs"
_STARTS_RANKS = (
    "sglang.srt.entrypoints.engine", "sglang.srt.managers.data_parallel_controller",
)  # fmt: skip
_LONGEST_LIST = 256
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Settings:
    """What the driver tells the probe before the engine starts."""

    control: Path
    passes: Path
    """Where each pass becomes a line of JSON."""
    configurations: tuple[Configuration, ...]
    layers: int = 0
    """How many layers the plug-in is told of; 0: as many as there are. A model cut down to a few
    is otherwise steered as one of so few."""
    ranks: int = 1
    fault: str = ""
    """What is made to go wrong on the last rank, as in `placing.FAULTS`."""

    @property
    def outputs(self) -> Path:
        """The folder of kept outputs."""
        return self.passes.with_name("kept")

    def to_environment(self) -> str:
        """The value of the variable."""
        return json.dumps({
            "control": str(self.control), "passes": str(self.passes), "layers": self.layers,
            "configurations": dumped(self.configurations), "ranks": self.ranks, "fault": self.fault,
        })  # fmt: skip

    @classmethod
    def from_environment(cls) -> Settings | None:
        """The settings, or None where the variable is not set."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        given = json.loads(text)
        return cls(
            Path(given["control"]), Path(given["passes"]),
            parsed(json.dumps(given["configurations"])), given["layers"], given["ranks"],
            given["fault"],
        )  # fmt: skip


def register() -> None:
    """SGLang's entry point: arranges that the engine's modules are hooked once it loads them."""
    settings = Settings.from_environment()
    if settings is None:
        return
    hooks = dict(_HOOKS)
    if settings.fault:
        start = partial(start_with_fault, ranks=settings.ranks, fault=settings.fault)
        hooks |= dict.fromkeys(_STARTS_RANKS, start)
    if os.environ.get(FAULT) == "capture":
        hooks[_DENSE] = fail_captures
    when_imported = import_module("nsa_tune.engines.post_import").when_imported
    for name, hook in hooks.items():
        when_imported(name, partial(_hook, name, hook))
    if settings.layers:
        _tell_layers(settings.layers)


def _hook(name: str, hook: Callable[[Any], None]) -> None:
    hook(sys.modules[name])


def _tell_layers(count: int) -> None:
    facts: Any = import_module("nsa_tune.engines.sglang.facts")
    if not hasattr(facts, "_layers"):
        raise ImportError("nsa_tune...sglang.facts has no _layers: the probe cannot replace it")
    facts._layers = lambda *_: count


def _hook_weights(module: Any) -> None:
    module.initialize_dummy_weights = initialise


def _hook_runner(module: Any) -> None:
    runner = module.ModelRunner
    original = runner.forward

    # With the original's signature: the plug-in checks what it hooks.
    @wraps(original)
    def forward(self: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
        return _probe().around(original, self, forward_batch, *rest, **named)

    runner.forward = forward


def _hook_graphs(module: Any) -> None:
    runner = module.PrefillCudaGraphRunner
    # Under data-parallel attention the ranks vote with the second.
    for name in ("can_run_graph", "can_replay_locally"):
        if hasattr(runner, name):
            setattr(runner, name, _unless_eager(getattr(runner, name)))


def _unless_eager(original: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(original)
    def allowed(*arguments: Any, **named: Any) -> bool:
        return _probe().switch.apply().prefill_graph and original(*arguments, **named)

    return allowed


def _hook_scheduler(module: Any) -> None:
    scheduler = module.Scheduler
    original = scheduler.get_new_batch_prefill

    @wraps(original)
    def get_new_batch_prefill(self: Any, *rest: Any, **named: Any) -> Any:
        started = vars(self).setdefault("_probe_chunk", self.chunked_prefill_size)
        self.chunked_prefill_size = _probe().switch.apply().chunk or started
        return original(self, *rest, **named)

    scheduler.get_new_batch_prefill = get_new_batch_prefill


def _hook_arguments(module: Any) -> None:
    def handle(arguments: Any, original: Callable[[Any], None]) -> None:
        # All that this does for a prefill server is to refuse transfers that are made up.
        if arguments.disaggregation_transfer_backend != "fake":
            original(arguments)

    module.register_resolution_hook("handle_pd_disaggregation")(handle)


def _hook_transfers(module: Any) -> None:
    original = module.get_kv_class
    # A prefill server starts one, which `--disaggregation-transfer-backend fake` does not have.
    module.get_kv_class = lambda *wanted: original(*wanted) or dict


_HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.arg_groups.resolution_hooks": _hook_arguments,
    "sglang.srt.managers.disagg_service": _hook_transfers,
    "sglang.srt.managers.scheduler": _hook_scheduler,
    "sglang.srt.model_loader.loader": _hook_weights,
    "sglang.srt.model_executor.model_runner": _hook_runner,
    "sglang.srt.model_executor.runner.prefill_cuda_graph_runner": _hook_graphs,
}


@cache
def _probe() -> Probe:
    settings = Settings.from_environment()
    assert settings is not None, "hooks are placed only with settings"
    return Probe(settings)


class Switch:
    """Brings the process into the configuration that the control file asks for."""

    def __init__(self, control: Control, configurations: tuple[Configuration, ...]) -> None:
        self._control = control
        self._configurations = configurations
        self._index: int | None = None
        self._kept: dict[str, str | None] = {}

    def apply(self) -> Configuration:
        """The configuration from now on; costs a few hundred nanoseconds where nothing changed."""
        index = self._control.read().configuration
        configuration = self._configurations[index]
        if index != self._index:
            self._index = index
            _set_plugin(configuration.plugin)
            self._set_environment(configuration.environment)
        return configuration

    def _set_environment(self, wanted: dict[str, str]) -> None:
        for name, value in self._kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._kept = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)


def _set_plugin(on: bool) -> None:
    if os.environ.get("NSA_TUNE_DISABLE"):
        return  # The engine was started without the plug-in.
    try:
        switch = import_module(_SWITCH)
    except ImportError as error:
        raise ImportError(
            f"{_SWITCH} is missing, so the plug-in cannot be switched off between passes; "
            "start with --no-plugin to measure SGLang alone"
        ) from error
    if on:
        switch.resume()
    else:
        switch.pause()


class PrefillImpl:
    """Puts another prefill kernel into one attention backend, pass by pass.

    It wraps the instance's `set_dsa_prefill_impl`, so it has the last word whatever else hooks the
    class, and what the pass's metadata is made for is what runs.
    """

    def __init__(self, backend: Any) -> None:
        self.wanted: str | None = None
        self._backend = backend
        self._own: tuple[str, int] | None = None
        self._decide = backend.set_dsa_prefill_impl
        backend.set_dsa_prefill_impl = self._set

    def _set(self, forward_batch: Any = None) -> Any:
        backend = self._backend
        if self._own is not None:
            backend.dsa_prefill_impl, backend.dsa_triton_union = self._own
            self._own = None
        result = self._decide(forward_batch)
        if self.wanted is not None and forward_batch is not None and _extends(forward_batch):
            self._own = backend.dsa_prefill_impl, getattr(backend, "dsa_triton_union", 0)
            backend.dsa_prefill_impl, _, union = self.wanted.partition("_union")
            backend.dsa_triton_union = int(union or self._own[1])
        return result


def _extends(forward_batch: Any) -> bool:
    return _mode_of(forward_batch) == "EXTEND"


def _mode_of(forward_batch: Any) -> str:
    return str(getattr(forward_batch.forward_mode, "name", forward_batch.forward_mode))


class Probe:
    """Times the passes of one process."""

    def __init__(self, settings: Settings) -> None:
        self._control = Control(settings.control)
        self.switch = Switch(self._control, settings.configurations)
        self._passes = settings.passes
        self._file: int | None = None
        self._waiting: deque[tuple[Any, Any, dict[str, Any]]] = deque()
        self._impls: dict[int, PrefillImpl] = {}
        self._readings = 0
        self._outputs = settings.outputs
        self._kept = 0

    def around(
        self, original: Callable[..., Any], runner: Any, batch: Any, *rest: Any, **named: Any
    ) -> Any:
        """Run one forward pass and remember its events."""
        import torch

        if torch.cuda.is_current_stream_capturing():
            # A draft model's graphs are captured through this method; events may not be read then.
            return original(runner, batch, *rest, **named)
        configuration = self.switch.apply()
        backend = getattr(runner.attn_backend, "primary", runner.attn_backend)
        self._set_impl(backend, configuration.prefill_impl)
        wanted = self._control.read()
        reads_memory = wanted.readings != self._readings
        self._readings = wanted.readings
        if wanted.by_content != vars(runner).get("_probe_by_content", False):
            runner._probe_by_content = wanted.by_content
            index_by_content(runner.model, wanted.by_content)
        facts = {"ctl": wanted.configuration, "tag": wanted.tag} | _lengths(batch)
        steering = vars(runner).get("_nsa_tune_pass_mode")
        steered = steering is not None and configuration.plugin and facts["mode"] == "EXTEND"
        forced = None
        if steered and configuration.pass_mode:
            # What cannot run the batch so runs as the engine does.
            facts["ways"] = _ways(steering, batch)
            forced = (
                configuration.pass_mode if configuration.pass_mode in facts["ways"] else "engine"
            )
        profiles = wanted.profiles if facts["mode"] == "EXTEND" else 0
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host = time.perf_counter()
        start.record()
        with _forced(steering, forced):
            result = profiled(partial(original, runner, batch, *rest, **named), facts, profiles)
        end.record()
        facts["host_ms"] = round((time.perf_counter() - host) * 1e3, 3)
        facts["t"] = round(host, 6)
        facts |= _ran(runner, backend, result)
        if steering is not None and configuration.plugin:
            facts["pass_mode"] = forced or str(steering.last)
        if reads_memory:
            facts |= _memory()
        if wanted.keeps and facts["mode"] == "EXTEND" and not facts["draft"]:
            self._keep(wanted.tag, batch, result)
        self._waiting.append((start, end, facts))
        self._write()
        return result

    def _keep(self, tag: int, batch: Any, result: Any) -> None:
        """Write a prefill's outputs to a file. The host waits for them."""
        import torch

        self._outputs.mkdir(exist_ok=True)
        self._kept += 1
        found = result.logits_output
        states = found.hidden_states
        path = self._outputs / f"{tag}-{os.getpid()}-{self._kept}.pt"
        kept = {
            "input_ids": batch.input_ids.cpu(),
            "prefix": list(batch.extend_prefix_lens_cpu), "new": list(batch.extend_seq_lens_cpu),
            "logits": found.next_token_logits.float().cpu(),
            "hidden_states": None if states is None else states.float().cpu(),
        }  # fmt: skip
        torch.save(kept, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def _set_impl(self, backend: Any, wanted: str | None) -> None:
        if not hasattr(backend, "set_dsa_prefill_impl"):
            return
        impl = self._impls.get(id(backend))
        if impl is None:
            impl = self._impls[id(backend)] = PrefillImpl(backend)
        impl.wanted = wanted

    def _write(self) -> None:
        while self._waiting and self._waiting[0][1].query():
            start, end, facts = self._waiting.popleft()
            facts["gpu_ms"] = round(start.elapsed_time(end), 4)
            if self._file is None:
                self._file = os.open(self._passes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            # One call a line: several processes append to one file.
            os.write(self._file, (json.dumps(facts) + "\n").encode())


def _ways(steering: Any, batch: Any) -> list[str]:
    """The ways that can run a batch and are on."""
    sums = import_module(_EXTENDS).sums_of(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu)
    ways = () if sums is None else steering.choice.ways(sums, steering.rows_of(batch))
    return [str(way) for way in ways if way not in steering.off]


@contextmanager
def _forced(steering: Any, mode: str | None) -> Iterator[None]:
    """Within it the plug-in runs each pass in the mode of that name."""
    if mode is None:
        yield
        return
    steering.forced = import_module(_MODE).PassMode(mode)
    try:
        yield
    finally:
        steering.forced = None


def _lengths(batch: Any) -> dict[str, Any]:
    mode = _mode_of(batch)
    facts: dict[str, Any] = {"mode": mode, "bs": batch.batch_size}
    prefix, new = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    if mode == "EXTEND" and type(prefix) is list and type(new) is list:
        facts |= {"prefix": prefix[:_LONGEST_LIST], "new": new[:_LONGEST_LIST]}
        facts |= {"q": sum(new), "kv": sum(prefix) + sum(new)}
    elif getattr(batch, "seq_lens_sum", None) is not None:
        facts["kv"] = int(batch.seq_lens_sum)
    return facts


def _ran(runner: Any, backend: Any, result: Any) -> dict[str, Any]:
    impl, union = (getattr(backend, f"dsa_{of}", "") for of in ("prefill_impl", "triton_union"))
    impl = impl or _ran_v4(getattr(backend, "forward_metadata", None))
    return {
        "graph": bool(getattr(result, "can_run_graph", False)),
        "mha": bool(getattr(backend, "use_mha", False)),
        "impl": f"{impl}_union{union}" if union and "triton" in impl else str(impl),
        "draft": bool(getattr(runner, "is_draft_worker", False)),
        "gpu": _rank(runner),
    }


def _ran_v4(metadata: Any) -> str:
    """The kernels of a prefill of DeepSeek V4: attention, and whether the indexer gathered keys."""
    if not hasattr(metadata, "sparse_prefill_cache"):
        return ""
    gathered = getattr(metadata.indexer_metadata, "nonpaged_plan", None) is not None
    impl = "with_kvcache" if metadata.sparse_prefill_cache is None else "sparse_fwd"
    return impl + ("+nonpaged" if gathered else "")


def _rank(runner: Any) -> int:
    """Ranks may share a GPU, so its number does not name them."""
    import torch

    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(getattr(runner, "gpu_id", 0))


def _memory() -> dict[str, Any]:
    """What is in use now; the peak is that since the last reading."""
    import torch

    free, total = torch.cuda.mem_get_info()
    rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return {
        "peak_mib": peak // _MIB,
        "allocated_mib": torch.cuda.memory_allocated() // _MIB,
        "reserved_mib": torch.cuda.memory_reserved() // _MIB,
        "used_mib": (total - free) // _MIB,
        "host_mib": rss_pages * os.sysconf("SC_PAGE_SIZE") // _MIB,
    }
