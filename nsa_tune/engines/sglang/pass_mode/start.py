"""When an engine has started: its passes are measured, unless they are known, and then steered."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from nsa_tune import __version__
from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.sglang.edge import attempt, say_once
from nsa_tune.engines.sglang.eligible import Engine, Part, switch_is_on, why_not
from nsa_tune.engines.sglang.facts import facts_of
from nsa_tune.engines.sglang.pass_mode.calibration import MEASURED, contexts, measure
from nsa_tune.engines.sglang.pass_mode.dense.capture import captured, captured_mib
from nsa_tune.engines.sglang.pass_mode.ranks import Ranks
from nsa_tune.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.engines.sglang.pass_mode.steering.monitor import RegressionMonitor
from nsa_tune.engines.sglang.pass_mode.steering.steering import Steering
from nsa_tune.engines.sglang.pass_mode.times import remembered
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.prefill import source_of
from nsa_tune.engines.sglang.releases import installed_version, release_of
from nsa_tune.engines.symbols import Symbol, hooks_on

STEERING = "_nsa_tune_pass_mode"
"""Attribute of a ModelRunner whose passes are steered."""
_ARGUMENTS = (
    "dtype", "quantization", "load_format", "moe_runner_backend", "ep_size", "nnodes",
    "disable_custom_all_reduce", "enforce_disable_flashinfer_allreduce_fusion",
    "enable_torch_symm_mem", "enable_mscclpp",
)  # fmt: skip
"""SGLang's arguments that change what the layers take besides attention."""
_DECIDE = frozenset({"forward", "can_run", "prepare_metadata", "replay"})
"""Hooks without which a rank would run a pass otherwise than it decides."""


def attach(runner: Any) -> None:
    """Have the passes of a ModelRunner steered, if nothing speaks against it on any rank."""
    import torch

    if runner.is_draft_worker:
        return
    reason = _why_not(runner)
    graphs = getattr(runner, "prefill_cuda_graph_runner", None)
    ranks = Ranks(runner)
    if reason is not None:
        say_once(logging.INFO, f"SGLang decides by itself how prefills run: {reason}")
        ranks.agree("pass_mode", None)
        return
    # All that may fail on one rank alone, for from here on they wait for each other.
    key, steering = _key(runner, graphs), _steering(runner, ranks)
    if not ranks.agree("pass_mode", repr(key)):
        say_once(logging.WARNING, "SGLang decides how prefills run: its ranks do not agree")
        return
    with ExitStack() as undo:
        setattr(runner, STEERING, steering)
        undo.callback(delattr, runner, STEERING)
        times = ranks.together(
            "measuring how passes run", lambda: _times(runner, steering, ranks, key)
        )
        if times is None:
            text = "SGLang decides how prefills run: another rank measured nothing"
            say_once(logging.WARNING, text)
            return
        undo.pop_all()
    steering.times = times
    steering.monitor = RegressionMonitor(lambda: torch.cuda.Event(enable_timing=True))


def _why_not(runner: Any) -> str | None:
    """Why all passes of a model runner run as SGLang has them; None where they need not."""
    reason = why_not(Part.PASSES, Engine.of(runner))
    if reason is None:
        try:
            facts_of(runner.attn_backend, runner)
        except LeftAlone as error:
            return str(error)
    return reason


def _row_graphs(runner: Any) -> RowGraphs | None:
    """The decode graphs that may run a prefill."""
    reason = why_not(Part.DECODE_GRAPHS, Engine.of(runner))
    if reason is None:
        return RowGraphs.of(runner)
    say_once(logging.INFO, f"no prefill runs by decode graphs: {reason}")
    return None


def _steering(runner: Any, ranks: Ranks) -> Steering:
    dense = captured(runner.prefill_cuda_graph_runner)
    index_topk, decode = runner.attn_backend.dsa_index_topk, _row_graphs(runner)
    return Steering(runner, index_topk, ranks, dense=dense, decode=decode)


def _times(runner: Any, steering: Steering, ranks: Ranks, key: Mapping[str, object]) -> PassTimes:
    """What passes take here: as remembered from an earlier start, or measured now."""
    import torch

    table = source_of(runner.attn_backend)
    first = ranks.rank == 0
    # What one rank alone does must not raise: the others would wait for it, or steer without it.
    known = attempt("reading times of passes", remembered.load, key, table) if first else None
    kept = ranks.from_first(known)
    if kept is not None:
        say_once(logging.INFO, f"{len(kept.times)} times of passes are known from an earlier start")
        return kept
    begin = time.monotonic()
    before = _peak_from_now()
    measured = ranks.together("timing passes", lambda: measure(runner, steering))
    if measured is None:
        raise RuntimeError("another rank could not time its passes")
    graphs = runner.prefill_cuda_graph_runner
    memory_mib = {
        "dense graphs": captured_mib(graphs),
        "peak of a measured pass": (torch.cuda.max_memory_allocated() - before) >> 20,
    }
    times = ranks.from_first(PassTimes(key, measured, table, memory_mib))
    took_s = time.monotonic() - begin
    if first:
        attempt("keeping times of passes", remembered.save, times)
    say_once(
        logging.INFO,
        f"measured {len(times.times)} times of passes in {took_s:.1f} s; beside what was in use, "
        f"a pass took up to {memory_mib['peak of a measured pass']} MiB",
    )
    return times


def _peak_from_now() -> int:
    """Forget the highest use of memory so far; bytes in use now."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _key(runner: Any, graphs: Any) -> dict[str, object]:
    """What measured times are valid for."""
    import torch

    facts = facts_of(runner.attn_backend, runner)
    decode = _row_graphs(runner)
    return {
        "gpu": torch.cuda.get_device_name(),
        "cpu": _cpu(),
        "torch": torch.__version__,
        "sglang": installed_version(),
        "nsa_tune": __version__,
        "model": facts.profile.name,
        "layers": facts.layers,
        "heads": facts.heads,
        "kv_dtype": facts.kv_dtype,
        "prefill_impl": facts.impl,
        "decode_impl": str(runner.attn_backend.dsa_decode_impl),
        "hidden_size": runner.model_config.hidden_size,
        "tp_size": runner.server_args.tp_size,
        # Not whether it is faster: ranks may find that differently, and their keys must be equal.
        "topk": switch_is_on(Part.TOPK),
        "decode": switch_is_on(Part.DECODE),
        "copies": switch_is_on(Part.COPIES),
        **{name: str(getattr(runner.server_args, name, None)) for name in _ARGUMENTS},
        "prefill_sizes": sorted(graphs.capture_num_tokens),
        "decode_sizes": [] if decode is None else decode.sizes,
        # None without speculative decoding.
        "draft_tokens": runner.attn_backend.speculative_num_draft_tokens,
        "dense_sizes": {str(mode): one.sizes for mode, one in captured(graphs).items()},
        "contexts": contexts(runner),
        "context_len": runner.model_config.context_len,
        "measured": MEASURED,
        # A rank without one of them would not run what it has agreed to.
        "hooks": _hooks(),
    }


def _hooks() -> list[str]:
    """The plug-in's hooks that are in place, of those that decide how a pass runs."""
    release = release_of(installed_version() or "")
    return [
        symbol.name
        for symbol in (() if release is None else release.symbols)
        if symbol.name in _DECIDE and symbol.module in sys.modules and hooks_on(_method(symbol))
    ]


def _method(symbol: Symbol) -> object:
    owner, _, name = symbol.path.rpartition(".")
    return getattr(getattr(sys.modules[symbol.module], owner, None), name, None)


def _cpu() -> str:
    """The host's processor: what a pass takes on the host is its."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            lines = [line for line in file if line.startswith("model name")]
    except OSError:
        return "unknown"
    return lines[0].partition(":")[2].strip() if lines else "unknown"
