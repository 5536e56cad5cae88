"""The edge to vLLM."""

from __future__ import annotations

from nsa_tune.engines.edge import Edge

# vLLM sets up its own loggers only: lines of others below WARNING are lost (logger.py:75-105).
EDGE = Edge("vLLM", log="vllm.nsa_tune")
attempt = EDGE.attempt
say_once = EDGE.say_once
