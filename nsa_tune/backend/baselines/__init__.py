"""What engines decide by themselves, one file an engine release. The default without a table."""

from __future__ import annotations

from nsa_tune._errors import UnknownName
from nsa_tune.backend.baselines.baseline import Default, Rule
from nsa_tune.backend.baselines.sglang_0_5_23 import SGLANG_0_5_23
from nsa_tune.backend.baselines.vllm_0_33_0 import VLLM_0_33_0

__all__ = ["RULES", "SGLANG_0_5_23", "VLLM_0_33_0", "Default", "Rule", "rule_of"]

RULES: dict[str, Rule] = {rule.name: rule for rule in (SGLANG_0_5_23, VLLM_0_33_0)}


def rule_of(name: str) -> Rule:
    """The rule called `name`, an engine with its version.

    Raises:
        UnknownName: when there is none.
    """
    try:
        return RULES[name]
    except KeyError:
        raise UnknownName.of("engine rule", name, list(RULES)) from None
