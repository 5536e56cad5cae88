"""What engines decide by themselves, a file for each release. It answers where no table does."""

from __future__ import annotations

from nsa_tune._errors import UnknownName
from nsa_tune.backend.baselines.baseline import Baseline, Default
from nsa_tune.backend.baselines.sglang_0_5_23 import (
    SGLANG_0_5_17,
    SGLANG_0_5_23,
    SGLANG_0_5_23_FULL,
)
from nsa_tune.backend.baselines.vllm_0_33_0 import VLLM_0_33_0

__all__ = [
    "BASELINES",
    "DEFAULT_BASELINE",
    "SGLANG_0_5_17",
    "SGLANG_0_5_23",
    "SGLANG_0_5_23_FULL",
    "VLLM_0_33_0",
    "Baseline",
    "Default",
    "baseline_of",
]

BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        SGLANG_0_5_23,
        SGLANG_0_5_17,
        SGLANG_0_5_23_FULL,
        VLLM_0_33_0,
    )
}
DEFAULT_BASELINE = SGLANG_0_5_23
"""What a dispatcher or a report compares with that is given none."""


def baseline_of(name: str) -> Baseline:
    """The baseline called `name`, an engine with its version.

    Raises:
        UnknownName: when there is none.
    """
    try:
        return BASELINES[name]
    except KeyError:
        raise UnknownName.of("engine baseline", name, list(BASELINES)) from None
