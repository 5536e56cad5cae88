"""Warming up what a graph captures: with a few layers once, where SGLang runs all layers twice.

The runs before a capture compile and tune what has not run with so many tokens. All layers of a
kind are alike, so a few do that as well as all, in whole-pass graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_LAYERS = 6
"""DeepSeek's three dense layers, and three with experts. All further ones are like these."""
_OF_CODE = (AssertionError, AttributeError, LookupError, TypeError)
"""What a model that needs all of its layers raises on every rank. A rank that alone ran out of
memory must not run all layers: the others would wait for it elsewhere."""


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
