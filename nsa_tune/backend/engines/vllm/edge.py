"""The edge to vLLM."""

from __future__ import annotations

from nsa_tune.backend.engines.edge import Edge

__all__ = ["EDGE", "attempt", "say_once"]

EDGE = Edge("vLLM")
attempt = EDGE.attempt
say_once = EDGE.say_once
