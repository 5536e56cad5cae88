"""What happens when the engine has built an attention backend: it is looked at, and steered."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from math import inf
from typing import Any

from nsa_tune._errors import NoTunedData
from nsa_tune.backend.decision_log import DecisionLog
from nsa_tune.backend.dispatcher import Dispatcher
from nsa_tune.backend.integrations.sglang.edge import attempt, say_once
from nsa_tune.backend.integrations.sglang.facts import LeftAlone, facts_of
from nsa_tune.backend.integrations.sglang.indexer import PAIR, Indexer
from nsa_tune.backend.integrations.sglang.prefill import Answers, Prefill
from nsa_tune.backend.integrations.sglang.releases import (
    AUTO,
    Release,
    installed_version,
    release_of,
)
from nsa_tune.backend.integrations.sglang.symbols import hooks_on
from nsa_tune.backend.serving import Match

__all__ = ["around_init", "attach"]


def around_init(
    original: Callable[..., None], backend: Any, model_runner: Any, *rest: Any, **named: Any
) -> None:
    """The hook around the backend's constructor."""
    original(backend, model_runner, *rest, **named)
    attempt("looking at an attention backend", attach, backend, model_runner)


def attach(backend: Any, model_runner: Any) -> None:
    """Steer `backend` as far as there are measurements for it, and say what comes of it."""
    release = release_of(installed_version() or "")
    assert release is not None, "only a known release is hooked"
    try:
        facts = facts_of(backend, model_runner)
        dispatcher = _dispatcher(facts.profile.name, facts.heads, facts.kv_dtype)
    except (LeftAlone, NoTunedData) as reason:
        say_once(logging.WARNING, f"SGLang decides by itself: {reason}")
        return
    if dispatcher.match is Match.RULE:
        return  # opening has said so
    if dispatcher.match is Match.ARCHITECTURE:
        # Of two GPUs of one architecture one may have a seventh of the other's arithmetic.
        say_once(logging.WARNING, "SGLang decides by itself: that table is of another GPU")
        return
    steered = []
    impls = _measured(dispatcher, release.prefill_impls[facts.layout])
    own = release.prefill_auto[facts.layout] if facts.impl == AUTO else {facts.impl}
    # What the engine would run must be among what was compared.
    if own <= impls:
        Prefill.attach(backend, Answers(dispatcher, facts, impls), _log())
        steered.append(f"prefill by MHA or MLA ({', '.join(sorted(impls))})")
    else:
        say_once(
            logging.WARNING,
            f"SGLang decides by itself how to prefill: {facts.impl} is not among what was measured",
        )
    if _pairs_possible(backend, model_runner, dispatcher):
        Indexer.attach(backend, dispatcher)
        steered.append("the indexer's rows")
    if steered:
        say_once(logging.INFO, f"{facts}: {' and '.join(steered)} by {dispatcher.source}")
    _check_hooks(backend, release)


def _check_hooks(backend: Any, release: Release) -> None:
    """SGLang goes on without a hook that it could not apply: say so."""
    for symbol in release.symbols:
        name = symbol.path.rpartition(".")[2]
        if not hooks_on(getattr(type(backend), name, None)):
            say_once(logging.WARNING, f"{symbol.target} is not hooked: SGLang decides that itself")


@cache
def _dispatcher(model: str, heads: int, kv_dtype: str) -> Dispatcher:
    return Dispatcher.open(model=model, heads=heads, kv_dtype=kv_dtype)


@cache
def _log() -> DecisionLog | None:
    return DecisionLog.from_environment()


def _measured(dispatcher: Dispatcher, impls: frozenset[str]) -> frozenset[str]:
    """Those of `impls` that the table has times of."""
    policy = dispatcher.policies["prefill"]
    return frozenset(impl for impl in impls if policy.spread(f"mla/{impl}") < inf)


def _pairs_possible(backend: Any, model_runner: Any, dispatcher: Dispatcher) -> bool:
    return (
        backend.speculative_num_draft_tokens == PAIR
        and dispatcher.setting.device.arch == "sm90"
        and model_runner.server_args.dsa_paged_mqa_logits_backend in ("auto", "deepgemm")
        and os.environ.get("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "0").lower() in ("", "0", "false")
    )
