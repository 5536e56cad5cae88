"""What engines decide by themselves, one file an engine release. The default without a table."""

from __future__ import annotations

from nsa_tune.backend.rules.rule import Default, Rule
from nsa_tune.backend.rules.sglang_0_5_23 import SGLANG_0_5_23

__all__ = ["SGLANG_0_5_23", "Default", "Rule"]
