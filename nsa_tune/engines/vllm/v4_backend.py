"""Steers V4's metadata builders together, once the engine has made them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from nsa_tune._errors import NoTunedData
from nsa_tune.backend.baselines import VLLM_0_33_0
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.libraries.flash_mla.limits import schedule_rows
from nsa_tune.backend.types.profiles import PROFILES, ModelProfile
from nsa_tune.engines.agreement import NOTHING, decides_by
from nsa_tune.engines.decision_log import process_log
from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.opened import opened
from nsa_tune.engines.v4_answers import Layers, V4Answers, check_asked
from nsa_tune.engines.vllm.backend import agreed
from nsa_tune.engines.vllm.edge import EDGE, attempt, say_once
from nsa_tune.engines.vllm.facts import check_mode, decode_tokens, heads_of, own_layers
from nsa_tune.engines.vllm.v4 import RATIO, WINDOW, V4Prefill

_WINDOW_BUILDER = "DeepseekSparseSWAFlashMLAMetadataBuilder"
_RATIO_BUILDER = "DeepseekV4FlashMLAMetadataBuilder"
"""The builders of V4 with FlashMLA; other kernels have others. V4.1 has builders of the same names,
and layers of other compression ratios."""
_steered: list[tuple[Any, V4Prefill | None]] = []
"""The engines of this process, by their configuration, and what steers them."""


def around_v4_init(original: Callable[..., None], builder: Any, *rest: Any, **named: Any) -> None:
    """The hook around the constructors."""
    original(builder, *rest, **named)
    attempt("looking at a V4 metadata builder", attach_v4, builder)


def attach_v4(builder: Any) -> None:
    """Steer `builder` together with the others of its engine."""
    name = {_WINDOW_BUILDER: WINDOW, _RATIO_BUILDER: RATIO}.get(type(builder).__name__)
    try:
        own_layers(builder)
    except LeftAlone:
        return  # a draft model's, which has no others to agree with
    config = builder.vllm_config
    known = [prefill for one, prefill in _steered if one is config]
    if not known:
        known = [attempt("looking at a V4 engine", _attached, config)]
        _steered.append((config, known[0]))
    prefill = known[0]
    if prefill is None or (name == RATIO and builder.compress_ratio != 128):
        return
    if name is None:
        prefill.give_up()
        reason = f"nothing is measured for {type(builder).__name__}"
        say_once(logging.WARNING, f"vLLM decides V4's prefill by itself: {reason}")
    else:
        prefill.take(builder, name)


def _attached(config: Any) -> V4Prefill | None:
    found = attempt("looking at a V4 engine", _measured, config)
    # Every rank says something, or the others would wait for it.
    if not agreed(NOTHING if found is None else decides_by(*found)) or found is None:
        return None
    dispatcher, layers, most_q = found
    answers = V4Answers(dispatcher, layers, most_q=most_q)
    setting = dispatcher.setting
    say_once(
        logging.INFO,
        f"{setting.profile.name}, {setting.heads} local heads, fp8 KV: V4's short prefills by "
        f"{dispatcher.source}",
    )
    return V4Prefill(
        answers, ratio_128=128 in layers.compressed, decode_tokens=decode_tokens(config),
        log=process_log(),
    )  # fmt: skip


def _measured(config: Any) -> tuple[Dispatcher, Layers, int] | None:
    """By what an engine is steered; None, and a line, for nothing."""
    try:
        return _opened(config)
    except (LeftAlone, NoTunedData) as reason:
        say_once(logging.WARNING, f"vLLM decides V4's prefill by itself: {reason}")
        return None


def _opened(config: Any) -> tuple[Dispatcher, Layers, int] | None:
    check_asked()
    check_mode(config)
    _check_v4_mode(config)
    layers, profile = _layers(config), _profile(config.model_config.hf_config)
    dispatcher = opened(EDGE, VLLM_0_33_0, profile.name, heads_of(config), "fp8")
    if dispatcher is None:
        return None
    setting = dispatcher.setting
    if setting.device.arch != "sm90":
        raise LeftAlone(f"nothing is measured for V4 on {setting.device.arch}")
    # The paged kernel's fp32 results take twice the bytes of its queries, so those of a quarter of
    # a full step take less than the queries of the three quarters that are not there.
    most_q = min(config.scheduler_config.max_num_batched_tokens // 4, schedule_rows(setting) or 0)
    V4Answers(dispatcher, layers, most_q=most_q).check_measured()
    return dispatcher, layers, most_q


def _check_v4_mode(config: Any) -> None:
    hf_config, speculation = config.model_config.hf_config, config.speculative_config
    if config.cache_config.cache_dtype != "fp8_ds_mla":
        raise LeftAlone(f"nothing is measured for a KV cache of {config.cache_config.cache_dtype}")
    if getattr(hf_config, "vision_n_layers", 0):
        # A prefill sees the whole of an image, a decode only what is before it.
        raise LeftAlone("nothing is measured for images")
    if speculation is not None and speculation.use_dspark():
        raise LeftAlone("nothing is measured for DSpark")


def _layers(config: Any) -> Layers:
    count = config.model_config.hf_text_config.num_hidden_layers
    counts = Counter(_ratios(config.model_config.hf_config)[:count])
    window = counts.pop(0, 0) + counts.pop(1, 0)
    if not counts or not counts.keys() <= {4, 128}:
        given = ", ".join(map(str, sorted(counts))) or "none but that of the window"
        raise LeftAlone(f"nothing is measured for layers of these compression ratios: {given}")
    return Layers(dict(sorted(counts.items())), window)


def _ratios(hf_config: Any) -> Sequence[int]:
    given = getattr(hf_config, "compress_ratios", None)
    if given is not None:
        return list(given)
    utils = import_module("vllm.transformers_utils.deepseek_v4_utils")
    return list(utils.get_compress_ratios(hf_config))


def _profile(hf_config: Any) -> ModelProfile:
    names = (
        "num_attention_heads", "head_dim", "qk_rope_head_dim", "index_n_heads", "index_head_dim",
        "index_topk", "sliding_window",
    )  # fmt: skip
    shape = {name: getattr(hf_config, name, None) for name in names}
    for profile in PROFILES.values():
        if profile.family == "v4" and tuple(shape.values()) == (
            profile.heads, profile.v, profile.rope, profile.index_heads, profile.index_dim,
            profile.index_topk, profile.window,
        ):  # fmt: skip
            return profile
    given = ", ".join(f"{name} {value}" for name, value in shape.items())
    raise LeftAlone(f"no model profile has {given}")
