"""Capturing dense graphs when an engine has captured its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_tune import __version__
from nsa_tune.engines.edge import EngineMustStop
from nsa_tune.engines.sglang.edge import say_once
from nsa_tune.engines.sglang.eligible import SWITCHES, Engine, Part, why_not
from nsa_tune.engines.sglang.pass_mode.dense.graph_buffers import GraphBuffers
from nsa_tune.engines.sglang.pass_mode.dense.graphs import DenseGraphs, Kind
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.ranks import Ranks

_CAPTURED, _MIB = "_nsa_tune_dense", "_nsa_tune_dense_mib"
"""Attributes of the runner of prefill graphs."""
_KINDS = {PassMode.DENSE_GRAPH: Kind.MHA, PassMode.DENSE_MLA_GRAPH: Kind.MLA}
_BF16_BYTES = 2
_SPARE_BYTES = 2**29
"""For what a captured pass takes besides: NCCL's buffers, workspaces, fragmentation."""


def captured(graphs: Any) -> Mapping[PassMode, DenseGraphs]:
    """The dense graphs of a PrefillCudaGraphRunner, by the way that they run."""
    dense: Mapping[PassMode, DenseGraphs] = graphs.__dict__.get(_CAPTURED, {})
    return dense


def captured_mib(graphs: Any) -> int:
    """Memory that they took."""
    return int(graphs.__dict__.get(_MIB, 0))


def capture_all(graphs: Any) -> None:
    """Capture the dense graphs of a PrefillCudaGraphRunner, if all of its ranks do.

    Call it within the runner's own capture session.

    Raises:
        EngineMustStop: it failed on some rank, and the ranks cannot go on alike.
    """
    import torch

    runner = graphs.model_runner
    if runner.is_draft_worker:
        return
    ranks = Ranks(runner)
    engine = Engine(runner, runner.attn_backend, graphs)
    reason = why_not(Part.PASSES, engine) or why_not(Part.DENSE, engine) or _why_no_room(graphs)
    buffers = GraphBuffers.of_engine() if ranks.count > 1 else GraphBuffers([])
    # One rank that captured another graph would wait for the others for ever.
    modes = [] if reason is not None else _modes(engine)
    what = f"{__version__}: {modes} of {sorted(graphs.capture_num_tokens)}" if modes else None
    if not ranks.agree("dense_graphs", what):
        say_once(logging.INFO, f"no dense prefill graphs: {reason or 'the ranks do not agree'}")
        return
    begin, free = time.monotonic(), torch.cuda.mem_get_info()[0]
    try:
        dense = _dense_graphs(graphs, modes, ranks, buffers)
    except EngineMustStop:
        raise
    except Exception:  # raised again: the edge records it
        _check_alike(ranks, buffers)
        raise
    if dense is None:
        _check_alike(ranks, buffers)
        say_once(logging.WARNING, "no dense prefill graphs: another rank could not capture them")
        return
    setattr(graphs, _CAPTURED, dense)
    took_mib = round((free - torch.cuda.mem_get_info()[0]) / 2**20)
    setattr(graphs, _MIB, took_mib)
    count = sum(len(of_kind.sizes) for of_kind in dense.values())
    say_once(
        logging.INFO,
        f"captured {count} dense prefill graphs of up to {max(graphs.capture_num_tokens)} tokens "
        f"in {time.monotonic() - begin:.1f} s; they take {took_mib} MiB, which "
        f"--mem-fraction-static does not hold; {SWITCHES[Part.DENSE]}=0 leaves them out",
    )


def _modes(engine: Engine) -> list[str]:
    """The ways for which graphs are captured."""
    absorbed = why_not(Part.DENSE_MLA, engine) is None
    return [mode.value for mode, kind in _KINDS.items() if kind is not Kind.MLA or absorbed]


def _dense_graphs(
    graphs: Any, modes: Sequence[str], ranks: Ranks, buffers: GraphBuffers
) -> dict[PassMode, DenseGraphs] | None:
    """The dense graphs of all sizes; None if another rank could not capture one of them."""
    index_topk = graphs.model_runner.attn_backend.dsa_index_topk
    captured: dict[PassMode, DenseGraphs] = {}
    for mode in map(PassMode, modes):
        dense = captured[mode] = DenseGraphs(graphs, index_topk, _KINDS[mode])
        for size in sorted(graphs.capture_num_tokens, reverse=True):
            if not _captures(dense, size, ranks, buffers):
                return None
    return captured


def _captures(dense: DenseGraphs, size: int, ranks: Ranks, buffers: GraphBuffers) -> bool:
    """Capture one graph; False if another rank could not. The ranks agree after each.

    So none waits within the next graph for a rank that has failed in this one.
    """

    def capture() -> bool:
        dense.capture(size)
        return True

    captured, snapshot = False, buffers.snapshot()
    try:
        captured = ranks.together("capturing a dense prefill graph", capture) or False
    finally:
        if not captured:
            buffers.rollback(snapshot)
    return captured


def _check_alike(ranks: Ranks, buffers: GraphBuffers) -> None:
    """After a failure: may SGLang go on? Its custom all-reduces must have noted as many buffers."""
    if ranks.count == 1 or ranks.agree("graph_buffers", buffers.fingerprint()):
        return
    raise EngineMustStop(
        "capturing dense prefill graphs failed, and has left the ranks with different buffers in "
        "SGLang's custom all-reduce, so this engine cannot start. Start it with "
        f"{SWITCHES[Part.DENSE]}=0, or with --disable-custom-all-reduce"
    )


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
