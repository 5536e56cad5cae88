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
from nsa_tune.backend.engines.sglang.pass_mode import remembered
from nsa_tune.backend.engines.sglang.pass_mode.calibration import longest, measure
from nsa_tune.backend.engines.sglang.pass_mode.dense_graphs import DenseGraphs, Kind
from nsa_tune.backend.engines.sglang.pass_mode.eligible import (
    DENSE_SWITCH,
    why_no_absorbed_graphs,
    why_no_decode_graphs,
    why_no_dense_graphs,
    why_not,
)
from nsa_tune.backend.engines.sglang.pass_mode.ranks import Ranks
from nsa_tune.backend.engines.sglang.pass_mode.row_graphs import RowGraphs
from nsa_tune.backend.engines.sglang.pass_mode.steering import Steering
from nsa_tune.backend.engines.sglang.pass_mode.times import PassMode, PassTimes
from nsa_tune.backend.engines.sglang.pass_mode.watch import Watch
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
]

_STEERING = "_nsa_tune_pass_mode"
_DENSE = "_nsa_tune_dense"
_EAGER = "_nsa_tune_eager"
_ARGUMENTS = ("dtype", "quantization", "moe_runner_backend", "ep_size")
"""SGLang's arguments that change what the layers take besides attention."""
_KINDS = {PassMode.DENSE_GRAPH: Kind.MHA, PassMode.DENSE_MLA_GRAPH: Kind.MLA}


def around_forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *rest: Any, **named: Any
) -> Any:
    """The hook around `ModelRunner._forward_raw`, which runs a pass."""
    steering: Steering | None = runner.__dict__.get(_STEERING)
    if steering is None or paused() or named:
        return original(runner, forward_batch, *rest, **named)
    return steering.forward(original, runner, forward_batch, rest)


def around_capture(original: Callable[..., Any], graphs: Any) -> Any:
    """The hook around `PrefillCudaGraphRunner._capture_one_stream`: dense graphs follow its own."""
    result = original(graphs)
    attempt("capturing dense prefill graphs", _capture_dense, graphs)
    return result


def around_can_run(original: Callable[..., Any], graphs: Any, forward_batch: Any) -> Any:
    """The hook around `PrefillCudaGraphRunner.can_run_graph`."""
    return _EAGER not in graphs.__dict__ and original(graphs, forward_batch)


def around_replay(
    original: Callable[..., Any], backend: Any, shape_key: Any, *rest: Any, **named: Any
) -> Any:
    """The hook around `BreakableCudaGraphBackend.replay`."""
    dense: DenseGraphs | None = backend.__dict__.get(_DENSE)
    if dense is not None:
        shape_key = dense.key(shape_key.size)
    return original(backend, shape_key, *rest, **named)


def around_prepare_metadata(
    original: Callable[..., Any], graphs: Any, forward_batch: Any, static_batch: Any, *rest: Any
) -> Any:
    """The hook around `_prepare_forward_metadata_for_replay`: a dense graph needs lengths only."""
    dense: DenseGraphs | None = graphs.backend.__dict__.get(_DENSE)
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
    reason = why_not(runner) or why_no_dense_graphs(graphs)
    if not Ranks(runner).all_say("dense_graphs", __version__ if reason is None else None):
        say_once(logging.INFO, f"no dense prefill graphs: {reason or 'the ranks do not agree'}")
        return
    begin, free = time.monotonic(), torch.cuda.mem_get_info()[0]
    captured: dict[PassMode, DenseGraphs] = {}
    for mode, kind in _KINDS.items():
        if kind is Kind.MLA and why_no_absorbed_graphs(runner) is not None:
            continue
        dense = captured[mode] = DenseGraphs(graphs, runner.attn_backend.dsa_index_topk, kind)
        for size in sorted(graphs.capture_num_tokens, reverse=True):
            dense.capture(size)
    setattr(graphs, _DENSE, captured)
    took_mb = (free - torch.cuda.mem_get_info()[0]) / 2**20
    count = sum(len(dense.sizes) for dense in captured.values())
    say_once(
        logging.INFO,
        f"captured {count} dense prefill graphs of up to {max(graphs.capture_num_tokens)} tokens "
        f"in {time.monotonic() - begin:.1f} s and {took_mb:.0f} MiB; {DENSE_SWITCH}=0 leaves them "
        "out",
    )


def _attach(runner: Any) -> None:
    import torch

    if runner.is_draft_worker:
        return
    reason = why_not(runner)
    graphs = getattr(runner, "prefill_cuda_graph_runner", None)
    if reason is None and not hasattr(graphs, "capture_num_tokens"):
        reason = "it captured no prefill graphs"
    if reason is not None:
        say_once(logging.INFO, f"SGLang decides by itself how prefills run: {reason}")
    ranks = Ranks(runner)
    key = None if reason is not None else _key(runner, graphs)
    if not ranks.all_say("pass_mode", None if key is None else repr(key)) or key is None:
        if key is not None:
            say_once(logging.WARNING, "SGLang decides how prefills run: its ranks do not agree")
        return
    steering = Steering(
        runner,
        runner.attn_backend.dsa_index_topk,
        ranks,
        dense=graphs.__dict__.get(_DENSE, {}),
        decode=_row_graphs(runner),
    )
    setattr(runner, _STEERING, steering)
    try:
        steering.times = _times(runner, steering, ranks, key)
    except BaseException:
        delattr(runner, _STEERING)
        raise
    steering.watch = Watch(lambda: torch.cuda.Event(enable_timing=True))


def _row_graphs(runner: Any) -> RowGraphs | None:
    """The decode graphs that may run a prefill."""
    reason = why_no_decode_graphs(runner)
    if reason is None:
        return RowGraphs.of(runner)
    say_once(logging.INFO, f"no prefill runs by decode graphs: {reason}")
    return None


def _times(runner: Any, steering: Steering, ranks: Ranks, key: Mapping[str, object]) -> PassTimes:
    """What passes take here: as remembered from an earlier start, or measured now."""
    table = source_of(runner.attn_backend)
    first = ranks.rank == 0
    # What one rank alone does must not raise: the others would wait for it, or steer without it.
    known = attempt("reading times of passes", remembered.load, key, table) if first else None
    kept = ranks.from_first(known)
    if kept is not None:
        say_once(logging.INFO, f"{len(kept.times)} times of passes are known from an earlier start")
        return kept
    begin = time.monotonic()
    times = ranks.from_first(PassTimes(key, measure(runner, steering), table))
    took_s = time.monotonic() - begin
    if first:
        attempt("keeping times of passes", remembered.save, times)
    say_once(logging.INFO, f"measured {len(times.times)} times of passes in {took_s:.1f} s")
    return times


def _key(runner: Any, graphs: Any) -> dict[str, object]:
    """What measured times are valid for."""
    import torch

    facts = facts_of(runner.attn_backend, runner)
    dense: Mapping[PassMode, DenseGraphs] = graphs.__dict__.get(_DENSE, {})
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
        **{name: str(getattr(runner.server_args, name, None)) for name in _ARGUMENTS},
        "prefill_sizes": sorted(graphs.capture_num_tokens),
        "decode_sizes": [] if decode is None else decode.sizes,
        # None without speculative decoding.
        "draft_tokens": runner.attn_backend.speculative_num_draft_tokens,
        "dense_sizes": {str(mode): one.sizes for mode, one in dense.items()},
        # Not the pool's size: that differs a little from start to start.
        "longest": longest(runner),
    }


def _cpu() -> str:
    """The host's processor: what a pass takes on the host is its."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            lines = [line for line in file if line.startswith("model name")]
    except OSError:
        return "unknown"
    return lines[0].partition(":")[2].strip() if lines else "unknown"
