"""Stand-in: SGLang shows things in notebooks with it."""

from __future__ import annotations
