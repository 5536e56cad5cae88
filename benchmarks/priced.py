"""Priced against measured: how far a table's prices are off the passes that an engine really ran.

    python benchmarks/priced.py passes.jsonl --gpu "NVIDIA H200" --heads 16 --kv-dtype bf16
        [--attention attention.jsonl] [--graph-sizes 64,128] [--fit rest.json] [--json OUT]
        [--sglang-copies]

A line of `passes.jsonl` is one pass: {"mode": "EXTEND", "bs", "prefix": [...], "new": [...], "q",
"kv", "gpu_ms", "host_ms", "graph", "mha", "impl"}; of a decode "mode", "bs", "kv" and the times are
enough. Of equal passes the median counts, the first of them left out, as it may have compiled.

Three comparisons are printed, each with its spread:

1. Attention, where `--attention` has it measured by a profiler: lines {"prefix", "new",
   "attention_ms"}, or "steps_ms" by decision point, of which those with a price count; with
   "mha" and "impl" where passes differ in them. A profile of `benchmarks/engine` will do:
   {"case": "prefix:new:sequences", "kinds_ms"}.
2. Differences: two passes of one batch that ran different kernels. What else they do is the same,
   so that the difference of their times is that of attention.
3. Whole passes: priced attention and the rest of a pass. The rest is fitted to the same passes with
   one fifth of the batches left out in turn, and judged on those. Passes whose GPU waited for the
   host tell what the host takes, and nothing else. `--fit` writes it all for `nsa-tune replay
   --rest`. It holds for one KV format: run this once for each. `--graph-sizes` are the tokens of
   the engine's prefill graphs: a pass in a graph counts with all tokens that the graph runs.

With `--sglang-copies` passes are priced with the copies that SGLang makes around `flashmla_sparse`
itself (docs/sglang.md): for an engine without the plug-in, or with NSA_TUNE_COPIES=0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from nsa_tune import Batch, BatchError, Dispatcher
from nsa_tune._cli.traffic.options import release_named
from nsa_tune._cli.traffic.prices import pricer_for
from nsa_tune.backend.costmodel.least_squares import fitted_weights
from nsa_tune.backend.types.batch import Mode
from nsa_tune.engines.sglang.pass_mode.steering.choice import Choice
from nsa_tune.reports.replay.prices import Pricer
from nsa_tune.reports.replay.rest import SCHEMA, TERMS, kind_of, numbers_of

_KNOWN_MODES = frozenset({"engine", "table_kernel", "eager"})
"""Modes of the pass in which one of the priced kernels runs, by SGLang's own code."""

Lengths: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

_FOLDS = 5
_WORSE = 0.02
"""How much worse a fit may be for the sake of fewer terms."""
_HOST_BOUND = 1.1
"""GPU time over host time below which a pass may have waited for its host."""
_SURELY = 3.0
"""GPU time over the usual host time of a kind of pass above which it has not waited."""
_MOST_WRONG = 0.25
"""Median error on other batches above which weights say nothing, and are left out."""
_LEAST_DIFFERENCE = 0.02
"""Part of a pass below which a difference is noise."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Equal passes that an engine ran."""

    batch: Batch
    graph: bool
    mha: bool
    impl: str
    gpu_ms: float
    host_ms: float
    repeats: int
    priced_ms: float
    """Attention, by the table."""
    steps_ms: Mapping[str, float]
    unpriced: tuple[str, ...]
    scored_above: int
    padding: int = 0
    """Tokens of its graph that are not new."""

    @property
    def kind(self) -> str:
        return kind_of(extend=self.batch.mode is Mode.EXTEND, graph=self.graph)

    @property
    def sums(self) -> tuple[int, int, int, int, int]:
        one = self.batch
        return one.batch_size, one.q_tokens, one.kv_tokens, one.max_kv, one.pairs

    @property
    def terms(self) -> tuple[float, ...]:
        """In the order of `TERMS`."""
        return tuple(numbers_of(self.sums, self.scored_above, self.padding).values())


def waiting(passes: Sequence[Ran]) -> list[Ran]:
    """Those of one kind whose GPU may have waited for launches, so that their time tells nothing
    of it. A host may also wait for the GPU, so that a long time of its own alone says little."""
    hosts = sorted(one.host_ms for one in passes)
    usual = hosts[len(hosts) // 4]
    return [one for one in passes if one.gpu_ms < min(_HOST_BOUND * one.host_ms, _SURELY * usual)]


def gpu_bound(passes: Sequence[Ran]) -> list[Ran]:
    """The others, of all kinds."""
    kinds = dict.fromkeys(one.kind for one in passes)
    late = {id(o) for kind in kinds for o in waiting([one for one in passes if one.kind == kind])}
    return [one for one in passes if id(one) not in late]


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def batch_of(line: Mapping[str, Any]) -> Batch | None:
    """The batch of a pass; None where its lengths are not known."""
    mode, size = str(line["mode"]).lower(), int(line.get("bs", 1))
    try:
        if mode == "extend":
            prefix, new = line.get("prefix"), line.get("new")
            if not prefix or not new or len(new) < size:
                return None
            return Batch.extend(prefix, new)
        if mode == "decode" and line.get("kv"):
            kv = int(line["kv"])
            most = line.get("max_kv") or -(-kv // size)
            return Batch.from_totals(
                mode="decode", q_tokens=size, kv_tokens=kv, max_kv=most, batch_size=size
            )
    except BatchError:
        return None
    return None


def ran(
    path: Path, pricer: Pricer, graph_sizes: Sequence[int] = (), *, sglang_copies: bool = False
) -> list[Ran]:
    """The passes of a file that can be priced, equal ones as one; `graph_sizes` are the tokens of
    the engine's prefill graphs, where they are known."""
    choice = Choice(sorted(graph_sizes), pricer.setting.profile.index_topk, {}, ())
    groups: dict[tuple[Batch, bool, bool, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines_of(path):
        # Another mode of the pass than the engine's own is none that prices know.
        odd = line.get("draft") or line.get("pass_mode", "engine") not in _KNOWN_MODES
        batch = None if odd else batch_of(line)
        if batch is not None and line.get("gpu_ms"):
            key = (batch, bool(line["graph"]), bool(line.get("mha")), str(line.get("impl", "")))
            groups[key].append(line)
    found = [_ran(pricer, *key, lines[1:] or lines, sglang_copies) for key, lines in groups.items()]
    return [
        replace(one, padding=choice.padding(one.batch.q_tokens)) if one.kind == "graph" else one
        for one in found
    ]


def _ran(
    pricer: Pricer, batch: Batch, graph: bool, mha: bool, impl: str,
    lines: Sequence[dict[str, Any]], sglang_copies: bool,
) -> Ran:  # fmt: skip
    extend = batch.mode is Mode.EXTEND
    answers = {"prefill_path": "mha" if mha else "mla", "sparse_prefill": impl} if extend else {}
    steps, unpriced = pricer.of_choices(batch, answers, graph=graph, alone=sglang_copies)
    times = {name: one.latency_us / 1e3 for name, one in steps.items()}
    return Ran(
        batch, graph, mha and extend, impl if extend else "",
        median(float(line["gpu_ms"]) for line in lines),
        median(float(line.get("host_ms", 0)) for line in lines),
        len(lines), sum(times.values()), times, unpriced, pricer.setting.profile.index_topk,
    )  # fmt: skip


# --- errors


def spread(errors: Iterable[float]) -> dict[str, float]:
    """Of relative errors: median, 90th percentile and largest of their sizes, and the mean."""
    found = list(errors)
    sizes = sorted(map(abs, found))
    if not sizes:
        return {"passes": 0}
    return {
        "passes": len(sizes),
        "median": median(sizes),
        "p90": sizes[int(0.9 * (len(sizes) - 1))],
        "worst": sizes[-1],
        "mean": sum(found) / len(found),
    }


def told(name: str, found: Mapping[str, float]) -> str:
    if not found["passes"]:
        return f"{name}: nothing to compare"
    return (
        f"{name}: {found['median']:.1%} off (median), {found['p90']:.1%} (p90), "
        f"{found['worst']:.1%} (worst), {found['mean']:+.1%} on average; {found['passes']} compared"
    )


_STEPS = {"indexer logits": "indexer_prefill", "top-k": "indexer_topk"}
"""Kinds of kernels that are a whole step. Others hold work of several steps, or a part of one."""


def unprofiled(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line with its lengths and steps, also if it is a row of a profile; {} for any other."""
    if "kinds_ms" not in line:
        return dict(line) if "prefix" in line else {}
    if line["case"].startswith("d:"):
        return {}  # a decode
    prefix, new, count = map(int, line["case"].split(":"))
    steps = {step: line["kinds_ms"].get(kind, 0.0) for kind, step in _STEPS.items()}
    return {"prefix": [prefix] * count, "new": [new] * count, "steps_ms": steps}


def attention_errors(passes: Sequence[Ran], path: Path) -> dict[str, list[float]]:
    """Priced over measured, minus one: by step, and under "attention" of all steps together that
    have both a price and a time."""
    measured: dict[tuple[Lengths, bool | None, str | None], dict[str, Any]] = {}
    for line in filter(None, map(unprofiled, lines_of(path))):
        lengths = tuple(line["prefix"]), tuple(line["new"])
        measured[lengths, line.get("mha"), line.get("impl")] = line
    errors: dict[str, list[float]] = defaultdict(list)
    for one in passes:
        lens = one.batch.lens
        if lens is None or one.batch.mode is not Mode.EXTEND:
            continue
        lengths = tuple(p for p, _ in lens), tuple(n for _, n in lens)
        taken = measured.get((lengths, one.mha, one.impl)) or measured.get((lengths, None, None))
        if taken is None:
            continue
        steps_ms = {
            step: time_ms
            for step, time_ms in taken.get("steps_ms", {}).items()
            if time_ms and step in one.steps_ms
        }
        for step, time_ms in steps_ms.items():
            errors[step].append(one.steps_ms[step] / time_ms - 1)
        if steps_ms:
            together = sum(one.steps_ms[step] for step in steps_ms) / sum(steps_ms.values())
            errors["attention"].append(together - 1)
        elif taken.get("attention_ms"):
            errors["attention"].append(one.priced_ms / taken["attention_ms"] - 1)
    return errors


def difference_errors(passes: Sequence[Ran]) -> list[float]:
    """Priced minus measured difference of two passes of one batch, over the longer pass."""
    same: dict[tuple[Batch, bool], list[Ran]] = defaultdict(list)
    for one in gpu_bound(passes):
        same[one.batch, one.graph].append(one)
    errors = []
    for some in same.values():
        for one, other in combinations(some, 2):
            priced, measured = one.priced_ms - other.priced_ms, one.gpu_ms - other.gpu_ms
            longer = max(one.gpu_ms, other.gpu_ms)
            if max(abs(priced), abs(measured)) > _LEAST_DIFFERENCE * longer:
                errors.append((priced - measured) / longer)
    return errors


# --- the rest of a pass


def fitted(passes: Sequence[Ran]) -> dict[str, float]:
    """Milliseconds for one of each term, to the least relative error of whole passes."""
    # What is the same in every pass cannot be told from the pass itself, which comes last.
    told_apart = [i for i in range(1, len(TERMS)) if len({one.terms[i] for one in passes}) > 1]
    used = [*told_apart, 0]
    columns = [[one.terms[i] / one.gpu_ms for one in passes] for i in used]
    targets = [1 - one.priced_ms / one.gpu_ms for one in passes]
    weights = fitted_weights(columns, targets, _WORSE)
    by_term = {TERMS[i]: weight for i, weight in zip(used, weights, strict=True) if weight > 0}
    return {term: by_term[term] for term in TERMS if term in by_term}


def whole_ms(one: Ran, weights: Mapping[str, float]) -> float:
    terms = dict(zip(TERMS, one.terms, strict=True))
    return one.priced_ms + sum(weight * terms[name] for name, weight in weights.items())


def held_out(passes: Sequence[Ran]) -> list[float]:
    """Relative errors of whole passes, each by a fit that did not see its batch."""
    batches = list(dict.fromkeys(one.batch for one in passes))
    fold = {batch: i % _FOLDS for i, batch in enumerate(batches)}
    errors = []
    for number in range(_FOLDS):
        seen = [one for one in passes if fold[one.batch] != number]
        if len(seen) > len(TERMS):
            weights = fitted(seen)
            errors += [
                whole_ms(one, weights) / one.gpu_ms - 1
                for one in passes
                if fold[one.batch] == number
            ]
    return errors


def rest_of(
    passes: Sequence[Ran], what: str, kv_dtype: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document for `--rest`, and the errors of whole passes by kind."""
    gpu_ms, host_ms, errors = {}, {}, {}
    every: list[float] = []
    for kind in dict.fromkeys(one.kind for one in passes):
        own = [one for one in passes if one.kind == kind]
        bound, late = gpu_bound(own), [one.host_ms for one in waiting(own)]
        host_ms[kind] = round(median(late or [min(one.host_ms for one in own)]), 4)
        if len(bound) <= 2 * len(TERMS):
            continue
        found = held_out(bound)
        errors[kind] = {**spread(found), "waited_for_their_host": len(late)}
        if errors[kind]["median"] <= _MOST_WRONG:
            gpu_ms[kind] = fitted(bound)
            every += found
    steps = dict.fromkeys(step for one in passes for step in one.steps_ms)
    overall = spread(every)
    document = {
        "schema": SCHEMA,
        "what": what,
        "kv_dtype": kv_dtype,
        "attention": list(steps),
        "gpu_ms": gpu_ms,
        "host_ms": host_ms,
        "scored_above": passes[0].scored_above if passes else 0,
        "error": {name: overall[name] for name in ("median", "p90", "passes") if name in overall},
    }
    return document, errors


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("passes", type=Path)
    parser.add_argument("--gpu", default="NVIDIA H200")
    parser.add_argument("--model", default="deepseek-v3.2")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--db", type=Path)
    parser.add_argument("--attention", type=Path)
    parser.add_argument("--fit", type=Path)
    parser.add_argument("--graph-sizes", type=_sizes, default=())
    parser.add_argument("--sglang-copies", action="store_true")
    parser.add_argument("--what", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dispatcher = Dispatcher.open(
        given.db, given.gpu, model=given.model, heads=given.heads, kv_dtype=given.kv_dtype,
        layers=given.layers,
    )  # fmt: skip
    pricer, lent = pricer_for(dispatcher, release_named(None), given.db)
    passes = ran(given.passes, pricer, given.graph_sizes, sglang_copies=given.sglang_copies)
    print(f"{len(passes)} different passes; prices from {dispatcher.source}")
    for point, source in lent.items():
        print(f"{point} from {source}")
    lacking = {name for one in passes for name in one.unpriced}
    if lacking:
        print(f"without a price, and so part of the rest: {', '.join(sorted(lacking))}")
    result: dict[str, Any] = {"schema": "nsa-tune/priced/1", "attention": {}}
    if given.attention is not None:
        for step, errors in attention_errors(passes, given.attention).items():
            result["attention"][step] = spread(errors)
            print(told(step, spread(errors)))
    result["differences"] = spread(difference_errors(passes))
    print(told("difference of two kernels, over the pass", result["differences"]))
    document, errors_by_kind = rest_of(passes, given.what or dispatcher.source, given.kv_dtype)
    result |= {"passes": errors_by_kind, "rest": document}
    for kind, found in errors_by_kind.items():
        out = "" if kind in document["gpu_ms"] else "; left out of the fit"
        print(told(f"whole passes, {kind}, held out", found) + out)
    print(json.dumps(document))
    if given.fit is not None:
        given.fit.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
