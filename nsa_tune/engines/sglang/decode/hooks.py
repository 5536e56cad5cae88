"""The hook around SGLang's FlashAttention-3 over a selection, and what decides where it acts.

A decode graph keeps the kernels that it was captured with. So both are timed before anything is
captured, and each captured size gets the faster one. Passes without a graph stay SGLang's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from nsa_tune.engines.sglang import last_start
from nsa_tune.engines.sglang.decode.calibration import Call, DecodeTime, measure, wins
from nsa_tune.engines.sglang.decode.eligible import DECODE_SWITCH, why_not
from nsa_tune.engines.sglang.edge import attempt, say_once

_ROWS = "_nsa_tune_decode_rows"


def around_fa3(original: Callable[..., Any], backend: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `_forward_fa3`, which SGLang calls by keywords."""
    rows: frozenset[int] | None = backend.__dict__.get(_ROWS)
    if not rows or rest:
        return original(backend, *rest, **named)
    found = attempt("attending in a decode graph", _attended, backend, rows, named)
    return original(backend, **named) if found is None else found


def attach(runner: Any) -> None:
    """Time both kernels in `runner`, SGLang's ModelRunner, before its graphs are captured."""
    if runner.is_draft_worker:
        return
    backend = runner.attn_backend
    reason = why_not(runner)
    if reason is not None:
        _say(f"SGLang's own kernels decode: {reason}")
        return
    begin = time.monotonic()
    times = list(measure(backend, type(backend)._forward_fa3.__wrapped__))
    setattr(backend, _ROWS, wins(times))
    took_s = time.monotonic() - begin
    _say(f"{_summary(times)}; measured in {took_s:.1f} s")


def _say(text: str) -> None:
    """Log it, and keep it for the doctor."""
    say_once(logging.INFO, text)
    last_start.keep("decode", text)


def _attended(backend: Any, rows: frozenset[int], named: Mapping[str, Any]) -> Any:
    import torch

    try:
        call = Call.of(named)
        if call is None or call.rows not in rows or not torch.cuda.is_current_stream_capturing():
            return None
        return call.attended()
    except BaseException:
        # Once is enough: each layer would fail again.
        delattr(backend, _ROWS)
        raise


def _summary(times: list[DecodeTime]) -> str:
    faster = [one for one in times if one.is_win]
    if not faster:
        return "SGLang's own kernels decode: they are as fast at all measured sizes"
    shown = ", ".join(f"{one.engine_us:.0f} to {one.own_us:.0f} us at {one.rows}" for one in faster)
    return (
        f"nsa-tune's kernel attends in decode graphs of up to {max(one.rows for one in faster)} "
        f"rows: {shown} ({DECODE_SWITCH}=0 leaves this to SGLang)"
    )
