"""What happens when the engine has made a metadata builder: it is looked at, and steered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from nsa_tune._errors import NoTunedData
from nsa_tune.backend.baselines import VLLM_0_33_0
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.agreement import NOTHING, decides_by
from nsa_tune.engines.decision_log import process_log
from nsa_tune.engines.dispatchers import opened
from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.switches import asked_for
from nsa_tune.engines.vllm import EDGE, attempt, say_once
from nsa_tune.engines.vllm.dense import DensePrefill
from nsa_tune.engines.vllm.facts import Facts, facts_of
from nsa_tune.engines.vllm.prefill import Prefill, steer
from nsa_tune.engines.vllm.priced import priced, priced_dense
from nsa_tune.engines.vllm.ranks import agreed

DENSE_MLA = "NSA_TUNE_DENSE_MLA"
"""Environment variable: 1 steers dense MLA too. Asking slows steps that wait for the host."""


def around_init(
    original: Callable[..., None], builder: Any, kv_cache_spec: Any, layer_names: Sequence[str],
    *rest: Any, **named: Any,
) -> None:  # fmt: skip
    """The hook around a builder's constructor. Builders of dense MLA keep no names of layers."""
    original(builder, kv_cache_spec, layer_names, *rest, **named)
    attempt("looking at a metadata builder", attach, builder, layer_names)


def attach(builder: Any, layer_names: Sequence[str]) -> None:
    """Steer `builder` as far as there are measurements for it, and say what comes of it."""
    prepared = attempt("looking at a metadata builder", _prepared, builder, layer_names)
    # Every rank says something, or the others would wait for it.
    alike = agreed(NOTHING if prepared is None else decides_by(prepared[1], prepared[0]))
    if prepared is None or not alike:
        return
    # All that may fail on this rank alone has been done.
    facts, dispatcher, prefill = prepared
    steer(builder, prefill)
    what = "prefill by MHA or MLA"
    if facts.layout is KVLayout.FP8_PACKED:
        what += " (flashmla_kv, flashmla_sparse)"
    say_once(logging.INFO, f"{facts}: {what} by {dispatcher.source}")


def _prepared(
    builder: Any, layer_names: Sequence[str]
) -> tuple[Facts, Dispatcher, Prefill | DensePrefill] | None:
    """The facts of `builder`, the table that steers it, and what steers it; None, after a line that
    says why, where nothing does."""
    try:
        facts = facts_of(builder, layer_names)
        dispatcher = opened(
            EDGE, VLLM_0_33_0, facts.profile.name, facts.heads, facts.kv_dtype, facts.layers
        )
        if dispatcher is None:
            return None
        _check_measured(dispatcher, facts)
        if not (facts.profile.has_indexer or asked_for(DENSE_MLA)):
            raise LeftAlone(f"dense MLA is steered with {DENSE_MLA}=1 only")
    except (LeftAlone, NoTunedData) as reason:
        say_once(logging.WARNING, f"vLLM decides by itself: {reason}")
        return None
    if not facts.profile.has_indexer:
        dispatcher = priced_dense(dispatcher, facts.layers)
        return facts, dispatcher, DensePrefill(dispatcher, facts)
    dispatcher = priced(dispatcher, facts.layers, facts.workspace_tokens)
    return facts, dispatcher, Prefill(builder, dispatcher, facts, process_log())


def _check_measured(dispatcher: Dispatcher, facts: Facts) -> None:
    """Whether the table has times of what the engine would run by itself.

    Raises:
        LeftAlone: when it has not.
    """
    point = "prefill"
    arms: tuple[str, ...] = ("mla/flashmla_sparse",)
    if not facts.profile.has_indexer:
        point, arms = "dense_prefill", ("mla/fa3_paged", "mha/sgl_fa3", "mha/sgl_fa3_merged")
    elif facts.layout is KVLayout.FP8_PACKED:
        arms = ("mla/flashmla_kv", "mla/flashmla_sparse")
    elif dispatcher.setting.device.arch != "sm90":
        # There a prefill may take MHA under a mask of the selection, which is not measured.
        raise LeftAlone(f"nothing is measured for bf16 KV on {dispatcher.setting.device.arch}")
    for arm in arms:
        if dispatcher.policies[point].spread(arm) == inf:
            raise LeftAlone(f"the table has no times of {arm}")
