"""The edge to SGLang."""

from __future__ import annotations

from nsa_tune.backend.engines.edge import Edge, EngineMustStop

__all__ = ["EDGE", "EngineMustStop", "attempt", "say_once"]

EDGE = Edge("SGLang", log="nsa_tune.sglang")
attempt = EDGE.attempt
say_once = EDGE.say_once
