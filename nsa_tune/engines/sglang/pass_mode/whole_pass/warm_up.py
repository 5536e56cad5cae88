"""Warming up what a graph captures: with a few layers once, where SGLang runs all layers twice.

The runs before a capture compile and tune what has not run with so many tokens. All layers of a
kind are alike, so a few do that as well as all, in whole-pass graphs and in SGLang's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from nsa_tune import __version__
from nsa_tune.engines.sglang import attempt, say_once
from nsa_tune.engines.sglang.eligible import Engine, why_not
from nsa_tune.engines.sglang.pass_mode.seconds import spent
from nsa_tune.engines.sglang.pass_mode.whole_pass.failed_capture import end_capture
from nsa_tune.engines.sglang.ranks import Ranks
from nsa_tune.engines.sglang.releases import installed_release
from nsa_tune.engines.sglang.switch import SWITCHES, Part

_MODEL = "_nsa_tune_warm_up_model"
"""Attribute of a ModelRunner all of whose ranks warm SGLang's own graphs up briefly."""
_LAYERS = 4
"""DeepSeek's three dense layers, and one with experts. All further ones are like these."""
_OF_CODE = (AssertionError, AttributeError, LookupError, TypeError)
"""What a model that needs all of its layers raises on every rank. A rank that alone ran out of
memory must not run all layers: the others would wait for it elsewhere."""
_FAILED = (
    f"a graph could not be captured after {_LAYERS} layers had warmed it up; unless memory ran "
    f"out, start with {SWITCHES[Part.DENSE]}=0: then SGLang warms its graphs up, by all layers"
)

CaptureOne = Callable[..., None]
"""How a graph backend of SGLang's captures one graph."""


def agree(graphs: Any) -> None:
    """Have SGLang's own graphs warmed up briefly, if all ranks can: the others of one that ran more
    layers would wait for it.

    Call it before SGLang captures any. `graphs` is its PrefillCudaGraphRunner.
    """
    runner, model = graphs.model_runner, graphs.layer_model
    if runner.is_draft_worker:
        return
    runner.__dict__.pop(_MODEL, None)
    with spent("waiting for other ranks"):
        agreed = Ranks(runner).agree("warm_up", __version__ if _may(graphs) else None)
    if agreed:
        setattr(runner, _MODEL, model)
        say_once(logging.INFO, f"{_LAYERS} layers warm up all graphs but the first of each kind")


def _may(graphs: Any) -> bool:
    runner, release = graphs.model_runner, installed_release()
    engine = Engine(runner, runner.attn_backend, graphs)
    return (
        # Whether another one also runs a pass twice was not read.
        release is not None
        and release.known
        and why_not(Part.PASSES, engine) is None
        and why_not(Part.DENSE, engine) is None
        # A compiled pass would be compiled anew for fewer layers.
        and not engine.argument("enable_torch_compile")
        # Passes register memory that ranks share: whether few layers take all of it was not read.
        and not engine.argument("enable_symm_mem")
        # A draft layer (EAGLE-3) reads what certain layers leave.
        and not getattr(graphs.layer_model, "layers_to_capture", ())
        and _few_have_all_parts(graphs.layer_model)
    )


def _few_have_all_parts(model: Any) -> bool:
    """Whether no further layer has a part that the few do not have.

    A checkpoint may leave some layers unquantized, and a model have experts of another size
    further on. What these compile or make in their first pass a capture forbids, or records.
    """
    layers = list(model.layers)[model.start_layer : model.end_layer]
    few, further = (
        {part for layer in some for part in _parts(layer)}
        for some in (layers[:_LAYERS], layers[_LAYERS:])
    )
    return further <= few


def _parts(layer: Any) -> Iterator[tuple[object, ...]]:
    for name, module in layer.named_modules():
        # Their types say how weights of one shape are multiplied.
        how = (type(getattr(module, one, None)) for one in ("quant_method", "scheme"))
        weights = (
            (of, weight.shape, weight.dtype)
            for of, weight in module.named_parameters(recurse=False)
        )
        yield name, type(module), *how, *weights


def brief_capture(graphs: Any) -> CaptureOne | None:
    """How the backend of a graph runner captures one graph after a brief warm-up; None where it is
    not agreed on.

    The first graph is warmed up by SGLang: in its first pass a layer may make something that it
    cannot make within a capture. Where another fails even so, SGLang warms up that one and all that
    follow, if no other rank waits in it.
    """
    runner = graphs.model_runner
    if _MODEL not in runner.__dict__:
        return None
    backend = graphs.backend
    original: CaptureOne = backend.capture_one
    alone = Ranks(runner).count == 1

    def capture_one(key: Any, forward: Callable[[], Any], *rest: Any, **named: Any) -> None:
        model = runner.__dict__.get(_MODEL)
        if model is None or not backend._graphs:
            original(key, forward, *rest, **named)
            return
        brief = partial(original, key, warmed_up_briefly(model, forward, []), *rest, **named)
        if not alone:
            try:
                brief()
            except Exception:
                say_once(logging.ERROR, _FAILED)
                raise
            return
        attempt("warming graphs up by few layers", brief)
        if key not in backend._graphs:
            del runner.__dict__[_MODEL]
            attempt("ending a capture that failed", end_capture, backend)
            original(key, forward, *rest, **named)

    return capture_one


def warmed_up_briefly(
    model: Any, forward: Callable[[], Any], times: list[float]
) -> Callable[[], Any]:
    """`forward` for SGLang's `capture_one`, which runs it twice before it captures it.

    The first run compiles and tunes what has not run with so many tokens, which a few layers do as
    well as all. In the second nothing is left to do: of the output SGLang uses the shape alone.
    `times` gets when the GPU has done the first run, and when the pass is recorded.
    """
    runs, output = 0, None

    def run() -> Any:
        import torch

        nonlocal runs, output
        runs += 1
        if runs > 2 or torch.cuda.is_current_stream_capturing():
            recorded = forward()
            times.append(time.monotonic())
            return recorded
        if runs == 2:
            times.append(time.monotonic())
            # Kept any longer it would take memory while the pass is recorded.
            last, output = output, None
            return last
        try:
            output = _over_few_layers(model, forward)
        except _OF_CODE:
            output = forward()
        return output

    return run


def _over_few_layers(model: Any, forward: Callable[[], Any]) -> Any:
    end = model.end_layer
    model.end_layer = min(end, model.start_layer + _LAYERS)
    try:
        return forward()
    finally:
        model.end_layer = end
