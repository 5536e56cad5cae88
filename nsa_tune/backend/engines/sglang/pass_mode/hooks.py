"""The hooks around SGLang's model runner and its prefill graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from nsa_tune import __version__
from nsa_tune.backend.engines.sglang.decode import eligible as decode_eligible
from nsa_tune.backend.engines.sglang.decode import hooks as decode_kernel
from nsa_tune.backend.engines.sglang.edge import attempt, say_once
from nsa_tune.backend.engines.sglang.facts import facts_of
from nsa_tune.backend.engines.sglang.parallel import parallel
from nsa_tune.backend.engines.sglang.pass_mode.calibration import MEASURED, longest, measure
from nsa_tune.backend.engines.sglang.pass_mode.dense.graphs import DenseGraphs, Kind
from nsa_tune.backend.engines.sglang.pass_mode.eligible import (
    DENSE_SWITCH,
    data_parallel,
    why_no_absorbed_graphs,
    why_no_decode_graphs,
    why_no_dense_graphs,
    why_not,
)
from nsa_tune.backend.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.backend.engines.sglang.pass_mode.ranks.gathered import saying
from nsa_tune.backend.engines.sglang.pass_mode.ranks.ranks import Ranks
from nsa_tune.backend.engines.sglang.pass_mode.rows.graphs import RowGraphs
from nsa_tune.backend.engines.sglang.pass_mode.steering.data_parallel import DataParallel
from nsa_tune.backend.engines.sglang.pass_mode.steering.steering import DENSE, EAGER, Steering
from nsa_tune.backend.engines.sglang.pass_mode.steering.tensor_parallel import TensorParallel
from nsa_tune.backend.engines.sglang.pass_mode.steering.watch import Watch
from nsa_tune.backend.engines.sglang.pass_mode.times import remembered
from nsa_tune.backend.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.backend.engines.sglang.prefill import source_of
from nsa_tune.backend.engines.sglang.releases import installed_version
from nsa_tune.backend.engines.sglang.switch import paused
from nsa_tune.backend.engines.sglang.topk import eligible as topk_eligible
from nsa_tune.backend.engines.sglang.topk import hooks as topk

__all__ = [
    "around_can_run",
    "around_capture",
    "around_forward",
    "around_init_graphs",
    "around_prepare_metadata",
    "around_replay",
    "around_sync",
]

_STEERING = "_nsa_tune_pass_mode"
_DENSE_MIB = "_nsa_tune_dense_mib"
_BF16_BYTES = 2
_SPARE_BYTES = 2**29
"""For what a captured pass takes besides: NCCL's buffers, workspaces, fragmentation."""
_ARGUMENTS = ("dtype", "quantization", "moe_runner_backend", "ep_size")
"""SGLang's arguments that change what the layers take besides attention."""
_KINDS = {PassMode.DENSE_GRAPH: Kind.MHA, PassMode.DENSE_MLA_GRAPH: Kind.MLA}


def around_forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *rest: Any, **named: Any
) -> Any:
    """The hook around `ModelRunner._forward_raw`, which runs a pass."""
    steering: Steering[Any] | None = runner.__dict__.get(_STEERING)
    if steering is None or named:
        return original(runner, forward_batch, *rest, **named)
    # Data-parallel ranks have said before the pass whether they are paused.
    if not isinstance(steering, DataParallel) and paused():
        return original(runner, forward_batch, *rest, **named)
    return steering.forward(original, runner, forward_batch, rest)


def around_sync(original: Callable[..., Any], adapter: Any, local_batch: Any) -> Any:
    """The hook around `SchedulerDPAttnAdapter.prepare_mlp_sync_batch`: ranks tell of a pass."""
    steering = adapter.model_runner.__dict__.get(_STEERING)
    said = None
    if isinstance(steering, DataParallel):
        said = attempt("looking at a batch", steering.says, local_batch)
    with saying(said):
        return original(adapter, local_batch)


def around_capture(original: Callable[..., Any], graphs: Any) -> Any:
    """The hook around `PrefillCudaGraphRunner._capture_one_stream`: dense graphs follow its own."""
    result = original(graphs)
    attempt("capturing dense prefill graphs", _capture_dense, graphs)
    return result


def around_can_run(original: Callable[..., Any], graphs: Any, forward_batch: Any) -> Any:
    """The hook around `PrefillCudaGraphRunner.can_run_graph`."""
    return EAGER not in graphs.__dict__ and original(graphs, forward_batch)


def around_replay(
    original: Callable[..., Any], backend: Any, shape_key: Any, *rest: Any, **named: Any
) -> Any:
    """The hook around `BreakableCudaGraphBackend.replay`."""
    dense: DenseGraphs | None = backend.__dict__.get(DENSE)
    if dense is not None:
        shape_key = dense.key(shape_key.size)
    return original(backend, shape_key, *rest, **named)


def around_prepare_metadata(
    original: Callable[..., Any], graphs: Any, forward_batch: Any, static_batch: Any, *rest: Any
) -> Any:
    """The hook around `_prepare_forward_metadata_for_replay`: a dense graph needs lengths only."""
    dense: DenseGraphs | None = graphs.backend.__dict__.get(DENSE)
    if dense is None:
        return original(graphs, forward_batch, static_batch, *rest)
    dense.prepare(len(static_batch.input_ids), forward_batch)
    return None


def around_init_graphs(original: Callable[..., Any], runner: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `ModelRunner.init_cuda_graphs`: afterwards passes can be measured."""
    # Graphs keep the kernels that they are captured with.
    attempt("timing decode kernels", decode_kernel.attach, runner)
    result = original(runner, *rest, **named)
    # First: it changes what passes take.
    attempt("measuring how keys are selected", topk.attach, runner)
    attempt("measuring how passes run", _attach, runner)
    return result


def _capture_dense(graphs: Any) -> None:
    import torch

    runner = graphs.model_runner
    if runner.is_draft_worker:
        return
    ranks = Ranks(runner)
    reason = why_not(runner) or why_no_dense_graphs(graphs) or _why_no_room(graphs)
    if not ranks.all_say("dense_graphs", __version__ if reason is None else None):
        say_once(logging.INFO, f"no dense prefill graphs: {reason or 'the ranks do not agree'}")
        return
    begin, free = time.monotonic(), torch.cuda.mem_get_info()[0]
    captured = ranks.together("capturing dense prefill graphs", lambda: _dense_graphs(graphs))
    if captured is None:
        say_once(logging.WARNING, "no dense prefill graphs: another rank could not capture them")
        return
    setattr(graphs, DENSE, captured)
    took_mib = round((free - torch.cuda.mem_get_info()[0]) / 2**20)
    setattr(graphs, _DENSE_MIB, took_mib)
    count = sum(len(dense.sizes) for dense in captured.values())
    say_once(
        logging.INFO,
        f"captured {count} dense prefill graphs of up to {max(graphs.capture_num_tokens)} tokens "
        f"in {time.monotonic() - begin:.1f} s; they take {took_mib} MiB, which "
        f"--mem-fraction-static does not hold; {DENSE_SWITCH}=0 leaves them out",
    )


def _dense_graphs(graphs: Any) -> dict[PassMode, DenseGraphs]:
    runner = graphs.model_runner
    captured: dict[PassMode, DenseGraphs] = {}
    for mode, kind in _KINDS.items():
        if kind is Kind.MLA and why_no_absorbed_graphs(runner) is not None:
            continue
        dense = captured[mode] = DenseGraphs(graphs, runner.attn_backend.dsa_index_topk, kind)
        for size in sorted(graphs.capture_num_tokens, reverse=True):
            dense.capture(size)
    return captured


def _why_no_room(graphs: Any) -> str | None:
    """Why capturing dense graphs might run out of memory; None where it cannot.

    One rank that did would leave the others waiting. Beside what SGLang's own graph of a size has
    just taken, attention needs queries, keys and values of all heads, with a copy of each.
    """
    import torch

    backend, config = graphs.model_runner.attn_backend, graphs.model_runner.model_config
    head_dim = 2 * (backend.qk_nope_head_dim + backend.qk_rope_head_dim) + config.v_head_dim
    values = max(graphs.capture_num_tokens) * backend.num_q_heads * head_dim
    need = 2 * _BF16_BYTES * values + _SPARE_BYTES
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0] + unused
    if free >= need:
        return None
    return f"{free >> 20} MiB of memory are free, and capturing might take {need >> 20} MiB"


def _attach(runner: Any) -> None:
    import torch

    if runner.is_draft_worker:
        return
    reason = why_not(runner)
    graphs = getattr(runner, "prefill_cuda_graph_runner", None)
    if reason is None and not hasattr(graphs, "capture_num_tokens"):
        reason = "it captured no prefill graphs"
    if reason is None and data_parallel(runner) and DENSE not in graphs.__dict__:
        reason = why_no_decode_graphs(runner)
    if reason is not None:
        say_once(logging.INFO, f"SGLang decides by itself how prefills run: {reason}")
    ranks = Ranks(runner)
    key = None if reason is not None else _key(runner, graphs)
    if not ranks.all_say("pass_mode", None if key is None else repr(key)) or key is None:
        if key is not None:
            say_once(logging.WARNING, "SGLang decides how prefills run: its ranks do not agree")
        return
    steering = _steering(runner, ranks)
    setattr(runner, _STEERING, steering)
    try:
        times = ranks.together(
            "measuring how passes run", lambda: _times(runner, steering, ranks, key)
        )
    except BaseException:
        delattr(runner, _STEERING)
        raise
    if times is None:
        delattr(runner, _STEERING)
        say_once(logging.WARNING, "SGLang decides how prefills run: another rank measured nothing")
        return
    steering.times = times
    steering.watch = Watch(lambda: torch.cuda.Event(enable_timing=True))


def _row_graphs(runner: Any) -> RowGraphs | None:
    """The decode graphs that may run a prefill."""
    reason = why_no_decode_graphs(runner)
    if reason is None:
        return RowGraphs.of(runner)
    say_once(logging.INFO, f"no prefill runs by decode graphs: {reason}")
    return None


def _steering(runner: Any, ranks: Ranks) -> Steering[Any]:
    dense = runner.prefill_cuda_graph_runner.__dict__.get(DENSE, {})
    index_topk, decode = runner.attn_backend.dsa_index_topk, _row_graphs(runner)
    if data_parallel(runner):
        return DataParallel(runner, index_topk, dense=dense, decode=decode)
    return TensorParallel(runner, index_topk, ranks, dense=dense, decode=decode)


def _times(
    runner: Any, steering: Steering[Any], ranks: Ranks, key: Mapping[str, object]
) -> PassTimes:
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
        "dense graphs": int(graphs.__dict__.get(_DENSE_MIB, 0)),
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
    dense: Mapping[PassMode, DenseGraphs] = graphs.__dict__.get(DENSE, {})
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
        "topk": topk_eligible.allowed(),
        "decode": decode_eligible.allowed(),
        "dp_attention": parallel().attn_dp_size if data_parallel(runner) else 1,
        **{name: str(getattr(runner.server_args, name, None)) for name in _ARGUMENTS},
        "prefill_sizes": sorted(graphs.capture_num_tokens),
        "decode_sizes": [] if decode is None else decode.sizes,
        # None without speculative decoding.
        "draft_tokens": runner.attn_backend.speculative_num_draft_tokens,
        "dense_sizes": {str(mode): one.sizes for mode, one in dense.items()},
        # Not the pool's size: that differs a little from start to start.
        "longest": longest(runner),
        "measured": MEASURED,
    }


def _cpu() -> str:
    """The host's processor: what a pass takes on the host is its."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            lines = [line for line in file if line.startswith("model name")]
    except OSError:
        return "unknown"
    return lines[0].partition(":")[2].strip() if lines else "unknown"
