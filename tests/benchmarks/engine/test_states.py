"""How far outputs differ is said in nats too, which weighs each token by its likelihood."""

from __future__ import annotations

from math import log
from typing import Any

import pytest

from benchmarks.engine.states import compared

torch = pytest.importorskip("torch")


def _outputs(*logits: float) -> dict[tuple[int, ...], dict[str, Any]]:
    return {(0, 7): {"hidden_states": None, "logits": torch.tensor([logits])}}


def test_divergence_is_that_of_the_likelihoods() -> None:
    halves, quarters = _outputs(1.0, 1.0), _outputs(0.0, log(3))
    expected = 0.5 * log(0.5 / 0.25) + 0.5 * log(0.5 / 0.75)
    assert compared(halves, quarters)["kl_nats"]["largest"] == pytest.approx(expected, abs=1e-6)
    assert compared(halves, _outputs(5.0, 5.0))["kl_nats"]["largest"] == 0
    assert compared(halves, {})["kl_nats"] is None
