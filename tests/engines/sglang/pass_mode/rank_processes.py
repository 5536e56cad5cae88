"""Ranks as real processes that steer made-up engines, and talk to each other by gloo.

    python -m tests.engines.sglang.pass_mode.rank_processes

starts one process a rank for each folder of a scenario.json whose name is a line of stdin; each
writes RANK.json there. Torch is loaded once for all scenarios. The plug-in's hooks and its
agreement are the real ones. A pass is one gathering of what the rank runs: a rank that runs
something else is seen by all, and a rank that runs more or fewer passes than the others ends the
test by gloo's timeout.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from nsa_tune.engines.edge import EngineMustStop
from nsa_tune.engines.sglang import backend
from nsa_tune.engines.sglang.kernels.swap import KernelSwap, Timing, Wins
from nsa_tune.engines.sglang.pass_mode import hooks, start
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.steering.monitor import RegressionMonitor
from nsa_tune.engines.sglang.pass_mode.steering.steering import EAGER, GRAPHS
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.whole_pass import capture
from nsa_tune.engines.sglang.pass_mode.whole_pass.graph_buffers import GraphBuffers
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import Kind
from nsa_tune.engines.sglang.prefill import PROVEN_KERNEL, around_prefill
from nsa_tune.engines.sglang.switch import Part
from tests.engines.sglang.pass_mode.fakes import Dense, Hidden, Mode, Speculation, batch, original

_SIZES, _ROWS = (64, 512, 2048), (8, 64, 256)
_GLOO_S = 60.0
_LONGEST_S = 600
"""Gloo gives up long before: a rank that waits for ever fails the test by its own error."""
_CONTEXTS = (1024, 4096, 65536)
FAILS_AT = 300
"""The pass from which on something fails, where it did not at the start."""


class Fault(StrEnum):
    """What goes wrong on one rank."""

    NONE = "none"
    NO_TABLE = "no table"
    OTHER_TABLE = "another table, reloaded now and then"
    OTHER_KEY = "another version of nsa-tune, say"
    NO_PLUGIN = "the plug-in is not installed"
    KILLED = "killed before it says anything"
    CANNOT_MEASURE = "out of memory in the first measured pass, while the others wait"
    CANNOT_CAPTURE = "its dense graphs could not be captured"
    WRONG = "its dense graphs compute something else"
    SLOW = "dense graphs take longer than SGLang's own passes, by rank 0's clock"
    WAY_FAILS = "decode graphs raise before any rank waits"
    ALL_FAIL = "every rank fails alike"
    LOSES = "decode graphs lose by its clock"
    OTHER_CLOCK = "passes are timed for real, by clocks that differ"
    HOOKS_FAIL = "its kernel and its table's hand on prefills raise after some passes"
    CLOCK_FAILS = "its clock raises after some passes"


_SILENT = (Fault.KILLED, Fault.NO_PLUGIN, Fault.CANNOT_MEASURE)
"""What keeps a rank from answering."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the ranks go through."""

    ranks: int
    passes: int
    fault: Fault = Fault.NONE
    odd: int = 1
    """The rank on which it happens."""
    seed: int = 1
    width: int = 1
    """Rows of a request in decode graphs; more than one with speculative decoding."""


class _Group:
    """SGLang's tensor-parallel group."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank_in_group, self.world_size = rank, ranks

    def broadcast_object(self, obj: Any, src: int) -> Any:
        objects = [obj]
        dist.broadcast_object_list(objects, src=src)
        return objects[0]

    def all_gather_object(self, obj: Any) -> list[Any]:
        objects = [None] * self.world_size
        dist.all_gather_object(objects, obj)
        return objects


class _Event:
    """A clock by which decode graphs may lose."""

    engine: _Engine

    def record(self) -> None:
        """Nothing is on a device."""
        _Event.engine.fail_later(Fault.CLOCK_FAILS)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        engine = _Event.engine
        if engine.steering.last is PassMode.ENGINE:
            return 1.0
        loses = engine.suffers(Fault.LOSES) and engine.steering.last is PassMode.DECODE_GRAPH
        return 1e6 if loses else 1e-3


class _Captured(Dense):
    """Dense graphs, which one rank may not be able to capture."""

    def __init__(self, graphs: Any, index_topk: int, kind: Kind) -> None:
        super().__init__([], kind)
        self._engine: _Engine = graphs.model_runner
        self._wanted = list(graphs.capture_num_tokens)

    def wanted(self) -> list[int]:
        """The sizes to capture."""
        return self._wanted

    def scratch_bytes(self) -> int:
        """Memory that capturing takes besides."""
        return 0

    def capture(self, size: int) -> None:
        """Capture one size."""
        if self._engine.suffers(Fault.CANNOT_CAPTURE) and size < _SIZES[-1]:
            raise RuntimeError("made up: out of memory")
        self.sizes = sorted([*self.sizes, size])


class _Table:
    """The plug-in's own hand on prefill kernels, by a table that only this rank has."""

    def __init__(self, engine: _Engine) -> None:
        self._engine, self._random, self.shared_keys = engine, engine.own, None
        impls, source = frozenset({"fa3", "triton_sparse_mla"}), f"a table of process {os.getpid()}"
        self.answers = SimpleNamespace(impls=impls, source=source)

    @property
    def has_changed(self) -> bool:
        return self._random.random() < 0.5

    def give_back(self, *_: Any) -> None:
        """It has changed nothing, and logs nothing."""

    abandon = note = give_back

    def steer(self, forward_batch: Any) -> bool:
        self._engine.fail_later(Fault.HOOKS_FAIL)
        backend = self._engine.attn_backend
        backend.dsa_prefill_impl = vars(backend).get(PROVEN_KERNEL, "fa3")
        return True


class _Engine:
    """One rank's engine: what runs in a pass is gathered from all ranks."""

    is_draft_worker = False

    def __init__(self, rank: int, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rank = rank
        self.tp_group = _Group(rank, scenario.ranks)
        self.attn_backend = SimpleNamespace(dsa_index_topk=2048, dsa_prefill_impl="fa3")
        self.token_to_kv_pool = SimpleNamespace()
        self.spec_algorithm = Speculation.EAGLE if scenario.width > 1 else Speculation.NONE
        self.max_total_num_tokens = 60_000
        self.model_config = SimpleNamespace(
            context_len=50_000, vocab_size=1000, num_hidden_layers=4
        )
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.zeros(20, 50_100, dtype=torch.int32)
        )
        self.serves = False
        self.log: list[str] = []
        self.mixed: list[str] = []
        self._kinds: list[str] = []
        self.own = Random(1000 * scenario.seed + rank)
        self.swap = KernelSwap("made_up", Part.COPIES, "copies", ("rows",), lambda _: iter(()))
        self.swap.wins = Wins([Timing((1,), 2.0, 1.0)], 0.0, beyond=True)
        self.swapped: list[bool] = []
        self._forward = original([])

    def suffers(self, fault: Fault) -> bool:
        """Whether this is the rank on which `fault` happens."""
        return self.scenario.fault is fault and self.rank == self.scenario.odd

    def fail_later(self, fault: Fault) -> None:
        """Raise if `fault` happens on this rank, when it has run for a while."""
        if self.suffers(fault) and len(self.log) >= FAILS_AT:
            raise RuntimeError("made up: it fails later")

    def _kernel(self) -> bool:
        self.fail_later(Fault.HOOKS_FAIL)
        return True

    @property
    def steering(self) -> Any:
        return self.__dict__.get(start.STEERING)

    def init_cuda_graphs(self) -> None:
        """SGLang's own, which captures graphs."""
        self.prefill_cuda_graph_runner = SimpleNamespace(
            capture_num_tokens=list(_SIZES), backend=SimpleNamespace(), device="cpu",
            capture_prepare=lambda size: (batch([0], [size]), "backend"), model_runner=self,
        )  # fmt: skip
        if not self.suffers(Fault.NO_PLUGIN):
            hooks.around_capture(lambda graphs: None, self.prefill_cuda_graph_runner)
        self.decode_cuda_graph_runner = SimpleNamespace(
            capture_bs=list(_ROWS), captured_req_width=self.scenario.width,
            capture_hidden_mode=Hidden.FULL,
        )  # fmt: skip

    def _forward_raw(self, forward_batch: Any, *rest: Any) -> Any:
        """With the plug-in's hook."""
        return hooks.around_forward(_Engine.forward_raw, self, forward_batch, *rest)

    def forward_raw(self, forward_batch: Any, *rest: Any) -> Any:
        """SGLang's `_forward_raw`: one gathering of what this rank runs."""
        kind = self._kind(forward_batch)
        if self.scenario.fault is Fault.WAY_FAILS and kind.startswith("decode") and not self.serves:
            raise RuntimeError("made up: no such kernel")
        self._kinds.append(kind)
        mine = torch.frombuffer(bytearray(kind.ljust(48)[:48].encode()), dtype=torch.uint8)
        everywhere = torch.zeros(48 * self.scenario.ranks, dtype=torch.uint8)
        dist.all_gather_into_tensor(everywhere, mine)
        kinds = {bytes(row.tolist()).decode() for row in everywhere.view(self.scenario.ranks, 48)}
        if len(kinds) > 1:
            self.mixed.append(f"pass {len(self.log)}: {sorted(kinds)}")
        if not kind.startswith("decode"):
            around_prefill(lambda *_: None, self.attn_backend, forward_batch)
            self.swapped.append(self.swap.takes((1,)) and self.swap.run(self._kernel) is True)
        output = self._forward(self, forward_batch, *rest)
        if self.suffers(Fault.WRONG) and kind.startswith(str(Kind.MHA)):
            logits = output.logits_output
            logits.next_token_logits = logits.next_token_logits.flip(0, 1)
        return output

    def _kind(self, forward_batch: Any) -> str:
        """What SGLang runs for a batch, by the rules of its runners."""
        graphs = self.prefill_cuda_graph_runner
        if forward_batch.forward_mode in (Mode.DECODE, Mode.TARGET_VERIFY):
            return f"decode graph {_padded(_ROWS, forward_batch.batch_size)}"
        # Attention does not communicate: a table that fails later leaves its own rank alone.
        shown = self.scenario.fault is not Fault.HOOKS_FAIL
        by = " by a table" * (shown and hasattr(self.attn_backend, "_nsa_tune_prefill"))
        if EAGER in graphs.__dict__:
            return f"eager {forward_batch.extend_num_tokens}{by}"
        dense = graphs.backend.__dict__.get(GRAPHS)
        size = _padded(_SIZES, forward_batch.extend_num_tokens)
        return f"{dense.kind if dense else 'prefill graph'} {size}{by}"

    def run(self) -> None:
        """Run all passes, as the scheduler would."""
        self.serves = True
        for i, forward_batch in enumerate(_batches(self.scenario)):
            if self.suffers(Fault.OTHER_TABLE) and i % 50 == 0:
                self.new_table()
            self._kinds.clear()
            if self.suffers(Fault.NO_PLUGIN):
                self.forward_raw(forward_batch)
            else:
                self._forward_raw(forward_batch)
            way = self.steering.last if self.steering is not None else "off"
            self.log.append(" + ".join([str(way), *self._kinds]))

    def new_table(self) -> None:
        """Have a table choose the prefill kernels."""
        self.attn_backend._nsa_tune_prefill = _Table(self)


def _batches(scenario: Scenario) -> Iterator[Any]:
    """What all ranks run: prefills, decodes and mixed batches."""
    random = Random(scenario.seed)
    for _ in range(scenario.passes):
        mode = random.choice((Mode.EXTEND, Mode.EXTEND, Mode.DECODE, Mode.DECODE, Mode.MIXED))
        count = random.randrange(1, 5)
        prefix_lens = [random.choice((0, 0, 500, 6000, 50_000)) for _ in range(count)]
        extend_lens = [random.choice((1, 3, 20, 60, 120, 600)) for _ in range(count)]
        if random.random() < 0.4:
            prefix_lens = [0] * count
        if mode is Mode.DECODE:
            extend_lens = [1] * count
        asks = mode is Mode.EXTEND and random.random() < 0.1
        yield batch(prefix_lens, extend_lens, forward_mode=mode, return_logprob=asks)


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
    dense_us = 150_000.0 if engine.scenario.fault is Fault.SLOW else 40_000.0
    modes = (
        (PassMode.ENGINE, _SIZES, 100_000.0), (PassMode.TABLE_KERNEL, _SIZES, 98_000.0),
        (PassMode.EAGER, _SIZES, 75_000.0), (PassMode.DENSE_GRAPH, _SIZES, dense_us),
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
    _patch(key, engine)
    stopped = None
    if not engine.suffers(Fault.NO_PLUGIN):
        backend.around_init(lambda *_: None, engine.attn_backend, engine)
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
        "mixed": engine.mixed, "swapped": engine.swapped,
        "times": [time.pass_us for time in engine.steering.times.times] if engine.steering else [],
        "verdicts": engine.steering.times.verdicts if engine.steering else {},
    }))  # fmt: skip
    # As SGLang's parent would, when one of its processes ends.
    os._exit(0)


def _synchronize(own: Random) -> None:
    """What the GPU takes, as long on no two ranks."""
    time.sleep(own.choice((0.0, 0.0005)))


def _patch(key: dict[str, str], engine: _Engine) -> None:
    """Whatever would look at a GPU or at SGLang itself."""
    parts: Any = start
    captures: Any = capture
    backends: Any = backend
    backends.installed_release = lambda: SimpleNamespace(known=True)
    table = None if engine.suffers(Fault.NO_TABLE) else ("its rows", engine.new_table)
    backends._prepared = lambda *_: table
    backends.check_hooks = lambda _: None
    absent = (Part.DENSE_MLA, Part.SPARSE)
    captures.why_not = lambda part, engine: "not here" if part in absent else None
    torch.cuda.mem_get_info = lambda *_: (2**34, 2**35)
    captures.DenseGraphs = _Captured
    captures.GraphBuffers = SimpleNamespace(of_engine=lambda: GraphBuffers([]))
    parts._why_not = lambda runner: None
    parts.why_not = lambda part, engine: None
    parts._key = lambda runner, graphs: key
    if engine.scenario.fault is Fault.OTHER_CLOCK:
        torch.cuda.synchronize = partial(_synchronize, Random(engine.rank))
    else:
        parts.measure = lambda runner, steering, only: _measured(runner)
    parts._peak_from_now = lambda: 0
    parts.RegressionMonitor = lambda clock: RegressionMonitor(_Event)


def main() -> None:
    """Run what stdin asks for, one scenario after the other, and answer with a line to each."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        child = os.fork()
        if not child:
            os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT, 0o600), 2)
            signal.alarm(_LONGEST_S)
            try:
                _started(folder)
                os._exit(0)
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        os.waitpid(child, 0)
        sys.stdout.write("ended\n")
        sys.stdout.flush()


def _started(folder: Path) -> None:
    """Start the ranks, wait for them, and write how each ended."""
    given = json.loads((folder / "scenario.json").read_text())
    scenario = Scenario(**(given | {"fault": Fault(given["fault"])}))
    children, pipes = [], []
    for rank in range(scenario.ranks):
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            try:
                _rank(rank, int(os.read(reads, 16)), scenario, folder)
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
    (folder / "codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
