"""How graphs are warmed up before they are captured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nsa_tune.engines.sglang.pass_mode.whole_pass.warm_up import warmed_up_briefly


class _Runs:
    """A model of 61 layers, and how far its passes ran."""

    def __init__(self, *, fails: Exception | None = None) -> None:
        self.layer_model = SimpleNamespace(start_layer=0, end_layer=61)
        self.ran: list[int] = []
        self._fails = fails

    def forward(self) -> str:
        end = self.layer_model.end_layer
        if self._fails is not None and end < 61:
            raise self._fails
        self.ran.append(end)
        return f"hidden states of layer {end}"

    def capture_one(self) -> str:
        """As SGLang does it: two runs before the one that is captured."""
        run = warmed_up_briefly(self.layer_model, self.forward, [])
        with pytest.MonkeyPatch.context() as patch:
            for captures in (False, False, True):
                patch.setattr("torch.cuda.is_current_stream_capturing", lambda c=captures: c)
                output = run()
        return str(output)


def test_a_few_layers_run_once_before_a_pass_is_captured() -> None:
    runs = _Runs()

    assert runs.capture_one() == "hidden states of layer 61"
    assert runs.ran == [6, 61]
    assert runs.layer_model.end_layer == 61


def test_where_few_layers_do_not_run_by_themselves_all_do() -> None:
    runs = _Runs(fails=AttributeError("made up: a layer looks at the next one"))

    assert runs.capture_one() == "hidden states of layer 61"
    assert runs.ran == [61, 61]
    assert runs.layer_model.end_layer == 61


def test_a_rank_out_of_memory_does_not_run_all_layers_alone() -> None:
    """The others wait for it after the few."""
    runs = _Runs(fails=torch.OutOfMemoryError("made up"))

    with pytest.raises(torch.OutOfMemoryError):
        runs.capture_one()
    assert runs.ran == []
    assert runs.layer_model.end_layer == 61
