"""The probe: it switches configurations between passes and leaves the engine's own as they were."""

from __future__ import annotations

import inspect
import json
import os
import sys
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engine import probe
from benchmarks.engine.configurations import Configuration, configurations_for, parsed
from benchmarks.engine.control import Control
from benchmarks.engine.prefill import ran
from benchmarks.engine.probe import VARIABLE, PrefillImpl, Probe, Settings, Switch
from benchmarks.engine.session import installed_probe
from benchmarks.engine.weights import initialise
from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from tests.benchmarks.engine.fake_engine import Backend, Mode, fake_events
from tests.benchmarks.engine.modules import only_here

_SWITCH = "nsa_tune.engines.sglang.switch"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plug-in's switch was told."""
    found: list[str] = []
    module: Any = ModuleType("switch")
    module.pause = lambda: found.append("pause")
    module.resume = lambda: found.append("resume")
    monkeypatch.setitem(sys.modules, _SWITCH, module)
    return found


def test_the_plugin_is_switched_only_when_the_configuration_changes(
    tmp_path: Path, calls: list[str]
) -> None:
    control = Control.create(tmp_path / "control")
    switch = Switch(control, configurations_for("bf16"))

    assert switch.apply().name == "default"
    assert switch.apply().name == "default"
    control.write(configuration=1)
    assert switch.apply().name == "plugin"
    control.write(tag=5)
    assert switch.apply().name == "plugin"
    assert calls == ["pause", "resume"]


def test_variables_are_put_back(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THRESHOLD", "1")
    control = Control.create(tmp_path / "control")
    changed = Configuration("short", environment={"THRESHOLD": "2", "OTHER": "3"})
    switch = Switch(control, (Configuration("default"), changed))

    control.write(configuration=1)
    switch.apply()
    assert (os.environ["THRESHOLD"], os.environ["OTHER"]) == ("2", "3")
    control.write(configuration=0)
    switch.apply()
    assert os.environ["THRESHOLD"] == "1" and "OTHER" not in os.environ


def test_without_a_switch_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, _SWITCH, None)
    switch = Switch(Control.create(tmp_path / "control"), (Configuration("default"),))
    with pytest.raises(ImportError, match="--no-plugin"):
        switch.apply()
    monkeypatch.setenv("NSA_TUNE_DISABLE", "1")
    assert Switch(Control(tmp_path / "control"), (Configuration("a"),)).apply().name == "a"


def test_the_prefill_kernel_is_changed_for_prefill_alone() -> None:
    backend = Backend()
    impl = PrefillImpl(backend)
    extend = SimpleNamespace(forward_mode=Mode.EXTEND, seq_lens=[300])

    impl.wanted = "flashmla_sparse"
    backend.set_dsa_prefill_impl(extend)
    assert backend.dsa_prefill_impl == "flashmla_sparse"
    backend.set_dsa_prefill_impl(None)
    assert backend.dsa_prefill_impl == "flashmla_kv"
    impl.wanted = "triton_sparse_mla_union4"
    backend.set_dsa_prefill_impl(extend)
    assert (backend.dsa_prefill_impl, backend.dsa_triton_union) == ("triton_sparse_mla", 4)
    impl.wanted = None
    backend.set_dsa_prefill_impl(extend)
    assert (backend.dsa_prefill_impl, backend.dsa_triton_union) == ("flashmla_kv", 0)


def test_the_chunk_is_changed_between_prefills(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scheduler:
        chunked_prefill_size = 8192

        def get_new_batch_prefill(self, running_batch: str) -> tuple[str, int]:
            return running_batch, self.chunked_prefill_size

    settings = Settings(
        tmp_path / "control",
        tmp_path / "passes",
        (Configuration("a"), Configuration("b", chunk=64)),
    )
    control = Control.create(settings.control)
    monkeypatch.setenv(VARIABLE, settings.to_environment())
    probe._probe.cache_clear()
    probe._hook_scheduler(SimpleNamespace(Scheduler=Scheduler))
    scheduler = Scheduler()
    chunks = []
    for configuration in (0, 1, 0):
        control.write(configuration=configuration)
        chunks.append(scheduler.get_new_batch_prefill("running"))
    probe._probe.cache_clear()
    assert chunks == [("running", 8192), ("running", 64), ("running", 8192)]


def test_a_prefill_server_may_make_transfers_up() -> None:
    hooks: dict[str, Any] = {}
    hooks["register_resolution_hook"] = lambda name: lambda hook: hooks.setdefault(name, hook)
    probe._hook_arguments(SimpleNamespace(**hooks))
    checked: list[str] = []
    for backend in ("fake", "nixl"):
        arguments = SimpleNamespace(disaggregation_transfer_backend=backend)
        hooks["handle_pd_disaggregation"](
            arguments, lambda arguments: checked.append(arguments.disaggregation_transfer_backend)
        )
    assert checked == ["nixl"]


def test_a_prefill_server_starts_without_a_server_for_transfers() -> None:
    service = SimpleNamespace(get_kv_class={"sender": list}.get)
    probe._hook_transfers(service)
    assert service.get_kv_class("sender") is list
    assert service.get_kv_class("bootstrap server")(host="::1", port=8998)


def test_each_pass_becomes_a_line(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = fake_events(monkeypatch)
    settings = Settings(tmp_path / "control", tmp_path / "passes", configurations_for("fp8"))
    control = Control.create(settings.control)
    control.write(configuration=2, tag=7, readings=1)
    one = Probe(settings)
    runner = SimpleNamespace(attn_backend=Backend(), gpu_id=1, is_draft_worker=True)
    runner._nsa_tune_pass_mode = SimpleNamespace(last="decode_graph")
    batch = SimpleNamespace(
        forward_mode=Mode.EXTEND, batch_size=2, extend_prefix_lens_cpu=[0, 64],
        extend_seq_lens_cpu=[300, 8], seq_lens=[300, 72],
    )  # fmt: skip

    def forward(runner: Any, batch: Any, more: int) -> Any:
        runner.attn_backend.set_dsa_prefill_impl(batch)
        clock.ms += more
        return SimpleNamespace(can_run_graph=True)

    for configuration in (2, 1, 1):
        control.write(configuration=configuration)
        one.around(forward, runner, batch, more=4)

    line, steered = map(json.loads, settings.passes.read_text().splitlines())
    assert (ran(line), ran(steered)) == ("flashmla_sparse graph", "decode_graph")
    assert line.pop("host_ms") >= 0 and line.pop("t") > 0 and line.pop("host_mib") > 0
    assert line == {
        "ctl": 2, "tag": 7, "mode": "EXTEND", "bs": 2, "prefix": [0, 64], "new": [300, 8],
        "q": 308, "kv": 372, "graph": True, "mha": False, "impl": "flashmla_sparse",
        "draft": True, "gpu": 1, "allocated_mib": 4, "peak_mib": 5, "reserved_mib": 6,
        "used_mib": 8, "gpu_ms": 4.0,
    }  # fmt: skip


class _Steering:
    """The plug-in's, and what it was forced to in each pass."""

    last = "engine"
    off = frozenset({PassMode.EAGER})

    def __init__(self) -> None:
        self.forced: Any = None
        self.choice = self

    def rows_of(self, batch: Any) -> int:
        return sum(batch.extend_seq_lens_cpu)

    def ways(self, sums: Batch, rows: int) -> list[PassMode]:
        assert sums.q_tokens == rows
        return [PassMode.ENGINE, PassMode.EAGER, PassMode.DECODE_GRAPH]


def test_prefills_run_as_a_configuration_forces_them_to(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only prefills, and nothing is left forced after an error."""
    clock = fake_events(monkeypatch)
    forced = Configuration("rows", plugin=True, pass_mode="decode_graph")
    chosen = (
        Configuration("default"), forced, Configuration("plugin", plugin=True),
        *(Configuration(way, plugin=True, pass_mode=way) for way in ("sparse_graph", "eager")),
    )  # fmt: skip
    settings = Settings(tmp_path / "control", tmp_path / "passes", chosen)
    control = Control.create(settings.control)
    one, steering = Probe(settings), _Steering()
    runner = SimpleNamespace(attn_backend=Backend(), gpu_id=0, _nsa_tune_pass_mode=steering)
    seen: list[Any] = []

    def forward(runner: Any, batch: Any) -> Any:
        seen.append(steering.forced)
        clock.ms += 1
        if len(seen) == 7:
            raise RuntimeError("made up")
        return SimpleNamespace(can_run_graph=True)

    passes = ((0, "EXTEND"), (1, "EXTEND"), (1, "DECODE"), (2, "EXTEND"))
    # A way that cannot run a batch, or is off, runs it as the engine does.
    for configuration, mode in (*passes, (3, "EXTEND"), (4, "EXTEND")):
        control.write(configuration=configuration)
        one.around(forward, runner, _batch(mode))
    control.write(configuration=1)
    with pytest.raises(RuntimeError):
        one.around(forward, runner, _batch("EXTEND"))

    rows, own = PassMode.DECODE_GRAPH, PassMode.ENGINE
    assert seen == [None, rows, None, None, own, own, rows]
    assert steering.forced is None
    lines = [json.loads(line) for line in settings.passes.read_text().splitlines()]
    ways = ["flashmla_kv graph", "decode_graph", *["flashmla_kv graph"] * 3]
    assert [ran(line) for line in lines] == ways
    assert lines[1]["ways"] == ["engine", "decode_graph"] and "ways" not in lines[3]


def _batch(mode: str) -> Any:
    return SimpleNamespace(
        forward_mode=Mode[mode], batch_size=1, extend_prefix_lens_cpu=[64],
        extend_seq_lens_cpu=[3], seq_lens=[67],
    )  # fmt: skip


def test_sglang_finds_the_probe_and_hooks_its_modules(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(tmp_path / "control", tmp_path / "passes", configurations_for("bf16"))
    control = Control.create(settings.control)
    _fake_sglang(tmp_path / "site", monkeypatch)
    probe._probe.cache_clear()
    with only_here("sglang"), installed_probe(settings, tmp_path / "plugin"):
        points = metadata.entry_points(group="sglang.srt.plugins", name="engine_probe")
        (point,) = points
        point.load()()
        graphs = import_module("sglang.srt.model_executor.runner.prefill_cuda_graph_runner")
        loader = import_module("sglang.srt.model_loader.loader")
        runner = graphs.PrefillCudaGraphRunner()
        assert runner.can_run_graph(None) and runner.can_replay_locally()
        control.write(configuration=2)
        assert not runner.can_run_graph(None) and not runner.can_replay_locally()
        assert loader.initialize_dummy_weights is initialise
        arguments = inspect.signature(graphs.PrefillCudaGraphRunner.can_run_graph).parameters
        assert list(arguments) == ["self", "batch"], "the plug-in checks what it hooks"
    assert VARIABLE not in os.environ
    probe._probe.cache_clear()


_RUNNER = """
class PrefillCudaGraphRunner:
    def can_replay_locally(self): return True
    def can_run_graph(self, batch): return True
"""


def _fake_sglang(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the modules that the probe hooks."""
    files = {
        "model_executor/model_runner.py": "class ModelRunner:\n    def forward(self): ...\n",
        "model_executor/runner/prefill_cuda_graph_runner.py": _RUNNER,
        "model_loader/loader.py": "def initialize_dummy_weights(model): ...\n",
    }
    for name, text in files.items():
        path = site / "sglang/srt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(site))


def test_it_does_nothing_without_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = list(sys.meta_path)
    probe.register()
    assert sys.meta_path == before


def test_random_weights_keep_activations_near_one() -> None:
    model = torch.nn.Module()
    shapes = {"embed": (300, 256), "linear": (512, 256), "expert": (3, 512, 256)}
    for name, shape in shapes.items():
        model.register_buffer(name, torch.empty(shape))
    model.register_buffer("quantized", torch.empty((2, 256, 256)).to(torch.float8_e4m3fn))
    model.register_buffer("quantized_weight_scale_inv", torch.empty((2, 2, 2)))
    model.register_buffer("norm", torch.empty(256))
    model.register_buffer("bias", torch.empty(256))
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    initialise(model)
    given: dict[str, torch.Tensor] = dict(model.named_buffers())
    for name in ("linear", "expert"):
        out = given[name] @ torch.randn(256, generator=torch.Generator().manual_seed(1))
        assert 0.7 < out.std() < 1.4
    weight = given["quantized"].float() * given["quantized_weight_scale_inv"][0, 0, 0]
    assert 0.9 < weight.std() * 256**0.5 < 1.1
    assert (given["norm"] == 1).all() and (given["bias"] == 0).all()
    again = given["linear"].clone()
    initialise(model)
    assert torch.equal(again, given["linear"])


def test_shards_of_the_head_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Module()
    for name in ("lm_head", "router"):
        model.register_buffer(name, torch.empty(8, 16))
    found = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        initialise(model)
        found.append({name: one.clone() for name, one in model.named_buffers()})

    one, other = found
    assert not torch.equal(one["lm_head"], other["lm_head"])
    assert torch.equal(one["router"], other["router"]), "all ranks have the whole of it"


def test_random_experts_are_alike_and_layers_add_little() -> None:
    model = torch.nn.Module()
    layers = model.layers = torch.nn.ModuleList([torch.nn.Module() for _ in range(8)])
    layers[7].register_buffer("experts", torch.empty(4, 256, 256))
    layers[7].register_buffer("o_proj", torch.empty(256, 256))
    layers[7].register_buffer("q_b_proj", torch.empty(256, 256))

    initialise(model)
    given = dict(model.named_buffers())
    one, other = given["layers.7.experts"][:2]
    assert 0.2 < (one - other).norm() / one.norm() < 0.35
    assert 0.9 < given["layers.7.o_proj"].std() * 16 * 4 < 1.1, "8 layers add twice each"
    assert given["layers.7.q_b_proj"].std() * 16 > 1.2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"plugin": true}]', "no name"),
        ('[{"name": "a"}, {"name": "a"}]', "of its own"),
        ('[{"name": "a", "graphs": 1}]', "unknown in configuration a: graphs"),
        ("[]", "of its own"),
        ('[{"name": "a", "plugin": true, "pass_mode": "graph"}]', "not 'graph'"),
        ('[{"name": "a", "pass_mode": "decode_graph"}]', "needs the plug-in"),
    ],
)
def test_wrong_configurations_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parsed(text)
