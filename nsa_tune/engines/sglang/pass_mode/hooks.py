"""The hooks around SGLang's model runner and its prefill graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from nsa_tune.engines.sglang import attempt, last_start, say_once
from nsa_tune.engines.sglang.kernels import SWAPS, layer_hooks
from nsa_tune.engines.sglang.kernels.swap import KernelSwap
from nsa_tune.engines.sglang.pass_mode.forward import Forward
from nsa_tune.engines.sglang.pass_mode.seconds import ENGINE, SECONDS, spent, split
from nsa_tune.engines.sglang.pass_mode.start import STEERING, attach, drop_unproven_table
from nsa_tune.engines.sglang.pass_mode.steering.steering import EAGER, GRAPHS, Steering, attribute
from nsa_tune.engines.sglang.pass_mode.whole_pass import capture, warm_up
from nsa_tune.engines.sglang.pass_mode.whole_pass.capture import WholePassGraphs
from nsa_tune.engines.sglang.prefill import start_looking
from nsa_tune.engines.sglang.switch import paused


def around_forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *rest: Any, **named: Any
) -> Any:
    """The hook around `ModelRunner._forward_raw`, which runs a pass."""
    steering: Steering | None = runner.__dict__.get(STEERING)
    if steering is None or named:
        return original(runner, forward_batch, *rest, **named)
    if paused():
        steering.passed()
        return original(runner, forward_batch, *rest)
    return steering.forward(Forward(original, runner, forward_batch, rest))


def around_capture(original: Callable[..., Any], graphs: Any) -> Any:
    """The hook around `PrefillCudaGraphRunner._capture_one_stream`: whole-pass graphs follow."""
    attempt("warming graphs up briefly", warm_up.agree, graphs)
    result = around_capture_decode(original, graphs)
    attempt("capturing whole-pass prefill graphs", capture.capture_all, graphs)
    return result


def around_capture_decode(
    original: Callable[..., Any], graphs: Any, *rest: Any, **named: Any
) -> Any:
    """The hook around `DecodeCudaGraphRunner._capture_one_stream`: few layers warm graphs up."""
    capture_one = attempt("warming graphs up briefly", warm_up.brief_capture, graphs)
    backend = getattr(graphs, "backend", None)
    # SGLang captures these anew for other weights, if it is asked to, and for another role.
    with layer_hooks.capturing(), spent(ENGINE), attribute(backend, "capture_one", capture_one):
        return original(graphs, *rest, **named)


def around_can_run(original: Callable[..., Any], graphs: Any, forward_batch: Any) -> Any:
    """The hook around `PrefillCudaGraphRunner.can_run_graph`."""
    return EAGER not in graphs.__dict__ and original(graphs, forward_batch)


def around_replay(
    original: Callable[..., Any], backend: Any, shape_key: Any, *rest: Any, **named: Any
) -> Any:
    """The hook around `BreakableCudaGraphBackend.replay`."""
    whole: WholePassGraphs | None = backend.__dict__.get(GRAPHS)
    if whole is not None:
        shape_key = whole.key(shape_key.size)
    return original(backend, shape_key, *rest, **named)


def around_prepare_metadata(
    original: Callable[..., Any],
    graphs: Any,
    forward_batch: Any,
    static_forward_batch: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """The hook around `_prepare_forward_metadata_for_replay`: whole-pass graphs have their own."""
    whole: WholePassGraphs | None = graphs.backend.__dict__.get(GRAPHS)
    if whole is None:
        return original(graphs, forward_batch, static_forward_batch, *rest, **named)
    whole.prepare(len(static_forward_batch.input_ids), forward_batch)
    return None


def around_init_graphs(original: Callable[..., Any], runner: Any, *rest: Any, **named: Any) -> Any:
    """The hook around `ModelRunner.init_cuda_graphs`: afterwards passes can be measured."""
    layer_hooks.put_on()
    # An engine that captures anew has other graphs than those that this knows.
    runner.__dict__.pop(STEERING, None)
    SECONDS.clear()
    # Graphs keep the kernels that they are captured with; the others change what passes take.
    _compare(runner, (swap for swap in SWAPS if swap.captured))
    result = original(runner, *rest, **named)
    _compare(runner, (swap for swap in SWAPS if not swap.captured))
    # Passes are timed as they will be served.
    layer_hooks.serve()
    attempt("proving how passes run", attach, runner)
    attempt("leaving out what is not proven", drop_unproven_table, runner)
    if STEERING in runner.__dict__:
        say_once(logging.INFO, split())
        attempt("keeping what a start took", last_start.keep, "start", split())
    attempt("looking at selections", start_looking, runner)
    return result


def _compare(runner: Any, swaps: Iterable[KernelSwap]) -> None:
    with spent("comparing kernels"):
        for swap in swaps:
            attempt("comparing kernels", swap.start, runner)
        # PyTorch would keep the scores that keys are selected by for itself.
        attempt("releasing memory", _release)


def _release() -> None:
    import torch

    torch.cuda.empty_cache()
