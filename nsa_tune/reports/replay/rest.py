"""The rest of a pass: what a forward pass takes besides its priced attention, as a file states it.

    {
      "schema": "nsa-tune/rest-of-pass/1",
      "what": "SGLang 0.5.17, DeepSeek V3.2, one rank of TP 8, H200",
      "kv_dtype": "bf16",
      "attention": ["prefill", "decode"],
      "gpu_ms": {
        "graph": {"pass": 9.0, "q_tokens": 0.03, "pairs": 1e-6},
        "eager": {"pass": 9.0, "q_tokens": 0.03, "pairs": 1e-6},
        "decode": {"pass": 12.0, "batch_size": 0.05}
      },
      "host_ms": {"graph": 10.0, "eager": 170.0, "decode": 5.0},
      "scored_above": 2048,
      "error": {"median": 0.02, "p90": 0.06, "passes": 100}
    }

A pass of one kind takes its attention and a weighted sum of its own numbers, in milliseconds, but
no less than the host needs to launch it. `kv_dtype` is the format of the KV pool, of which a
pass's other work depends too; it may be left out. `attention` names the steps that were subtracted
when the weights were fitted, so that the same steps must be priced. `error` is that of the whole
pass where the weights were fitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from nsa_tune._errors import UsageError

SCHEMA = "nsa-tune/rest-of-pass/1"
KINDS = ("graph", "eager", "decode")
"""A prefill in a CUDA graph, one that is launched kernel by kernel, and any other pass."""
_FORMATS = ("bf16", "fp8")
TERMS = ("pass", "batch_size", "q_tokens", "kv_tokens", "pairs", "scored_tokens")
"""What a weight may be for: the pass itself, or one of each of its numbers. `scored_tokens` are the
new tokens of a pass with a sequence so long that the indexer selects, else 0."""


def kind_of(*, extend: bool, graph: bool) -> str:
    """The kind of a pass."""
    if not extend:
        return "decode"
    return "graph" if graph else "eager"


@dataclass(frozen=True, slots=True)
class RestOfPass:
    """What a pass takes besides attention."""

    what: str
    """What it was measured on."""
    attention: tuple[str, ...]
    """The steps that it does not hold."""
    gpu_ms: Mapping[str, Mapping[str, float]]
    """By kind: milliseconds for one of each term."""
    host_ms: Mapping[str, float]
    """By kind: the least time of a pass."""
    scored_above: int
    """Longest sequence, in tokens, up to which the indexer has nothing to select."""
    error: Mapping[str, float]
    """Of a whole pass, as a part of it: "median" and "p90"; and "passes", how many."""
    kv_dtype: str | None = None
    """Format of the KV pool in which it was measured; None where that is not stated."""

    @classmethod
    def read(cls, path: Path) -> RestOfPass:
        """The model in `path`.

        Raises:
            UsageError: when it cannot be read, or is none.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not JSON: {error}") from error
        try:
            return cls._of(found)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path} is no model of the rest of a pass ({error}); see docs/replay.md"
            ) from error

    @classmethod
    def _of(cls, found: Any) -> RestOfPass:
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is {found['schema']!r}, not {SCHEMA!r}")
        gpu_ms = {
            kind: _numbers(found["gpu_ms"][kind], TERMS)
            for kind in KINDS
            if kind in found["gpu_ms"]
        }
        if not gpu_ms:
            raise ValueError(f"gpu_ms has none of {', '.join(KINDS)}")
        return cls(
            str(found.get("what", "")),
            tuple(map(str, found["attention"])),
            gpu_ms,
            _numbers(found.get("host_ms", {}), KINDS),
            int(found.get("scored_above", 0)),
            _numbers(found.get("error", {}), ("median", "p90", "passes")),
            _format(found.get("kv_dtype")),
        )

    @classmethod
    def read_for(cls, paths: Sequence[Path], kv_dtype: str) -> RestOfPass | None:
        """The model for one format of the KV pool: that of this format, or one that states none.
        None without files.

        Raises:
            UsageError: when all are of other formats, or one cannot be read.
        """
        found = [cls.read(path) for path in paths]
        fitting = [one for one in found if one.kv_dtype in (kv_dtype, None)]
        if found and not fitting:
            raise UsageError(
                f"no rest of a pass for a KV pool in {kv_dtype}: give a file for it with one more "
                "--rest"
            )
        return next((one for one in fitting if one.kv_dtype), next(iter(fitting), None))

    def ms(self, kind: str, attention_ms: float, sums: Sequence[int], *, padding: int = 0) -> float:
        """The duration of a pass; `sums` are sequences, new tokens, kv tokens, the longest, pairs.
        `padding` are tokens of its graph that are not new.

        A kind without weights takes those of the first kind that has some.
        """
        weights = self.gpu_ms.get(kind) or next(iter(self.gpu_ms.values()))
        numbers = numbers_of(sums, self.scored_above, padding)
        rest = sum(weight * numbers[term] for term, weight in weights.items())
        return max(attention_ms + rest, self.host_ms.get(kind, 0.0))


def numbers_of(sums: Sequence[int], scored_above: int, padding: int = 0) -> dict[str, int]:
    """The numbers of a pass, by `TERMS`. What a graph holds runs for its `padding` too."""
    size, new, kv, longest, pairs = sums
    return {
        "pass": 1, "batch_size": size, "q_tokens": new + padding, "kv_tokens": kv, "pairs": pairs,
        "scored_tokens": new if longest > scored_above else 0,
    }  # fmt: skip


def _format(found: Any) -> str | None:
    if found not in (None, *_FORMATS):
        raise ValueError(f"its kv_dtype is {found!r}, not {' or '.join(_FORMATS)}")
    return None if found is None else str(found)


def _numbers(found: Any, names: Sequence[str]) -> dict[str, float]:
    unknown = set(found) - set(names)
    if unknown:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}; known are {', '.join(names)}")
    values = {str(name): float(value) for name, value in found.items()}
    wrong = [name for name, value in values.items() if not (isfinite(value) and value >= 0)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must be a number of at least 0")
    return values
