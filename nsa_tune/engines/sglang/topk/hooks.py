"""The hook around SGLang's selection of keys, and what decides whether it does anything."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from nsa_tune.engines.sglang import last_start
from nsa_tune.engines.sglang.edge import attempt, say_once
from nsa_tune.engines.sglang.releases import TOPK_MODULE
from nsa_tune.engines.sglang.switch import paused
from nsa_tune.engines.sglang.topk.calibration import check, measure
from nsa_tune.engines.sglang.topk.eligible import TOPK_SWITCH, allowed, why_not
from nsa_tune.engines.sglang.topk.selector import Selector
from nsa_tune.engines.sglang.topk.times import TopkTime, TopkTimes

_SELECTOR = "_nsa_tune_topk"


def around_topk(original: Callable[..., Any], backend: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `DSATopKBackend.topk_transform`, which SGLang calls by keywords."""
    selector: Selector | None = backend.__dict__.get(_SELECTOR)
    prefill = named.get("row_starts") is not None and not rest
    # The switch is read in each pass, as SGLang reads its own: so both ways can be measured.
    if selector is None or not prefill or paused() or not allowed():
        return original(backend, *rest, **named)
    found = attempt("selecting keys", _selected, backend, selector, named)
    return original(backend, **named) if found is None else found


def attach(runner: Any) -> None:
    """Measure both selections in `runner`, SGLang's ModelRunner, and use the faster from now on.

    All of a process's layers and model runners share one `DSATopKBackend`.
    """
    if runner.is_draft_worker:
        return
    reason = _why_not(runner.attn_backend)
    if reason is not None:
        # A start with another kind of attention says nothing about this.
        dsa = hasattr(runner.attn_backend, "dsa_topk_backend")
        _say(f"SGLang selects keys by itself: {reason}", keep=dsa)
        return
    import torch

    begin, device = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    backend, topk = runner.attn_backend.dsa_topk_backend, runner.attn_backend.dsa_index_topk
    own = type(backend).topk_transform.__wrapped__
    check(topk, device)
    found: list[TopkTime] = []
    for method in _methods(runner.attn_backend):
        given = (own, backend, topk, method, device)
        found += (
            attempt("timing how keys are selected", lambda *all: [*measure(*all)], *given) or []
        )
    torch.cuda.empty_cache()
    times = TopkTimes(found)
    setattr(backend, _SELECTOR, Selector(times, torch.cuda.is_current_stream_capturing))
    _say(f"{_summary(times)}; measured in {time.monotonic() - begin:.1f} s")


def attached(backend: Any) -> TopkTimes | None:
    """What was measured for an attention backend; None where SGLang selects by itself."""
    own = getattr(backend, "dsa_topk_backend", object).__dict__
    selector: Selector | None = own.get(_SELECTOR)
    return None if selector is None else selector.times


def _say(text: str, *, keep: bool = True) -> None:
    """Log it, and keep it for the doctor."""
    say_once(logging.INFO, text)
    if keep:
        last_start.keep("topk", text)


def _selected(backend: Any, selector: Selector, named: Mapping[str, Any]) -> Any:
    try:
        return selector.select(named)
    except BaseException:
        # Once is enough: each layer would fail again.
        delattr(backend, _SELECTOR)
        raise


def _why_not(backend: Any) -> str | None:
    import torch

    from nsa_tune.backend.kernels.sampled_topk import MOST

    if torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        return "nsa-tune's kernel is for NVIDIA's GPUs from compute capability 8.0"
    return why_not(backend, MOST)


def _methods(backend: Any) -> list[Any]:
    """What SGLang may make of selected places in a prefill over this backend's pool."""
    known = import_module(TOPK_MODULE).TopkTransformMethod
    return [known.PAGED, known.RAGGED] if backend.dsa_kv_cache_store_fp8 else [known.PAGED]


def _summary(times: TopkTimes) -> str:
    wins = [one for one in times.times if one.is_win]
    if not wins:
        return "SGLang selects keys by itself: it is as fast at all measured sizes"
    best = max(wins, key=lambda one: one.engine_us / one.own_us)
    return (
        f"nsa-tune's kernel selects keys in prefills: it is faster at {len(wins)} of "
        f"{len(times.times)} measured sizes, {best.engine_us:.0f} to {best.own_us:.0f} us at "
        f"{best.rows} rows of {best.keys} keys ({TOPK_SWITCH}=0 leaves this to SGLang)"
    )
