"""Ranks as real processes that steer made-up engines, and talk to each other by gloo.

    python -m tests.engines.sglang.pass_mode.rank_processes SCENARIO.json FOLDER

starts one process a rank; each writes FOLDER/RANK.json. The plug-in's hooks, its agreement and the
gathering out of SGLang's wheel are the real ones. A pass is one gathering of what the rank runs: a
rank that runs something else is seen by all, and a rank that runs more or fewer passes than the
others ends the test by gloo's timeout.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from nsa_tune.engines.edge import EngineMustStop
from nsa_tune.engines.sglang import switch
from nsa_tune.engines.sglang.pass_mode import hooks, start
from nsa_tune.engines.sglang.pass_mode.dense import capture
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.ranks.gathered import around_gather
from nsa_tune.engines.sglang.pass_mode.steering.steering import DENSE, EAGER
from nsa_tune.engines.sglang.pass_mode.steering.watch import Watch
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from tests.engines.sglang.pass_mode.fakes import Dense, Mode, batch, original
from tests.engines.sglang.wheels import wheel_of

_SIZES, _ROWS = (64, 512, 2048), (8, 64, 256)
_GLOO_S = 60.0
_SYNC = "sglang/srt/managers/scheduler_components/dp_attn.py"
_CONTEXTS = (1024, 4096, 65536)


class Fault(StrEnum):
    """What goes wrong on one rank."""

    NONE = "none"
    NO_TABLE = "no table"
    OTHER_TABLE = "another table, reloaded now and then"
    OTHER_KEY = "another version of nsa-tune, say"
    NO_PLUGIN = "the plug-in is not installed"
    KILLED = "killed before it says anything"
    CANNOT_MEASURE = "out of memory in the first measured pass, while the others wait"
    ALL_FAIL = "every rank fails alike"
    LOSES = "decode graphs lose by its clock"
    PAUSED = "paused now and then"


_SILENT = (Fault.KILLED, Fault.NO_PLUGIN, Fault.CANNOT_MEASURE)
"""What keeps a rank from answering."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the ranks go through."""

    ranks: int
    passes: int
    version: str | None = None
    """SGLang's, with data-parallel attention; None for tensor parallelism alone."""
    fault: Fault = Fault.NONE
    odd: int = 1
    """The rank on which it happens."""
    seed: int = 1
    attn_tp: int = 1
    """Ranks that share each data-parallel batch; only the first of them is heard by the others."""


class _Group:
    """SGLang's tensor-parallel group."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank_in_group, self.world_size = rank, ranks
        self.active_ranks_cpu = torch.ones(ranks, dtype=torch.int32)

    def broadcast_object(self, obj: Any, src: int) -> Any:
        found = [obj]
        dist.broadcast_object_list(found, src=src)
        return found[0]


class _Event:
    """A clock by which decode graphs may lose."""

    engine: _Engine

    def record(self) -> None:
        """Nothing is on a device."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        engine = _Event.engine
        if engine.steering.last is PassMode.ENGINE:
            return 1.0
        loses = engine.suffers(Fault.LOSES) and engine.steering.last is PassMode.DECODE_GRAPH
        return 1e6 if loses else 1e-3


class _Table:
    """The plug-in's own hand on prefill kernels, by a table that only this rank has."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.source = f"a table of process {os.getpid()}"

    @property
    def has_changed(self) -> bool:
        return self._random.random() < 0.5


class _Engine:
    """One rank's engine: what runs in a pass is gathered from all ranks."""

    is_draft_worker = False

    def __init__(self, rank: int, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rank = rank
        self.tp_group = _Group(rank, scenario.ranks)
        self.attn_backend = SimpleNamespace(dsa_index_topk=2048)
        self.token_to_kv_pool = SimpleNamespace()
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.log: list[str] = []
        self.mixed: list[str] = []
        self._kinds: list[str] = []
        self._own = Random(1000 * scenario.seed + rank)
        self._batches = Random(1000 * scenario.seed + rank // scenario.attn_tp)
        self._forward = original([])
        if not self.suffers(Fault.NO_TABLE):
            self._new_table()

    def suffers(self, fault: Fault) -> bool:
        """Whether this is the rank on which `fault` happens."""
        return self.scenario.fault is fault and self.rank == self.scenario.odd

    @property
    def steering(self) -> Any:
        return self.__dict__.get(start.STEERING)

    def init_cuda_graphs(self) -> None:
        """SGLang's own, which captures graphs."""
        dense: dict[PassMode, Any] = {PassMode.DENSE_GRAPH: Dense(_SIZES)}
        self.prefill_cuda_graph_runner = SimpleNamespace(
            capture_num_tokens=list(_SIZES), backend=SimpleNamespace(),
            **{capture._CAPTURED: dense},
        )  # fmt: skip
        self.decode_cuda_graph_runner = SimpleNamespace(capture_bs=list(_ROWS))

    def forward_raw(self, forward_batch: Any, *rest: Any) -> Any:
        """SGLang's `_forward_raw`: one gathering of what this rank runs."""
        kind = self._kind(forward_batch)
        self._kinds.append(kind)
        mine = torch.frombuffer(bytearray(kind.ljust(48)[:48].encode()), dtype=torch.uint8)
        everywhere = torch.zeros(48 * self.scenario.ranks, dtype=torch.uint8)
        dist.all_gather_into_tensor(everywhere, mine)
        kinds = {bytes(one.tolist()) for one in everywhere.view(self.scenario.ranks, 48)}
        if len(kinds) > 1:
            self.mixed.append(f"pass {len(self.log)}: {sorted(one.decode() for one in kinds)}")
        return self._forward(self, _with_rows(forward_batch), *rest)

    def _kind(self, one: Any) -> str:
        """What SGLang runs for a batch, by the rules of its runners."""
        graphs = self.prefill_cuda_graph_runner
        if self.scenario.version is not None:
            return self._kind_of_all(one)
        if one.forward_mode is Mode.DECODE:
            return f"decode graph {_padded(_ROWS, one.batch_size)}"
        if EAGER in graphs.__dict__:
            return f"eager {one.extend_num_tokens}"
        dense = graphs.backend.__dict__.get(DENSE)
        size = _padded(_SIZES, one.extend_num_tokens)
        return f"{dense.kind if dense else 'prefill graph'} {size}"

    def _kind_of_all(self, one: Any) -> str:
        """The same with data-parallel attention: from what was gathered, and the batch's fields."""
        tokens = one.original_global_num_tokens_cpu
        if one.forward_mode in (Mode.DECODE, Mode.IDLE) and one.can_run_dp_cuda_graph:
            return f"decode graph {_padded(_ROWS, max(tokens))}"
        fits = max(tokens) <= _SIZES[-1] and one.is_extend_in_batch
        if one.can_run_dp_breakable_cuda_graph and fits:
            dense = self.prefill_cuda_graph_runner.backend.__dict__.get(DENSE)
            return f"{dense.kind if dense else 'prefill graph'} {_padded(_SIZES, max(tokens))}"
        return f"eager {sum(tokens)}"

    def run(self) -> None:
        """Run all passes, as the scheduler would."""
        steps = _shared_steps(self.scenario)
        if self.scenario.version is not None:
            steps = self._own_steps()
        for i, forward_batch in enumerate(steps):
            if self.suffers(Fault.OTHER_TABLE) and i % 50 == 0:
                self._new_table()
            if self.suffers(Fault.PAUSED) and i % 3 == 0:
                (switch.resume if i % 2 else switch.pause)()
            self._kinds.clear()
            if self.suffers(Fault.NO_PLUGIN):
                self.forward_raw(forward_batch)
            else:
                hooks.around_forward(_Engine.forward_raw, self, forward_batch)
            way = self.steering.last if self.steering is not None else "off"
            self.log.append(" + ".join([str(way), *self._kinds]))

    def _new_table(self) -> None:
        self.attn_backend._nsa_tune_prefill = _Table(self._own)

    def _own_steps(self) -> Iterator[Any]:
        """Passes of data-parallel ranks: each has a batch of its own, or none."""
        adapter, shared = _Adapter(self), Random(self.scenario.seed)
        for _ in range(self.scenario.passes):
            burst = shared.random() < 0.2
            scheduled = _prompts(self._batches) if burst else _scheduled(self._batches)
            around = self.scenario.fault is not Fault.NO_PLUGIN or not self.suffers(
                self.scenario.fault
            )
            if around:
                found = hooks.around_sync(_Adapter.prepare, adapter, scheduled)
            else:
                found = adapter.prepare(scheduled)
            # Where no rank has anything, none runs a pass.
            if found is not None:
                yield _forward_batch(found)


class _Adapter:
    """SGLang's SchedulerDPAttnAdapter, as far as passes are gathered, out of the wheel."""

    def __init__(self, engine: _Engine) -> None:
        self.model_runner = engine
        version = engine.scenario.version
        assert version is not None
        self._groups = engine.scenario.ranks // engine.scenario.attn_tp
        wheel = wheel_of(version)
        names: dict[str, Any] = {
            "__name__": __name__,
            "dataclass": dataclass, "torch": torch, "ForwardMode": Mode, "Optional": object,
            "get_tp_group": lambda: engine.tp_group, "_ENABLE_METRICS_DP_ATTENTION": False,
            "get_parallel": lambda: SimpleNamespace(tp_group=engine.tp_group),
            "time": __import__("time"), "envs": _NoVariables(),
        }  # fmt: skip
        if wheel.has(_SYNC, "exchange_sync_rows"):
            names["all_gather_single"] = dist.all_gather_into_tensor
            names["exchange_sync_rows"] = wheel.compiled(_SYNC, "exchange_sync_rows", names)
        self._info = wheel.compiled(_SYNC, "MLPSyncBatchInfo", names)
        own = self._info.all_gather
        if not engine.suffers(Fault.NO_PLUGIN):
            self._info.all_gather = lambda info, *rest, **named: around_gather(
                own, info, *rest, **named
            )
        self._update = wheel.compiled(_SYNC, "_update_gather_batch", names)

    def prepare(self, local_batch: Any) -> Any:
        """`prepare_mlp_sync_batch_raw`, without what it computes for others."""
        mode = Mode.IDLE if local_batch is None else local_batch.forward_mode
        tokens = 0 if local_batch is None else local_batch.tokens
        decodes = mode in (Mode.DECODE, Mode.IDLE)
        fits = _SIZES[-1] >= tokens and 2 * tokens >= (_padded(_SIZES, tokens) or 0)
        given = {
            "num_tokens": tokens, "num_tokens_for_logprob": tokens, "local_can_run_tbo": False,
            "can_run_decode_cuda_graph": decodes, "local_forward_mode": mode.value,
            "can_run_prefill_cuda_graph": mode is Mode.IDLE or (mode is Mode.EXTEND and fits),
            "can_run_draft_cuda_graph": True, "is_extend_in_batch": not decodes,
            "dp_size": self._groups, "tp_size": self.model_runner.scenario.attn_tp, "cp_size": 1,
            "num_dp_ranks": self._groups,
        }  # fmt: skip
        wanted = {one.name for one in fields(self._info)}
        info = self._info(**{name: value for name, value in given.items() if name in wanted})
        info.all_gather("cpu", dist.group.WORLD)
        if max(info.global_num_tokens) == 0:
            return None
        found = local_batch if local_batch is not None else _idle()
        self._update(found, info, True)
        return found


class _NoVariables:
    """SGLang's environment variables, all unset."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(get=lambda: False)


def _scheduled(random: Random) -> Any:
    """A ScheduleBatch: a prefill, a decode, a mixed batch, or nothing to do."""
    kind = random.choice(("prefill", "prefill", "decode", "decode", "idle", "mixed"))
    if kind == "idle":
        return None
    count = random.randrange(1, 5)
    prefix_lens = [random.choice((0, 0, 500, 6000, 50_000)) for _ in range(count)]
    extend_lens = [random.choice((1, 3, 20, 60, 120, 600)) for _ in range(count)]
    if random.random() < 0.4:
        prefix_lens = [0] * count
    if kind == "decode":
        extend_lens = [1] * count
    mode = {"prefill": Mode.EXTEND, "decode": Mode.DECODE, "mixed": Mode.MIXED}[kind]
    asks = kind == "prefill" and random.random() < 0.1
    return _schedule_batch(mode, prefix_lens, extend_lens, return_logprob=asks)


def _prompts(random: Random) -> Any:
    """A prefill of short prompts, as all ranks have when many requests come at once."""
    extend_lens = [random.choice((90, 200, 400)) for _ in range(random.randrange(1, 4))]
    return _schedule_batch(Mode.EXTEND, [0] * len(extend_lens), extend_lens)


def _idle() -> Any:
    return _schedule_batch(Mode.IDLE, [], [])


def _schedule_batch(
    mode: Mode, prefix_lens: list[int], extend_lens: list[int], **changes: Any
) -> Any:
    kv_lens = [prefix + new for prefix, new in zip(prefix_lens, extend_lens, strict=True)]
    given: dict[str, Any] = {
        "forward_mode": mode, "prefix_lens": prefix_lens, "extend_lens": extend_lens,
        "seq_lens_cpu": torch.tensor(kv_lens), "tokens": sum(extend_lens),
        "return_logprob": False, "return_hidden_states": False, "input_embeds": None,
        "replace_embeds": None, "multimodal_inputs": None, "spec_info": None,
        "dllm_config": None, "encoder_lens": None,
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changes})


def _forward_batch(scheduled: Any) -> Any:
    """The ForwardBatch of a ScheduleBatch, after `_update_gather_batch`."""
    lens = scheduled.prefix_lens, scheduled.extend_lens
    found = batch(*lens) if scheduled.extend_lens else batch([0], [1], batch_size=0)
    found.forward_mode = scheduled.forward_mode
    found.original_global_num_tokens_cpu = scheduled.global_num_tokens
    found.global_num_tokens_cpu = scheduled.global_num_tokens
    found.is_extend_in_batch = scheduled.is_extend_in_batch
    own = vars(scheduled)
    found.can_run_dp_cuda_graph = own.get(
        "can_run_dp_cuda_graph", own.get("can_run_decode_cuda_graph")
    )
    found.can_run_dp_breakable_cuda_graph = own.get(
        "can_run_dp_breakable_cuda_graph", own.get("can_run_dp_prefill_cuda_graph")
    )
    return found


def _with_rows(forward_batch: Any) -> Any:
    """An idle rank's batch as the made-up forward takes it."""
    if forward_batch.forward_mode is Mode.IDLE:
        return batch([0], [1], forward_mode=Mode.DECODE, batch_size=1)
    return forward_batch


def _shared_steps(scenario: Scenario) -> Iterator[Any]:
    """Passes of tensor-parallel ranks, which all have the same batches."""
    random = Random(scenario.seed)
    for _ in range(scenario.passes):
        scheduled = None
        while scheduled is None:
            scheduled = _scheduled(random)
        found = batch(scheduled.prefix_lens, scheduled.extend_lens)
        found.forward_mode = scheduled.forward_mode
        yield found


def _padded(sizes: tuple[int, ...], tokens: int) -> int | None:
    return next((size for size in sizes if size >= tokens), None)


def _measured(engine: _Engine) -> list[PassTime]:
    """Times that are this rank's own: all must go by rank 0's."""
    if engine.scenario.fault is Fault.ALL_FAIL:
        raise RuntimeError("made up: it fails everywhere")
    if engine.suffers(Fault.CANNOT_MEASURE):
        raise RuntimeError("made up: out of memory")
    dist.barrier()
    random = Random(engine.rank)
    modes = (
        (PassMode.ENGINE, _SIZES, 100_000.0), (PassMode.TABLE_KERNEL, _SIZES, 98_000.0),
        (PassMode.EAGER, _SIZES, 75_000.0), (PassMode.DENSE_GRAPH, _SIZES, 40_000.0),
        (PassMode.DECODE_GRAPH, _ROWS, 45_000.0),
    )  # fmt: skip
    return [
        PassTime(mode, size, context, base_us * random.uniform(0.8, 1.2), selects)
        for mode, sizes, base_us in modes
        for size in sizes
        for context in _CONTEXTS
        for selects in ((False,) if mode is PassMode.DECODE_GRAPH else (False, True))
    ]


def _rank(rank: int, port: int, scenario: Scenario, folder: Path) -> None:
    # Those who wait for somebody who never comes wait for all of it; the others have time.
    agree_s = "3" if scenario.fault in _SILENT else "30"
    os.environ |= {"NSA_TUNE_AGREE_S": agree_s, "XDG_DATA_HOME": str(folder / str(rank))}
    logging.basicConfig(filename=folder / f"{rank}.log", level=logging.INFO)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_GLOO_S))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=scenario.ranks,
        timeout=timedelta(seconds=_GLOO_S),
    )  # fmt: skip
    # Connected, whoever ends next.
    dist.barrier()
    engine = _Event.engine = _Engine(rank, scenario)
    if engine.suffers(Fault.KILLED):
        os._exit(9)
    key = {"gpu": "made up", "version": "2" if engine.suffers(Fault.OTHER_KEY) else "1"}
    _patch(key, scenario)
    stopped = None
    try:
        if engine.suffers(Fault.NO_PLUGIN):
            engine.init_cuda_graphs()
        else:
            hooks.around_init_graphs(_Engine.init_cuda_graphs, engine)
    except EngineMustStop as error:
        stopped = str(error)
    if stopped is None and scenario.fault not in (Fault.KILLED, Fault.CANNOT_MEASURE):
        engine.run()
    (folder / f"{rank}.json").write_text(json.dumps({
        "steers": engine.steering is not None, "stopped": stopped, "log": engine.log,
        "mixed": engine.mixed,
        "times": [one.pass_us for one in engine.steering.times.times] if engine.steering else [],
    }))  # fmt: skip
    # As SGLang's parent would, when one of its processes ends.
    os._exit(0)


def _patch(key: dict[str, str], scenario: Scenario) -> None:
    """Whatever would look at a GPU or at SGLang itself."""
    parts: Any = start
    parts.why_not = parts.why_no_decode_graphs = lambda runner: None
    parts.data_parallel = lambda runner: scenario.version is not None
    parts._key = lambda runner, graphs: key
    parts.measure = lambda runner, steering: _measured(runner)
    parts._peak_from_now = lambda: 0
    parts.Watch = lambda clock: Watch(_Event)


def main(arguments: list[str]) -> int:
    """Start the ranks and wait for them; 0 where none is left over."""
    given = json.loads(Path(arguments[0]).read_text())
    scenario = Scenario(**(given | {"fault": Fault(given["fault"])}))
    children, pipes = [], []
    for rank in range(scenario.ranks):
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            try:
                _rank(rank, int(os.read(reads, 16)), scenario, Path(arguments[1]))
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        children.append(child)
        pipes.append(writes)
    # Only now: it has threads, and a process that forks should have none.
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_GLOO_S)
    )
    for writes in pipes:
        os.write(writes, str(store.port).encode())
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.stdout.write(f"{codes}\n")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
