"""Capturing dense graphs when an engine has captured its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from nsa_tune import __version__
from nsa_tune.backend.engines.sglang.edge import say_once
from nsa_tune.backend.engines.sglang.pass_mode.dense.graphs import DenseGraphs, Kind
from nsa_tune.backend.engines.sglang.pass_mode.eligible import (
    DENSE_SWITCH,
    why_no_absorbed_graphs,
    why_no_dense_graphs,
    why_not,
)
from nsa_tune.backend.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.backend.engines.sglang.pass_mode.ranks.ranks import Ranks

__all__ = ["capture_all", "captured", "captured_mib"]

_CAPTURED, _MIB = "_nsa_tune_dense", "_nsa_tune_dense_mib"
"""Attributes of the runner of prefill graphs."""
_KINDS = {PassMode.DENSE_GRAPH: Kind.MHA, PassMode.DENSE_MLA_GRAPH: Kind.MLA}
_BF16_BYTES = 2
_SPARE_BYTES = 2**29
"""For what a captured pass takes besides: NCCL's buffers, workspaces, fragmentation."""


def captured(graphs: Any) -> Mapping[PassMode, DenseGraphs]:
    """The dense graphs of a PrefillCudaGraphRunner, by the way that they run."""
    found: Mapping[PassMode, DenseGraphs] = graphs.__dict__.get(_CAPTURED, {})
    return found


def captured_mib(graphs: Any) -> int:
    """Memory that they took."""
    return int(graphs.__dict__.get(_MIB, 0))


def capture_all(graphs: Any) -> None:
    """Capture the dense graphs of a PrefillCudaGraphRunner, if all of its ranks do.

    Call it within the runner's own capture session.
    """
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
    found = ranks.together("capturing dense prefill graphs", lambda: _dense_graphs(graphs))
    if found is None:
        say_once(logging.WARNING, "no dense prefill graphs: another rank could not capture them")
        return
    setattr(graphs, _CAPTURED, found)
    took_mib = round((free - torch.cuda.mem_get_info()[0]) / 2**20)
    setattr(graphs, _MIB, took_mib)
    count = sum(len(dense.sizes) for dense in found.values())
    say_once(
        logging.INFO,
        f"captured {count} dense prefill graphs of up to {max(graphs.capture_num_tokens)} tokens "
        f"in {time.monotonic() - begin:.1f} s; they take {took_mib} MiB, which "
        f"--mem-fraction-static does not hold; {DENSE_SWITCH}=0 leaves them out",
    )


def _dense_graphs(graphs: Any) -> dict[PassMode, DenseGraphs]:
    runner = graphs.model_runner
    found: dict[PassMode, DenseGraphs] = {}
    for mode, kind in _KINDS.items():
        if kind is Kind.MLA and why_no_absorbed_graphs(runner) is not None:
            continue
        dense = found[mode] = DenseGraphs(graphs, runner.attn_backend.dsa_index_topk, kind)
        for size in sorted(graphs.capture_num_tokens, reverse=True):
            dense.capture(size)
    return found


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
