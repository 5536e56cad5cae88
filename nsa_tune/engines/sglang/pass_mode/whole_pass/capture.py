"""Capturing whole-pass graphs when an engine has captured its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from nsa_tune import __version__
from nsa_tune.engines.edge import EngineMustStop
from nsa_tune.engines.sglang import attempt, say_once
from nsa_tune.engines.sglang.eligible import Engine, why_not
from nsa_tune.engines.sglang.facts import index_topk_of, is_dense_mla
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.seconds import spent
from nsa_tune.engines.sglang.pass_mode.whole_pass.dense_graphs import DenseGraphs
from nsa_tune.engines.sglang.pass_mode.whole_pass.graph_buffers import GraphBuffers
from nsa_tune.engines.sglang.pass_mode.whole_pass.prefix_graphs import PrefixGraphs
from nsa_tune.engines.sglang.pass_mode.whole_pass.sparse_graphs import SparseGraphs
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import Kind
from nsa_tune.engines.sglang.ranks import Ranks
from nsa_tune.engines.sglang.switch import SWITCHES, Part

WholePassGraphs = DenseGraphs | PrefixGraphs | SparseGraphs

_CAPTURED, _MIB = "_nsa_tune_captured", "_nsa_tune_captured_mib"
"""Attributes of the runner of prefill graphs."""
_PARTS: Mapping[PassMode, tuple[Part, ...]] = {
    PassMode.DENSE_GRAPH: (Part.DENSE,),
    PassMode.DENSE_MLA_GRAPH: (Part.DENSE, Part.DENSE_MLA),
    PassMode.PREFIX_GRAPH: (Part.DENSE,),
    # Keys are selected by nsa-tune's kernel in them.
    PassMode.SPARSE_GRAPH: (Part.SPARSE, Part.TOPK),
}
"""The parts of the plug-in that each way takes."""
_SPARE_BYTES = 2**29
"""For what a captured pass takes besides: NCCL's buffers, workspaces, fragmentation."""
_LAYER_BYTES = 200_000
"""What a layer takes in each graph: 116 dense graphs of 30 layers took 688 MiB."""


def captured(graphs: Any) -> Mapping[PassMode, WholePassGraphs]:
    """The whole-pass graphs of a PrefillCudaGraphRunner, by the way that they run."""
    whole: Mapping[PassMode, WholePassGraphs] = graphs.__dict__.get(_CAPTURED, {})
    return whole


def captured_mib(graphs: Any) -> int:
    """Memory that they took."""
    return int(graphs.__dict__.get(_MIB, 0))


def capture_all(graphs: Any) -> None:
    """Capture the whole-pass graphs of a PrefillCudaGraphRunner, if all of its ranks do.

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
    reason = why_not(Part.PASSES, engine) or why_not(Part.DENSE, engine)
    buffers = GraphBuffers.of_engine() if ranks.count > 1 else GraphBuffers([])
    # One rank that captured another graph would wait for the others for ever.
    made = {} if why_not(Part.PASSES, engine) else dict(_graphs_of(graphs, engine))
    what = "; ".join(f"{mode}: {of_mode.wanted()}" for mode, of_mode in made.items())
    if not ranks.agree("whole_pass_graphs", f"{__version__}: {what}" if made else None):
        reason = reason or "the ranks do not agree"
        say_once(logging.INFO, f"no whole-pass prefill graphs: {reason}")
        return
    free = torch.cuda.mem_get_info()[0]
    with spent("the rest of capturing"):
        whole = {
            mode: of_mode
            for mode, of_mode in made.items()
            if _have_room(mode, of_mode, engine, ranks) and _captured(mode, of_mode, ranks, buffers)
        }
    setattr(graphs, _CAPTURED, whole)
    took_mib = round((free - torch.cuda.mem_get_info()[0]) / 2**20)
    setattr(graphs, _MIB, took_mib)
    counts = ", ".join(f"{len(of_mode.sizes)} {mode}s" for mode, of_mode in whole.items())
    say_once(
        logging.INFO,
        f"captured whole-pass prefill graphs ({counts}): they take {took_mib} MiB, which "
        f"--mem-fraction-static does not hold; {SWITCHES[Part.DENSE]}=0 and "
        f"{SWITCHES[Part.SPARSE]}=0 leave them out",
    )


def _graphs_of(graphs: Any, engine: Engine) -> Iterator[tuple[PassMode, WholePassGraphs]]:
    """Graphs to capture, by the way that they run."""
    for mode, parts in _PARTS.items():
        # With an indexer a prefix is expanded up to index_topk keys only.
        elsewhere = mode is PassMode.PREFIX_GRAPH and not is_dense_mla(engine.backend)
        if not elsewhere and not any(why_not(part, engine) for part in parts):
            yield mode, _made(graphs, mode)


def _made(graphs: Any, mode: PassMode) -> WholePassGraphs:
    index_topk = index_topk_of(graphs.model_runner.attn_backend)
    if mode is PassMode.PREFIX_GRAPH:
        return PrefixGraphs(graphs)
    if mode is PassMode.SPARSE_GRAPH:
        return SparseGraphs(graphs, index_topk)
    kind = Kind.MHA if mode is PassMode.DENSE_GRAPH else Kind.MLA
    return DenseGraphs(graphs, index_topk, kind)


def _have_room(mode: PassMode, whole: WholePassGraphs, engine: Engine, ranks: Ranks) -> bool:
    """Whether all ranks have memory for graphs, beside those that are captured by now."""
    layers = int(engine.runner.model_config.num_hidden_layers)
    reason = _why_no_room(whole.scratch_bytes(), len(whole.wanted()) * layers)
    if ranks.agree(f"room_for_{mode}s", None if reason else "room"):
        return True
    say_once(logging.INFO, f"no {mode}s: {reason or 'another rank has no room for them'}")
    return False


def _captured(mode: PassMode, whole: WholePassGraphs, ranks: Ranks, buffers: GraphBuffers) -> bool:
    """Whether all ranks have captured the graphs of all sizes."""
    if attempt(f"capturing {mode}s", partial(_capture, whole, ranks, buffers)):
        return True
    _check_alike(ranks, buffers)
    say_once(logging.WARNING, f"no {mode}s: they could not be captured")
    return False


def _capture(whole: WholePassGraphs, ranks: Ranks, buffers: GraphBuffers) -> bool:
    """Capture the graphs of all sizes; False if another rank could not capture one of them."""
    return all(
        _captures(whole, size, ranks, buffers) for size in sorted(whole.wanted(), reverse=True)
    )


def _captures(whole: WholePassGraphs, size: int, ranks: Ranks, buffers: GraphBuffers) -> bool:
    """Capture one graph; False if another rank could not. The ranks agree after each.

    So none waits within the next graph for a rank that has failed in this one.
    """

    def capture() -> bool:
        with spent("preparing batches"):
            whole.capture(size)
        return True

    captured, snapshot = False, buffers.snapshot()
    try:
        with spent("waiting for other ranks"):
            captured = ranks.together("capturing a whole-pass prefill graph", capture) or False
    finally:
        if not captured:
            buffers.rollback(snapshot)
    return captured


def _check_alike(ranks: Ranks, buffers: GraphBuffers) -> None:
    """After a failure: may SGLang go on? Its custom all-reduces must have noted as many buffers."""
    if ranks.count == 1 or ranks.agree("graph_buffers", buffers.fingerprint()):
        return
    raise EngineMustStop(
        "capturing whole-pass prefill graphs failed, and has left the ranks with different "
        "buffers in SGLang's custom all-reduce, so this engine cannot start. Start it with "
        f"{SWITCHES[Part.DENSE]}=0 and {SWITCHES[Part.SPARSE]}=0, or with "
        "--disable-custom-all-reduce"
    )


def _why_no_room(scratch_bytes: int, layers: int) -> str | None:
    """Why capturing `layers` might run out of memory; None where it cannot.

    One rank that did would leave the others waiting. A pass runs before it is captured, and what it
    took meanwhile is no graph's.
    """
    import torch

    need = 2 * scratch_bytes + layers * _LAYER_BYTES + _SPARE_BYTES
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0] + unused
    if free >= need:
        return None
    return f"{free >> 20} MiB of memory are free, and capturing might take {need >> 20} MiB"
