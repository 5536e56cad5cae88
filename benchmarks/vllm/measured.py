"""What a case gave: times with the plug-in off and on, what was decided, and how outputs differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.vllm.cases import Case

__all__ = ["Measured", "Outputs", "Pass", "Spread", "apart", "best", "way_of"]

Outputs = Sequence[dict[int, float]]
"""Of each sequence, the log-probabilities of the most likely next tokens."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One batch, run once."""

    ms: float
    """GPU time between the start and the end of vLLM's model runner, of all steps together."""
    ways: tuple[str, ...]
    """How each step was prepared, in words."""
    outputs: Outputs


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some numbers, the least and the greatest."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of `values`, of which there is at least one."""
        known = sorted(values)
        return cls(median(known), known[0], known[-1])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f} to {self.most:.3f})"


class Measured:
    """The passes of one case: off, on and off again in each round, on the same prompts."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._rounds: list[tuple[Pass, Pass, Pass]] = []

    def add(self, off: Pass, on: Pass, again: Pass) -> None:
        """Take in one round."""
        self._rounds.append((off, on, again))

    def record(self) -> dict[str, Any]:
        """All of it, for a JSON file. A ratio above 1 says that the plug-in is faster."""
        rounds = self._rounds
        outputs = [[one.outputs for one in passes] for passes in rounds]
        tokens = [
            best(a) == best(b) for off, on, _ in outputs for a, b in zip(off, on, strict=True)
        ]
        return {
            "case": str(self.case), **asdict(self.case),
            "off_ms": asdict(Spread.of(one.ms for a, _, b in rounds for one in (a, b))),
            "on_ms": asdict(Spread.of(on.ms for _, on, _ in rounds)),
            "ratio": asdict(Spread.of((a.ms + b.ms) / (2 * on.ms) for a, on, b in rounds)),
            "ratio_off_off": asdict(Spread.of(a.ms / b.ms for a, _, b in rounds)),
            "off_way": rounds[-1][0].ways, "on_way": rounds[-1][1].ways,
            "apart_off_on": max(apart(off, on) for off, on, _ in outputs),
            "apart_off_off": max(apart(off, again) for off, _, again in outputs),
            "same_best_token": sum(tokens), "tokens": len(tokens),
            "rounds": [[one.ms for one in passes] for passes in rounds],
        }  # fmt: skip

    def line(self) -> str:
        """The same for a reader."""
        found = self.record()
        ratio = Spread(**found["ratio"])
        ways = " + ".join(found["off_way"]), " + ".join(found["on_way"])
        return (
            f"{self.case}: off {found['off_ms']['median']:.2f} ms ({ways[0]}), "
            f"on {found['on_ms']['median']:.2f} ms ({ways[1]}), {ratio} times as fast; "
            f"log-probabilities differ by {found['apart_off_on']:.4f} at most, "
            f"off against off by {found['apart_off_off']:.4f}; "
            f"same best token {found['same_best_token']} of {found['tokens']}"
        )


def apart(some: Outputs, others: Outputs) -> float:
    """The greatest difference between log-probabilities of a token that both have."""
    return max(
        (
            abs(one[token] - other[token])
            for one, other in zip(some, others, strict=True)
            for token in one.keys() & other.keys()
        ),
        default=float("nan"),
    )


def best(output: dict[int, float]) -> int:
    """The most likely token; the least id of equal ones."""
    return min(output, key=lambda token: (-output[token], token))


def way_of(metadata: Any, *, dense: bool = False) -> str:
    """In words, which way the builder's `metadata` sends the step's tokens; of `dense` MLA all
    prefills are expanded."""
    decodes, prefills = metadata.num_decodes, metadata.num_prefills
    if not prefills:
        return "as decodes"
    if dense or getattr(metadata.prefill, "use_dense_mha", False):
        way = "MHA"
    elif getattr(metadata, "fp8_use_mixed_batch", False):
        way = "decode kernel"
    else:
        way = "sparse kernel"
    return f"{decodes} as decodes, {way}" if decodes else way
