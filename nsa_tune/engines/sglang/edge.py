"""The edge to SGLang."""

from __future__ import annotations

from nsa_tune.engines.edge import Edge

EDGE = Edge("SGLang", log="nsa_tune.sglang")
attempt = EDGE.attempt
say_once = EDGE.say_once
