"""In which engines passes may run in another way than SGLang's own; in the others, why not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.sglang.facts import facts_of, parallel, variable_set
from nsa_tune.engines.sglang.releases import INDEXER, RAN_TOGETHER, installed_version
from nsa_tune.engines.symbols import hooks_on
from nsa_tune.engines.variables import asked_for, switched_on

MODE_SWITCH = "NSA_TUNE_PASS_MODE"
"""Environment variable: 0 leaves to SGLang how passes run; 1 has the plug-in decide it also where
it does not unless it is asked to."""
DENSE_SWITCH = "NSA_TUNE_DENSE_GRAPHS"
"""Environment variable: 0 captures no graphs of the plug-in's own; 1 captures them also with DP
attention, and with tensor parallelism whatever the all-reduce."""
_LONGEST_DENSE = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
"""SGLang's own variable: keys up to which attention may be dense. SGLang sets it when it starts."""
_PLAN_STREAM = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
"""SGLang's own variable."""


def _flag(name: str) -> Callable[[Any], bool]:
    return lambda runner: bool(getattr(runner.server_args, name, False))


_LEFT_ALONE: dict[str, Callable[[Any], bool]] = {
    "this model's attention is not DSA": lambda runner: (
        not hasattr(runner.attn_backend, "set_dsa_prefill_impl")
    ),
    "this model does not generate": lambda runner: not runner.is_generation,
    "with pipeline parallelism the stages' batches differ": lambda runner: (
        runner.server_args.pp_size > 1
    ),
    "experts are reached by an all-to-all, which cannot be captured": lambda runner: (
        getattr(runner.server_args, "moe_a2a_backend", "none") not in (None, "none")
    ),
    "with LoRA": _flag("enable_lora"),
    "with a hierarchical cache a prefix may arrive layer by layer": _flag(
        "enable_hierarchical_cache"
    ),
    "with two-batch overlap": _flag("enable_two_batch_overlap"),
    "with prefill and decoding on one GPU in turns (PD multiplexing)": _flag("enable_pdmux"),
    # Passes over placeholders take other times, and they would be kept for later starts.
    "its weights come after its graphs (startup_weight_load_mode)": lambda runner: (
        getattr(runner.server_args, "startup_weight_load_mode", None) == "overlap"
    ),
}
_NOT_TOGETHER: dict[str, Callable[[Any], bool]] = {
    # What ranks tell each other goes by other groups, whose members come and go.
    "with elastic expert parallelism": lambda runner: (
        getattr(runner.server_args, "elastic_ep_backend", None) is not None
    ),
    "with distributed weights (DWDP) ranks run passes by themselves": lambda runner: (
        getattr(runner.server_args, "dwdp_size", 1) > 1
    ),
    "hidden states are returned": _flag("enable_return_hidden_states"),
    "with DP attention and speculative decoding ranks verify and prefill in turns": lambda runner: (
        not runner.spec_algorithm.is_none()
    ),
}
_NO_DENSE_GRAPHS: Mapping[str, Callable[[Any], bool]] = {
    "on this GPU dense attention reads lengths that a graph would keep": lambda graphs: (
        graphs.model_runner.attn_backend.device_sm_major != 9
    ),
    f"with DP attention they ran too little: ask for them by {DENSE_SWITCH}=1": lambda graphs: (
        data_parallel(graphs.model_runner) and not asked_for(DENSE_SWITCH)
    ),
    f"with another all-reduce than NCCL's and SGLang's custom one no GPUs have run them: ask for "
    f"them by {DENSE_SWITCH}=1": lambda graphs: (
        _reduces_otherwise(graphs.model_runner.server_args) and not asked_for(DENSE_SWITCH)
    ),
    "its own graphs are not of the breakable kind": lambda graphs: (
        "BreakableCudaGraphBackend" not in {kind.__name__ for kind in type(graphs.backend).__mro__}
    ),
    # The one without the other would replay a graph with another graph's metadata.
    "not all of their hooks are in place": lambda graphs: (
        not hooks_on(type(graphs.backend).replay)
        or not hooks_on(type(graphs)._prepare_forward_metadata_for_replay)
    ),
    "with debug_cuda_graph a graph's code runs anew in each pass": lambda graphs: _flag(
        "debug_cuda_graph"
    )(graphs.model_runner),
    "selected keys are returned": lambda graphs: _flag("enable_return_indexer_topk")(
        graphs.model_runner
    ),
    "SGLang keeps attention sparse": lambda graphs: (
        not getattr(graphs.model_runner.attn_backend, "supports_mha_one_shot", True)
        or _longest_dense() < graphs.model_runner.attn_backend.dsa_index_topk
    ),
}
_NO_DECODE_GRAPHS: Mapping[str, Callable[[Any], bool]] = {
    # Others verify trees, ragged rows, or have no hidden states of this kind.
    "speculative decoding of another kind than EAGLE and MTP": lambda runner: (
        not runner.spec_algorithm.is_none()
        and getattr(runner.spec_algorithm, "name", "") != "EAGLE"
    ),
    "drafts are trees (speculative_eagle_topk)": lambda runner: (
        not runner.spec_algorithm.is_none() and runner.attn_backend.topk > 1
    ),
    "the number of draft tokens changes while serving (speculative_adaptive)": _flag(
        "speculative_adaptive"
    ),
    "with several draft layers (enable_multi_layer_eagle)": _flag("enable_multi_layer_eagle"),
    # It writes the graphs' inputs on another stream, which waits for no prefill.
    f"verify passes are prepared on a stream of their own ({_PLAN_STREAM})": lambda _: variable_set(
        _PLAN_STREAM
    ),
    "routed experts are returned": _flag("enable_return_routed_experts"),
    "selected keys are returned": _flag("enable_return_indexer_topk"),
    # Rows between two captured sizes would run as an eager decode.
    "they are not padded (disable_cuda_graph_padding)": _flag("disable_cuda_graph_padding"),
    "none were captured": lambda runner: not hasattr(runner.decode_cuda_graph_runner, "capture_bs"),
}


def data_parallel(runner: Any) -> bool:
    """Whether attention is data-parallel: each rank, or group of ranks, has a batch of its own."""
    # Later releases take the argument back once it is resolved.
    return _flag("enable_dp_attention")(runner) or parallel().attn_dp_size > 1


def why_not(runner: Any) -> str | None:
    """Why all passes of this model runner run as SGLang has them; None where they need not."""
    if not switched_on(MODE_SWITCH):
        return f"{MODE_SWITCH} is set to 0"
    reasons = _LEFT_ALONE | (_NOT_TOGETHER if data_parallel(runner) else {})
    reason = next((why for why, applies in reasons.items() if applies(runner)), None)
    if reason is not None:
        return reason
    unasked = None if asked_for(MODE_SWITCH) else _why_not_unasked(runner)
    if unasked is not None:
        return f"{unasked} it has to be asked for, by {MODE_SWITCH}=1"
    try:
        facts_of(runner.attn_backend, runner)
    except LeftAlone as error:
        return str(error)
    return None


def _why_not_unasked(runner: Any) -> str | None:
    """Where several ranks have to decide alike, and that was shown too little."""
    if data_parallel(runner):
        return "with DP attention"
    if runner.server_args.tp_size == 1:
        return None
    if installed_version() not in RAN_TOGETHER:
        return f"with tensor parallelism in a version other than {', '.join(RAN_TOGETHER)}"
    if not runner.spec_algorithm.is_none():
        return "with tensor parallelism and speculative decoding"
    return None


def why_no_dense_graphs(graphs: Any) -> str | None:
    """Why a runner of prefill graphs captures no dense ones; None where it may."""
    if not switched_on(DENSE_SWITCH):
        return f"{DENSE_SWITCH} is set to 0"
    return next((why for why, applies in _NO_DENSE_GRAPHS.items() if applies(graphs)), None)


def why_no_absorbed_graphs(runner: Any) -> str | None:
    """Why no dense graphs with absorbed MLA are captured; None where they may be."""
    backend = runner.attn_backend
    if facts_of(backend, runner).kv_dtype != "bf16":
        return "FlashAttention-3 reads no fp8 latents"
    indexer = import_module(INDEXER).Indexer
    # Without both, sparse attention by the dummy batch's selection would be captured.
    if not hooks_on(type(backend).forward_extend) or not hooks_on(indexer._forward_cuda_k_only):
        return "not all of their hooks are in place"
    return None


def _reduces_otherwise(arguments: Any) -> bool:
    """Whether ranks of one batch may add up by another all-reduce than NCCL's or SGLang's custom
    one, with both of which dense graphs have run on two GPUs.

    By what was asked for: later releases do not write into the arguments what they make of them.
    """
    return arguments.tp_size > 1 and (
        not arguments.enforce_disable_flashinfer_allreduce_fusion
        or arguments.enable_torch_symm_mem
        or arguments.enable_mscclpp
    )


def _longest_dense() -> float:
    try:
        return int(os.environ.get(_LONGEST_DENSE, ""))
    except ValueError:
        return float("inf")


def why_no_decode_graphs(runner: Any) -> str | None:
    """Why no prefill of this model runner runs by decode graphs; None where some may."""
    return next((why for why, applies in _NO_DECODE_GRAPHS.items() if applies(runner)), None)
