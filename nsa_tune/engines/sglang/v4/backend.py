"""What happens when the engine has built a V4 attention backend: it is looked at, and steered."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from nsa_tune._errors import NoTunedData
from nsa_tune.backend.types.profiles import PROFILES, ModelProfile
from nsa_tune.engines.decision_log import process_log as decision_log
from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.sglang.backend import check_hooks, opened
from nsa_tune.engines.sglang.edge import attempt, say_once
from nsa_tune.engines.sglang.releases import MOST_PAGED
from nsa_tune.engines.sglang.v4.prefill import V4Prefill
from nsa_tune.engines.v4_answers import Layers, V4Answers, check_asked

_CHUNK = 8192
"""SGLang's own chunk on an 80 GB GPU, where no size was asked for."""


class V4Facts(NamedTuple):
    """One backend, as a table is looked up for it."""

    profile: ModelProfile
    heads: int
    """Local heads."""
    layers: Layers
    most_q: int
    """New tokens whose scratch memory the engine has to spare in any case."""

    def __str__(self) -> str:
        return f"{self.profile.name}, {self.heads} local heads, fp8 KV"


def around_v4_init(
    original: Callable[..., None], backend: Any, model_runner: Any, *rest: Any, **named: Any
) -> None:
    """The hook around the V4 backend's constructor."""
    original(backend, model_runner, *rest, **named)
    attempt("looking at a V4 attention backend", attach_v4, backend, model_runner)


def attach_v4(backend: Any, model_runner: Any) -> None:
    """Steer `backend` if that is asked for and there are measurements for it, and say so."""
    try:
        check_asked()
        facts = v4_facts_of(backend, model_runner)
        dispatcher = opened(facts.profile.name, facts.heads, "fp8")
        if dispatcher is None:
            return
        answers = V4Answers(dispatcher, facts.layers, most_q=facts.most_q)
        answers.check_measured()
    except (LeftAlone, NoTunedData) as reason:
        say_once(logging.WARNING, f"SGLang decides V4's prefill by itself: {reason}")
        return
    V4Prefill.attach(backend, answers, decision_log())
    say_once(logging.INFO, f"{facts}: V4's sparse prefill switch by {dispatcher.source}")
    check_hooks(backend)


def v4_facts_of(backend: Any, model_runner: Any) -> V4Facts:
    """The facts of a V4 backend that the engine has just built.

    Raises:
        LeftAlone: for a model, a pool or a mode of operation that nothing was measured for, or in
            which more than the prefill kernel hangs upon the switch.
    """
    for what, applies in _UNMEASURED.items():
        if applies(backend, model_runner):
            raise LeftAlone(f"nothing is measured for {what}")
    layers = _layers(backend.token_to_kv_pool, model_runner.layer_info)
    config = model_runner.model_config
    profile = _profile(backend, config)
    heads = config.num_attention_heads // _runtime().get_parallel().attn_tp_size
    chunk = model_runner.server_args.chunked_prefill_size or 0
    # The paged kernel's fp32 results take twice the bytes of its queries, so those of a quarter of
    # a full chunk take less than the queries of the three quarters that are not there.
    most_q = min((chunk if chunk > 0 else _CHUNK) // 4, MOST_PAGED)
    return V4Facts(profile, heads, layers, most_q=most_q)


def _layers(pool: Any, info: Any) -> Layers:
    counts = Counter(pool.compression_ratios[info.start_layer : info.end_layer])
    window = counts.pop(0, 0)
    if not counts or not counts.keys() <= {4, 128}:
        given = ", ".join(map(str, sorted(counts))) or "none but that of the window"
        raise LeftAlone(f"nothing is measured for layers of these compression ratios: {given}")
    return Layers(dict(sorted(counts.items())), window)


def _profile(backend: Any, config: Any) -> ModelProfile:
    shape = {
        "num_attention_heads": config.num_attention_heads,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "index_head_dim": config.index_head_dim,
        "index_n_heads": getattr(config.hf_text_config, "index_n_heads", None),
        "index_topk": backend.index_topk,
        "window_size": config.window_size,
        "page_size": backend.page_size,
    }
    for profile in PROFILES.values():
        if profile.family == "v4" and tuple(shape.values()) == (
            profile.heads, profile.nope, profile.rope, profile.v, profile.index_dim,
            profile.index_heads, profile.index_topk, profile.window, profile.page_size,
        ):  # fmt: skip
            return profile
    given = ", ".join(f"{name} {value}" for name, value in shape.items())
    raise LeftAlone(f"no model profile has {given}")


# --- what is left alone


def _runtime() -> Any:
    return import_module("sglang.srt.runtime_context")


def _context_parallel(*_: Any) -> bool:
    parallel = _runtime().get_parallel()
    return bool(parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1)


def _prefill_graphs(*_: Any) -> bool:
    # The engine does not use them for V4 unless it is told to.
    return bool(_runtime().get_exec().graph.cuda_graph_config.prefill.backend != "disabled")


def _fp8_kernel(backend: Any, _: Any) -> bool:
    utils = import_module("sglang.srt.layers.attention.dsv4.sparse_prefill_utils")
    return bool(utils.use_dsv4_q8kv8_sparse_prefill(backend.dsv4_prefill_backend))


def _other_layout(backend: Any, _: Any) -> bool:
    pool = backend.token_to_kv_pool
    ratios = [ratio for ratio in (4, 128) if ratio in backend.present_ratios]
    layouts = [pool.get_swa_key_layout(), *map(pool.compressed_kv_layout, ratios)]
    return any(layout.value != "v4" for layout in layouts)


_UNMEASURED: dict[str, Callable[[Any, Any], bool]] = {
    "a draft worker": lambda backend, _: backend.is_draft_runner,
    "DeepSeek V4.1": lambda backend, _: backend.is_dsv41 or backend.low_ratios,
    "attention by trtllm-gen": lambda backend, _: backend.trtllm_attn,
    "mega attention": lambda backend, _: backend.mega_attn,
    "prefill by flashmla_sparse_q8": _fp8_kernel,
    "KV layouts other than v4": _other_layout,
    "HiSparse": lambda backend, _: backend.hisparse_coordinator is not None,
    "bounded replay of the window": lambda backend, _: (
        backend.enable_decoder_swa_bounded_replay
        or backend.token_to_kv_pool.request_window is not None
    ),
    "context parallelism": _context_parallel,
    "prefill in CUDA graphs": _prefill_graphs,
    "deterministic inference": lambda _, runner: runner.server_args.enable_deterministic_inference,
}
"""Modes of operation that change what a batch costs or what hangs upon the switch; in words."""
