"""What happens when the engine has built an attention backend: it is looked at, and steered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Any

from nsa_tune._errors import NoTunedData
from nsa_tune.backend.baselines import DEFAULT_BASELINE
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.libraries.sglang.calls import triton_sparse
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.agreement import decides_by
from nsa_tune.engines.decision_log import process_log as decision_log
from nsa_tune.engines.dispatchers import opened
from nsa_tune.engines.edge import LeftAlone
from nsa_tune.engines.plugin import HOOKS_IN_PLACE
from nsa_tune.engines.sglang import EDGE, attempt, say_once
from nsa_tune.engines.sglang.costs import untaken, with_pass_overhead, without_unsupported
from nsa_tune.engines.sglang.eligible import Engine, variable_set, why_not
from nsa_tune.engines.sglang.facts import TRITON, Facts, facts_of
from nsa_tune.engines.sglang.indexer import PAIR, Indexer
from nsa_tune.engines.sglang.kernels.swap import current_device, relative_error
from nsa_tune.engines.sglang.prefill import Answers, Prefill
from nsa_tune.engines.sglang.ranks import Ranks
from nsa_tune.engines.sglang.releases import AUTO, SGLangRelease, installed_release
from nsa_tune.engines.sglang.switch import Part, switch_is_on
from nsa_tune.engines.symbols import hooks_on

_ROUNDED = 0.02
"""How far a kernel's output may be from attention, as a share of its norm."""


def around_init(
    original: Callable[..., None], backend: Any, model_runner: Any, *rest: Any, **named: Any
) -> None:
    """The hook around the backend's constructor."""
    original(backend, model_runner, *rest, **named)
    attempt("looking at an attention backend", attach, backend, model_runner)


def attach(backend: Any, model_runner: Any) -> None:
    """Steer `backend` as far as there are measurements for it, and say what comes of it."""
    release = installed_release()
    assert release is not None, "no other release is hooked"
    if not release.known and getattr(model_runner, "is_draft_worker", False):
        return  # a draft model's start proves nothing
    ranks, prepared = Ranks(model_runner), None
    try:
        prepared = _prepared(backend, model_runner, release)
    finally:
        alike = ranks.agree("table", prepared and prepared[0])
    if prepared is not None and alike:
        prepared[1]()
        check_hooks(backend)
    elif prepared is not None:
        text = "SGLang decides by itself: the ranks' tables differ, or one has none or no plug-in"
        say_once(logging.WARNING, text)


def _prepared(
    backend: Any, model_runner: Any, release: SGLangRelease
) -> tuple[str, Callable[[], None]] | None:
    """All that decides, as one digest, and what steers `backend` by it; None, after a line that
    says why, where nothing does."""
    try:
        if reason := why_not(Part.TABLE, Engine(model_runner, backend)):
            raise LeftAlone(f"nothing is decided by a table with {reason}")
        facts = facts_of(backend, model_runner)
        dispatcher = opened(EDGE, DEFAULT_BASELINE, facts.profile.name, facts.heads, facts.kv_dtype)
    except (LeftAlone, NoTunedData) as reason:
        say_once(logging.WARNING, f"SGLang decides by itself: {reason}")
        return None
    if dispatcher is None:
        return None
    impls = _working(_measured(dispatcher, release.prefill_impls[facts.layout]), facts)
    defaults = release.prefill_auto[facts.layout] if facts.impl == AUTO else {facts.impl}
    # What the engine would run must be among what was compared.
    compared = defaults <= impls
    if not compared:
        problem = f"{facts.impl} is not among what was measured"
        say_once(logging.WARNING, f"SGLang decides by itself how to prefill: {problem}")
    if facts.layers is None and facts.layout is KVLayout.FP8_PACKED:
        # What reading back costs once a pass cannot be shared out.
        impls &= {"flashmla_kv"}
    answers = _answers(dispatcher, facts, impls) if compared else None
    # What a start proves are prefills.
    paired = release.known and _pairs_possible(backend, model_runner, dispatcher)
    log = decision_log()

    def steer() -> None:
        # All that may fail has been done: a backend is steered as is said, or not at all.
        steered = []
        if answers is not None:
            Prefill.attach(backend, answers, log)
            steered.append(f"prefill by MHA or MLA ({', '.join(sorted(impls))})")
        if paired:
            Indexer.attach(backend, dispatcher)
            steered.append("the indexer's rows")
        if steered:
            say_once(logging.INFO, f"{facts}: {' and '.join(steered)} by {dispatcher.source}")

    return decides_by(dispatcher, facts, sorted(impls)), steer


def _answers(dispatcher: Dispatcher, facts: Facts, impls: frozenset[str]) -> Answers:
    """The answers for a backend, in which kernels bear what they cost once a pass."""
    without = untaken(impls)
    if facts.layout is KVLayout.FP8_PACKED and facts.layers is not None:
        # nsa-tune's kernel reads prefixes back, unless SGLang's is found to be as fast.
        swapped = switch_is_on(Part.COPIES) and dispatcher.setting.device.arch == "sm90"
        dispatcher = with_pass_overhead(
            dispatcher, facts.layers, swapped_read_back=swapped, without=without
        )
    else:
        dispatcher = without_unsupported(dispatcher, without)
    return Answers(dispatcher, facts, impls)


def _working(impls: frozenset[str], facts: Facts) -> frozenset[str]:
    """`impls` without SGLang's kernel for few heads, if that does not run here."""
    triton = frozenset(impl for impl in impls if impl.startswith(TRITON))
    works = not triton or attempt(f"compiling {TRITON}", compiled, facts)
    return impls if works else impls - triton


def compiled(facts: Facts) -> bool:
    """Whether SGLang's kernel for few heads was compiled, so that no served pass waits for it, and
    computes attention, also by unions; an error where it does not.

    Raises:
        LibraryMissing: in a release without it.
        RuntimeError: when it computes something else.
    """
    import torch

    from nsa_tune.backend.kernels.sparse_mla import sparse_mla_reference

    profile, heads, topk = facts.profile, facts.heads, facts.profile.index_topk
    made = {"dtype": torch.bfloat16, "device": current_device()}
    latents = torch.randn(2 * topk, profile.latent, **made)
    # One more row than fours hold, each with fewer keys than the one before it.
    q = torch.randn(9, heads, profile.latent, **made)
    lengths = topk - 101 * torch.arange(9, dtype=torch.int32, device=q.device)
    indices = torch.rand(len(q), len(latents), **made).argsort(dim=1)[:, :topk].int()
    indices[torch.arange(topk, device=q.device) >= lengths[:, None]] = -1
    scale, rank = profile.softmax_scale, profile.rank
    plain = sparse_mla_reference(q, latents, indices, scale, rank)
    for union in (0, 4):
        out = triton_sparse(q, latents, indices, scale, rank, lengths, union)
        if not (error := relative_error(plain, out)) <= _ROUNDED:
            raise RuntimeError(f"{TRITON}, union {union}, is {error:.1g} away from attention")
    return True


def check_hooks(backend: Any) -> None:
    """SGLang goes on without a hook that it could not apply: say so."""
    release = installed_release()
    classes = {kind.__name__ for kind in type(backend).__mro__}
    for symbol in release.symbols if release is not None else ():
        owner, _, name = symbol.path.rpartition(".")
        # A process that has V4's backend need not have DSA's.
        hook = HOOKS_IN_PLACE.get(symbol.name)
        there = hooks_on(getattr(type(backend), name, None)) or (hook and hook.is_off)
        if owner in classes and not there:
            say_once(logging.WARNING, f"{symbol.target} is not hooked: SGLang decides that itself")


def _measured(dispatcher: Dispatcher, impls: frozenset[str]) -> frozenset[str]:
    """Those of `impls` that the table has times of."""
    policy = dispatcher.policies["prefill"]
    return frozenset(impl for impl in impls if policy.spread(f"mla/{impl}") < inf)


def _pairs_possible(backend: Any, model_runner: Any, dispatcher: Dispatcher) -> bool:
    return (
        backend.speculative_num_draft_tokens == PAIR
        and dispatcher.setting.device.arch == "sm90"
        and model_runner.server_args.dsa_paged_mqa_logits_backend in ("auto", "deepgemm")
        and not variable_set("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH")
    )
