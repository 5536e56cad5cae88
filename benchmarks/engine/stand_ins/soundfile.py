"""Stand-in: SGLang reads sound with it, which no model here takes."""

from __future__ import annotations
