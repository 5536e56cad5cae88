"""The hooks around SGLang's copies, and what decides whether they do anything.

SGLang reads a prefix back by a function, not by a method, so that what is taken is known for the
process: an engine's process has one model and one layout of the pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from nsa_tune.engines.sglang import last_start
from nsa_tune.engines.sglang.copies.calibration import (
    CopyTime,
    least_of,
    padding_times,
    read_back_times,
)
from nsa_tune.engines.sglang.copies.copies import padded, read_back
from nsa_tune.engines.sglang.copies.eligible import (
    COPIES_SWITCH,
    PADDED_HEADS,
    allowed,
    pads,
    reads_back,
    why_not,
)
from nsa_tune.engines.sglang.edge import attempt, say_once
from nsa_tune.engines.sglang.switch import paused
from nsa_tune.engines.symbols import hooks_on

_POOL_AND_SLOTS = 2
"""How many arguments SGLang gives the function that reads a prefix back."""


@dataclass(slots=True)
class Taken:
    """From which sizes on nsa-tune's copies are taken; None: never."""

    read_back_tokens: int | None = None
    padding_rows: int | None = None

    def forget(self) -> None:
        """Leave all copies to SGLang again."""
        self.read_back_tokens = self.padding_rows = None


TAKEN = Taken()
"""Of this process."""


def around_read_back(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The hook around `dequantize_k_cache_paged`, which SGLang calls with pool and slots."""
    least = TAKEN.read_back_tokens
    if named or len(given) != _POOL_AND_SLOTS or least is None:
        return original(*given, **named)
    if given[1].shape[0] < least or _is_kept():
        return original(*given)
    found = attempt("reading a prefix back", _once, read_back, *given)
    return original(*given) if found is None else found


def around_sparse(original: Callable[..., Any], backend: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `_forward_flashmla_sparse`, which SGLang calls by keywords."""
    least, q = TAKEN.padding_rows, named.get("q_all")
    if least is None or rest or q is None or not _is_padded(q, least, named) or _is_kept():
        return original(backend, *rest, **named)
    wider = attempt("padding queries", _once, padded, q, PADDED_HEADS)
    if wider is None:
        return original(backend, **named)
    return original(backend, **{**named, "q_all": wider})[:, : q.shape[1]]


def attach(runner: Any) -> None:
    """Time both ways in `runner`, SGLang's ModelRunner, and take the faster from now on."""
    if runner.is_draft_worker:
        return
    TAKEN.forget()
    backend = runner.attn_backend
    reason = why_not(backend)
    if reason is not None:
        # A start with another kind of attention says nothing about this.
        _say(f"SGLang copies by itself: {reason}", keep=hasattr(backend, "dsa_prefill_impl"))
        return
    import torch

    begin, device = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    said = []
    function = _function(backend)
    if reads_back(backend) and function is not None:
        times = attempt("timing how a prefix is read back", list, read_back_times(function, device))
        TAKEN.read_back_tokens = least_of(times or ())
        said.append(_summary("prefixes are read back", "tokens", times or ()))
    if pads(backend):
        method = type(backend)._forward_flashmla_sparse.__wrapped__
        measured = padding_times(method, backend, device)
        times = attempt("timing how queries are padded", list, measured)
        TAKEN.padding_rows = least_of(times or ())
        said.append(_summary("queries are padded", "rows", times or ()))
    torch.cuda.empty_cache()
    said.append(f"measured in {time.monotonic() - begin:.1f} s ({COPIES_SWITCH}=0 switches it off)")
    _say("; ".join(said))


def _is_padded(q: Any, least: int, named: dict[str, Any]) -> bool:
    return (
        q.shape[0] >= least
        and q.shape[1] < PADDED_HEADS
        # Sinks are padded to the queries' heads too.
        and named.get("attn_sink") is None
    )


def _is_kept() -> bool:
    """Whether SGLang's own copy stays: the plug-in is paused, or a graph would keep the copy."""
    import torch

    # The switch is read in each pass, as that of the top-k is: so both ways can be measured.
    return paused() or not allowed() or torch.cuda.is_current_stream_capturing()


def _function(backend: Any) -> Callable[..., Any] | None:
    """SGLang's own function that reads a prefix back; None where it is not hooked."""
    module = import_module(type(backend).__module__)
    for name in ("dequantize_k_cache_paged", "dequantize_k_cache_paged_dsa"):
        function: Any = getattr(module, name, None)
        if hooks_on(function):
            original: Callable[..., Any] = function.__wrapped__
            return original
    return None


def _once(copy: Callable[..., Any], *given: Any) -> Any:
    try:
        return copy(*given)
    except BaseException:
        # Once is enough: each layer would fail again.
        TAKEN.forget()
        raise


def _say(text: str, *, keep: bool = True) -> None:
    """Log it, and keep it for the doctor."""
    say_once(logging.INFO, text)
    if keep:
        last_start.keep("copies", text)


def _summary(what: str, unit: str, times: Sequence[CopyTime]) -> str:
    shown = ", ".join(f"{one.engine_us:.0f} to {one.own_us:.0f} us at {one.size}" for one in times)
    least = least_of(times)
    who = "by SGLang" if least is None else f"by nsa-tune from {least} {unit} on"
    return f"{what} {who}" + (f" ({shown})" if shown else "")
