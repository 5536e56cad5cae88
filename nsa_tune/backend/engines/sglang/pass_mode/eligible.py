"""In which engines passes may run in another way than SGLang's own; in the others, why not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from nsa_tune.backend.engines.sglang.facts import LeftAlone, facts_of

__all__ = [
    "DENSE_SWITCH",
    "MODE_SWITCH",
    "switched_on",
    "why_no_decode_graphs",
    "why_not",
]

MODE_SWITCH = "NSA_TUNE_PASS_MODE"
"""Environment variable: 0 leaves to SGLang how passes run."""
DENSE_SWITCH = "NSA_TUNE_DENSE_GRAPHS"
"""Environment variable: 0 captures no graphs of the plug-in's own."""


def _flag(name: str) -> Callable[[Any], bool]:
    return lambda runner: bool(getattr(runner.server_args, name, False))


_LEFT_ALONE: Mapping[str, Callable[[Any], bool]] = {
    "this model's attention is not DSA": lambda runner: (
        not hasattr(runner.attn_backend, "set_dsa_prefill_impl")
    ),
    "with DP attention the ranks' batches differ": _flag("enable_dp_attention"),
    "with pipeline parallelism the stages' batches differ": lambda runner: (
        runner.server_args.pp_size > 1
    ),
    "experts are reached by an all-to-all, which cannot be captured": lambda runner: (
        getattr(runner.server_args, "moe_a2a_backend", "none") not in (None, "none")
    ),
    "with LoRA": _flag("enable_lora"),
    "with two-batch overlap": _flag("enable_two_batch_overlap"),
    "with prefill and decoding on one GPU in turns (PD multiplexing)": _flag("enable_pdmux"),
}
_NO_DECODE_GRAPHS: Mapping[str, Callable[[Any], bool]] = {
    "speculative decoding captures none of one row a token": lambda runner: (
        not runner.spec_algorithm.is_none()
    ),
    "routed experts are returned": _flag("enable_return_routed_experts"),
    "selected keys are returned": _flag("enable_return_indexer_topk"),
    "none were captured": lambda runner: not hasattr(runner.decode_cuda_graph_runner, "capture_bs"),
}


def why_not(runner: Any) -> str | None:
    """Why all passes of this model runner run as SGLang has them; None where they need not."""
    if not switched_on(MODE_SWITCH):
        return f"{MODE_SWITCH} is set to 0"
    reason = next((why for why, applies in _LEFT_ALONE.items() if applies(runner)), None)
    if reason is not None:
        return reason
    try:
        facts_of(runner.attn_backend, runner)
    except LeftAlone as error:
        return str(error)
    return None


def why_no_decode_graphs(runner: Any) -> str | None:
    """Why no prefill of this model runner runs by decode graphs; None where some may."""
    return next((why for why, applies in _NO_DECODE_GRAPHS.items() if applies(runner)), None)


def switched_on(name: str) -> bool:
    """Whether an environment variable leaves something on, as it is by default."""
    return os.environ.get(name, "").strip().lower() not in ("0", "false", "no", "off")
