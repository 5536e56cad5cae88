"""Whether prefills compute the same in every configuration: hidden states, and logits.

Greedy tokens (outputs.py) show only where a difference changes a choice. Here each row that a
prefill returns is compared: with speculative decoding SGLang asks for the hidden states of all new
tokens, which its draft layer reads; without it there are the logits of last tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.engine.cases import PAGE, Case, cases_of
from benchmarks.engine.configurations import Configuration
from benchmarks.engine.prefill import ran
from benchmarks.engine.session import Session

__all__ = ["compared", "measure"]

_CONTROL = "another last page"

Outputs = dict[tuple[int, ...], dict[str, Any]]
"""By a prefix's length and the new tokens behind it: hidden states or None, and logits."""


def measure(session: Session, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """A row a batch; the default is run twice, to show how far it agrees with itself.

    And once behind prefixes whose last page is another: what a mistake of 64 keys would look like.
    """
    chosen = session.named(options.output_configurations)
    others = [one for one in chosen if one != session.default]
    for case in cases_of(options.state_cases):
        row: dict[str, Any] = {"case": case.name, "configurations": {}}
        if session.late:
            yield row | {"skipped": "out of time"}
            continue
        heads = [session.tokens(length) for length in case.prefix]
        tails = [session.tokens(length) for length in case.new]
        own, _ = _outputs(session, session.default, case, heads, tails)
        if all(case.prefix):
            changed = [head[:-PAGE] + session.tokens(PAGE) for head in heads]
            other, _ = _outputs(session, session.default, case, changed, tails)
            row["configurations"][_CONTROL] = compared(own, other)
        for configuration in (session.default, *others):
            found, kinds = _outputs(session, configuration, case, heads, tails)
            row["configurations"][configuration.name] = compared(own, found) | {"ran": kinds}
        print("states", row, file=sys.stderr, flush=True)
        yield row


def _outputs(
    session: Session,
    configuration: Configuration,
    case: Case,
    heads: Sequence[list[int]],
    tails: Sequence[list[int]],
) -> tuple[Outputs, list[str]]:
    """What prefills behind prefixes of the default return, and what they ran."""
    session.flush()
    session.use(session.default)
    if any(case.prefix):
        session.ask([head + session.tokens(1) for head in heads if head])
    session.use(configuration)
    tag = session.tag(keeps=True)
    session.ask([head + tail for head, tail in zip(heads, tails, strict=True)])
    session.tag()
    passes = [one for one in session.collect() if one["tag"] == tag and one["mode"] == "EXTEND"]
    kinds = sorted({ran(one) for one in passes if not one["draft"]})
    return _by_sequence(session.kept(tag)), kinds


def _by_sequence(kept: Iterable[Mapping[str, Any]]) -> Outputs:
    found: Outputs = {}
    for one in kept:
        ids, states = one["input_ids"], one["hidden_states"]
        ids = ids.split(one["new"])
        parts = [None] * len(ids) if states is None else states.split(one["new"])
        for prefix, new, part, logits in zip(one["prefix"], ids, parts, one["logits"], strict=True):
            found[prefix, *new.tolist()] = {"hidden_states": part, "logits": logits[None]}
    return found


def compared(own: Outputs, other: Outputs) -> dict[str, Any]:
    """How far rows of outputs differ: the norm of the difference over that of the row."""
    both = sorted(own.keys() & other.keys())
    same = [int(own[key]["logits"].argmax() == other[key]["logits"].argmax()) for key in both]
    return {
        "sequences": len(own), "compared": len(both), "same_best_token": sum(same),
        **{
            name: _difference([(own[key][name], other[key][name]) for key in both])
            for name in ("hidden_states", "logits")
        },
        "kl_nats": _divergence([(own[key]["logits"], other[key]["logits"]) for key in both]),
    }  # fmt: skip


def _divergence(pairs: Sequence[tuple[Any, Any]]) -> dict[str, float] | None:
    """How much likelier the first run's tokens are to it than to the other (Kullback-Leibler)."""
    import torch

    if not pairs:
        return None
    own, other = (torch.cat(logits).double().log_softmax(1) for logits in zip(*pairs, strict=True))
    nats = (own.exp() * (own - other)).sum(1)
    return {"median": round(float(nats.median()), 6), "largest": round(float(nats.max()), 6)}


def _difference(pairs: Sequence[tuple[Any, Any]]) -> dict[str, float] | None:
    import torch

    rows = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not rows:
        return None
    errors = torch.cat([(a - b).norm(dim=1) / a.norm(dim=1) for a, b in rows])
    finite = errors[errors.isfinite()]
    return {
        "rows": len(errors),
        "not_finite": len(errors) - len(finite),
        "median": round(float(finite.median()), 6) if len(finite) else 0.0,
        "largest": round(float(finite.max()), 6) if len(finite) else 0.0,
    }
