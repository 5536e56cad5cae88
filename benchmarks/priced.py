"""How far `advise` and `replay` are off: passes, traces and public runs, priced and measured.

    python -m benchmarks.priced [RESULT.json ...] [--trace FILE ...] [--public silicon_sample.csv]

Without results it takes those of benchmarks/engine/results. A result that has the test `trace`
needs the trace's file, unless it is in results/traces or `benchmarks.engine.synthesise` makes it.
The public runs are
InferenceX's of GLM-5 on eight H200s: silicon_sample.csv of the wheel aiconfigurator-core 0.12.0.
Prints Markdown. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache, partial
from itertools import chain, combinations, zip_longest
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.engine import synthesise
from benchmarks.engine.traces import Request, read_trace
from nsa_tune import Batch, Dispatcher, UsageError
from nsa_tune.autotune.workload.arrivals import Arrival
from nsa_tune.autotune.workload.simulation import Latencies
from nsa_tune.reports.traffic.attention import DEFAULT, PLUGIN
from nsa_tune.reports.traffic.deployment import Deployment, EngineSettings
from nsa_tune.reports.traffic.engine_passes import EnginePasses, shipped_passes
from nsa_tune.reports.traffic.launch import Launch
from nsa_tune.reports.traffic.served import Served, Setups, served

__all__ = ["cached_tokens", "closed_loop", "errors", "main", "pairs_in_order"]

_RESULTS = Path(__file__).with_name("engine") / "results"
_PAGE = 64
"""Tokens that SGLang's prefix cache holds together."""
_APART = 0.03
"""Configurations whose measured times differ by less are not ranked."""
_LATE_S = 0.012
"""From an answer's end to the next request: in 0.5.23 two more decode passes ran before it."""
_ERRORS = "first token", "whole trace", "first token, late clients", "whole trace, late clients"
_PUBLIC_MODEL, _PUBLIC_RELEASE = "zhipuai/GLM-5", "0.5.17"
_PUBLIC_ROUNDS = 10
"""Requests of each client in a public run, as they are simulated."""

Row = tuple[object, ...]
Pair = tuple[float, float]
"""A priced and a measured time."""


def main(arguments: list[str] | None = None) -> int:
    """Print every table that there are data for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="*", type=Path, help="of benchmarks.engine.run")
    parser.add_argument("--trace", action="append", default=[], type=Path)
    parser.add_argument("--public", type=Path, help="silicon_sample.csv")
    options = parser.parse_args(arguments)
    documents = [json.loads(path.read_text()) for path in options.results or _recorded()]
    shipped = {tuple(p.key[name] for name in _KEY): p for p in shipped_passes()}
    _print("Measured passes, each left out in turn", _HEAD, map(_left_out, shipped.values()))
    prefills = list(chain.from_iterable(map(_prefills, documents)))
    totals = list(_totals(prefills))
    _print("Passes of recorded engines, priced by what ships", _HEAD, _passes(prefills))
    of_engines = ("engine", "configuration", "ms, measured", "priced", "batches")
    _print("All batches of an engine", of_engines, (row[:5] for row in totals))
    with TemporaryDirectory() as folder:
        with redirect_stdout(sys.stderr):
            for seed in ("1", "7"):
                synthesise.main([f"{folder}/{seed}", "--seed", seed])
        made = {f"{path.stem}{path.parent.name}": path for path in Path(folder).rglob("*.jsonl")}
        names = {"chat1": "chat", "short1": "short", "long1": "long4", "long7": "long4_seed7"}
        given = [*(_RESULTS / "traces").glob("*.jsonl"), *options.trace]
        files = made | {names.get(name, name): path for name, path in made.items()}
        files |= {path.stem: path for path in given} | {"long": made["long1"]}
        columns = ("trace", "configuration", "TTFT ms, measured", "priced", "s, measured", "priced")
        rows = list(chain.from_iterable(map(partial(_traces, files), documents)))
    _print("Traces in an engine", columns, (row[:6] for row in rows))
    _print("Their errors", _HEAD, _trace_errors(rows))
    orders = _orders([*totals, *rows])
    _print("Order of the configurations", ("", "pairs in order", "Kendall's tau", ""), orders)
    if options.public:
        _print("Public runs", _HEAD, _public(options.public))
    return 0


_KEY = ("gpu", "model", "heads", "kv_dtype", "layers")
_HEAD = ("", "priced", "median", "p90", "worst", "mean")


def _recorded() -> list[Path]:
    return sorted(_RESULTS.rglob("*.json"))


def errors(what: str, pairs: Sequence[Pair]) -> Row:
    """A row of absolute relative errors, and their mean with its sign."""
    off = sorted(abs(priced / measured - 1) for priced, measured in pairs)
    if not off:
        return what, 0, "", "", "", ""
    median, p90 = (off[round(share * (len(off) - 1))] for share in (0.5, 0.9))
    mean = fmean(priced / measured - 1 for priced, measured in pairs)
    return what, len(off), f"{median:.1%}", f"{p90:.1%}", f"{off[-1]:.1%}", f"{mean:+.1%}"


def _print(title: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    if lines:
        head = [f"\n{title}\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        print("\n".join([*head, *lines]))


@cache
def _deployment(
    gpu: str, model: str, heads: int, kv_dtype: str, layers: int | None, flags: str,
    version: str | None,
) -> Deployment:  # fmt: skip
    def opened(heads: int, kv_dtype: str) -> Dispatcher:
        return Dispatcher.open(
            None, gpu, model=model, heads=heads, kv_dtype=kv_dtype, layers=layers
        )

    launch = Launch.parse("sglang", flags)
    settings = EngineSettings(version)
    return Deployment(opened, launch, model, heads=heads, kv_dtype=kv_dtype, settings=settings)


def _left_out(passes: EnginePasses) -> Row:
    """The model of one key, by the passes of all releases."""
    *key, layers = (passes.key[name] for name in _KEY)
    deployment = _deployment(*key, layers, "", passes.key["version"])
    model, measured = deployment.model, deployment.measured
    assert model is not None
    assert measured is not None
    shares = (f"{model.error(quantile):.1%}" for quantile in (0.5, 0.9, 1.0))
    return " ".join(map(str, (*key[1:], layers))), len(measured.passes), *shares, ""


def _engine(document: Mapping[str, Any], configuration: Mapping[str, Any]) -> Deployment | None:
    """The engine of a result in one configuration; None where that is not priced."""
    if configuration.get("environment") or configuration.get("pass_mode"):
        return None
    impl, chunk = configuration.get("prefill_impl"), configuration.get("chunk")
    words = [f"--dsa-prefill-backend {impl}"] if impl else []
    if (ranks := max(document["options"].get(one) or 1 for one in ("ep", "real_dp"))) > 1:
        words.append(f"--tp {ranks} --dp {ranks} --enable-dp-attention")
        chunk = ranks * (chunk or 8192)  # ranks of attention DP have a part each
    words += [f"--chunked-prefill-size {chunk}"] if chunk else []
    words += [] if configuration.get("prefill_graph", True) else ["--disable-prefill-cuda-graph"]
    options, version = document["options"], document["versions"].get("sglang")
    of = document["gpu"]["name"], options["model"], options["heads"], document["kv_dtype"]
    try:
        engine = _deployment(*of, options["layers"], " ".join(words), version)
    except UsageError:
        return None
    return engine if engine.model is not None else None


def _setup(configuration: Mapping[str, Any]) -> str:
    return PLUGIN if configuration.get("plugin") else DEFAULT


def _label(document: Mapping[str, Any]) -> str:
    options, version = document["options"], document["versions"].get("sglang")
    ranks = f" TP{options['real_tp']}" if options.get("real_tp", 1) > 1 else ""
    return f"{options['model']} {options['heads']} {version} {options['layers']}{ranks}"


class Priced(NamedTuple):
    """One prefill of a recorded engine in one configuration, to which nothing was fitted."""

    engine: str
    """Model, heads, release and layers."""
    configuration: str
    """With the KV format in front."""
    batch: str
    ms: Pair


def _prefills(document: Mapping[str, Any]) -> Iterator[Priced]:
    whole = (case for case in document["tests"].get("prefill", ()) if case.get("passes", 1) == 1)
    cases = [case for case in whole if "configurations" in case]
    for configuration in document["configurations"]:
        name, engine = configuration["name"], _engine(document, configuration)
        measured = engine.measured.passes if engine and engine.measured else ()
        fitted = {row.batch for row in measured}
        for case in cases if engine else ():
            batch = Batch.extend(case["prefix"], case["new"])
            if name in case["configurations"] and engine and batch not in fitted:
                priced = engine.passes.of(batch).us[_setup(configuration)] / 1e3
                pair = priced, case["configurations"][name]["gpu_ms"]
                yield Priced(_label(document), f"{document['kv_dtype']} {name}", str(batch), pair)


def _passes(prefills: Sequence[Priced]) -> Iterator[Row]:
    """A row a configuration: the errors of its prefills."""
    for key in dict.fromkeys(each[:2] for each in prefills):
        yield errors(" ".join(key), [each.ms for each in prefills if each[:2] == key])


def _totals(prefills: Sequence[Priced]) -> Iterator[Row]:
    """By engine and configuration: milliseconds of the batches that all configurations ran."""
    for engine in dict.fromkeys(each.engine for each in prefills):
        first: dict[tuple[str, str], Pair] = {}
        for each in prefills:
            if each.engine == engine:
                first.setdefault((each.configuration, each.batch), each.ms)
        names = list(dict.fromkeys(name for name, _ in first))
        ran = Counter(batch for _, batch in first)
        for name in names:
            pairs = [first[name, batch] for batch in ran if ran[batch] == len(names)]
            if pairs:
                priced, measured = (sum(column) for column in zip(*pairs, strict=True))
                shown = f"{measured:.0f}", f"{priced:.0f}", len(pairs), ""
                yield f"{engine}, prefills", name, *shown, (priced, measured)


def cached_tokens(requests: Iterable[Request]) -> Iterator[Arrival]:
    """`requests`, but those that only warm the cache, all at once, with what is cached of each."""
    seen: set[tuple[object, ...]] = set()
    for request in requests:
        leading = [request.segments[: i + 1] for i in range(len(request.segments))]
        held = [part for part in leading if part in seen]
        cached = sum(segment.tokens for segment in held[-1]) if held else 0
        seen.update(leading)
        if not request.warm:
            most = min(cached // _PAGE * _PAGE, request.input_length - 1)
            yield Arrival(0.0, request.input_length, request.output_length, most)


def closed_loop(
    engine: Deployment, requests: Sequence[Arrival], setup: str, clients: int, pool: int,
    sessions: Sequence[str] = (), late_s: float = 0.0,
) -> tuple[float, Served]:  # fmt: skip
    """Mean time to first token in seconds, and the whole run, of clients that each send a request
    `late_s` after their last one has ended; of a session when that before it has ended, too."""
    scheduler = replace(engine.scheduler, max_running=clients, pool_tokens=pool)
    latencies, setups = Latencies(), Setups(setup, setup)
    ended_s, last = latencies.ended_s, dict[str, int]()

    def sent() -> Iterator[Arrival | None]:
        at_s = 0.0
        for number, (request, session) in enumerate(zip_longest(requests, sessions)):
            before = last.get(session, -1)
            while len(ended_s) <= number - clients or before not in {-1, *ended_s}:
                yield None
            ends = [0.0] * clients + sorted(ended_s.values())
            sent_s = late_s + max(ends[number], ended_s.get(before, 0.0))
            at_s = max(at_s + late_s / 10, sent_s)
            yield request._replace(arrival_s=at_s)
            if session:
                last[session] = number

    whole = served(requests, scheduler, engine.prices, setups, latencies=latencies, sent=sent())
    return whole.ttft_s["mean"], whole


def _traces(files: Mapping[str, Path], document: Mapping[str, Any]) -> Iterator[Row]:
    """A row a trace and configuration; what follows the columns is for errors and orders."""
    options = document["options"]
    for measured in document["tests"].get("trace", ()):
        path = files.get(measured["trace"])
        if path is None or "configurations" not in measured:
            continue
        requests = read_trace(
            path, most=measured["requests"], longest=options["longest"],
            out_tokens=options["out_tokens"],
        )  # fmt: skip
        arrivals = list(cached_tokens(requests))
        sessions = [request.session for request in requests if not request.warm]
        pool = document["engine"].get("kv_pool_tokens") or options["max_total"]
        for configuration in document["configurations"]:
            run = measured["configurations"].get(configuration["name"])
            engine = _engine(document, configuration) if run else None
            if run is None or engine is None:
                continue
            of = engine, arrivals, _setup(configuration), measured["concurrency"], pool, sessions
            mean_ms, name = run["ttft_ms"]["mean"], f"{_label(document)}, {measured['trace']}"
            pairs: list[Any] = []
            for ttft_s, whole in (closed_loop(*of), closed_loop(*of, _LATE_S)):
                pairs += (1e3 * ttft_s, mean_ms), (whole.wall_s, run.get("seconds"))
            (ttft, _), (priced_s, seconds) = pairs[:2]
            shown = f"{mean_ms:.0f}", f"{ttft:.0f}", seconds or "", f"{priced_s:.2f}"
            yield name, f"{document['kv_dtype']} {configuration['name']}", *shown, *pairs


def _trace_errors(rows: Sequence[Row]) -> Iterator[Row]:
    names = [str(row[0]) for row in rows]
    for name in dict.fromkeys(part for one in names for part in (one.split(",")[0], one)):
        own: list[Any] = [row[6:] for row in rows if f"{row[0]},".startswith(f"{name},")]
        for column, what in zip(zip(*own, strict=True), _ERRORS, strict=True):
            yield errors(f"{name}: {what}", [pair for pair in column if pair[1] is not None])


def pairs_in_order(pairs: Sequence[Pair], apart: float = _APART) -> tuple[int, int]:
    """Of two whose measured times differ by more than 3 %, how often the prices' order is theirs,
    and how many there are."""
    agree = [
        (first[0] - other[0]) * (first[1] - other[1]) > 0
        for first, other in combinations(pairs, 2)
        if abs(first[1] / other[1] - 1) > apart
    ]
    return sum(agree), len(agree)


def _orders(rows: Sequence[Row]) -> Iterator[Row]:
    for name in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[0] == name]
        pairs: list[Any] = [  # a trace that ran twice counts by its mean
            tuple(map(fmean, zip(*(row[6] for row in own if row[1] == one), strict=True)))
            for one in dict.fromkeys(row[1] for row in own)
        ]
        (right, total), (all_right, every) = pairs_in_order(pairs), pairs_in_order(pairs, 0.0)
        if total:
            best = min(pairs)[1] / min(measured for _, measured in pairs) - 1
            tau = f"{2 * all_right / every - 1:.2f}"
            yield name, f"{right} of {total}", tau, f"the first loses {best:.1%} to the fastest"


def _public(path: Path) -> Iterator[Row]:
    ttft, tpot = [], []
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model_path"] == _PUBLIC_MODEL]
    wanted = {
        (int(row["isl"]), int(row["osl"]), int(row["batch_size"])): row
        for row in rows
        if row["system"] == "h200_sxm" and row["backend"] == "sglang" and row["tp_size"] == "8"
    }
    engine = _deployment("NVIDIA H200", "glm-5", 8, "bf16", None, "--tp 8", _PUBLIC_RELEASE)
    for (asked, answered, clients), row in sorted(wanted.items()):
        # InferenceX draws lengths between 0.8 times the nominal one and that.
        draw = Random(clients).randint
        requests = [
            Arrival(0.0, draw(4 * asked // 5, asked), draw(4 * answered // 5, answered), 0)
            for _ in range(_PUBLIC_ROUNDS * clients)
        ]
        pool = engine.scheduler.pool_tokens
        first_s, whole = closed_loop(engine, requests, DEFAULT, clients, pool)
        measured = float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"])
        ttft.append((1e3 * first_s, measured[0]))
        tpot.append((1e3 * whole.tpot_s["mean"], measured[1]))
    yield errors("time of an output token", tpot)
    yield errors("time to first token", ttft)


if __name__ == "__main__":
    raise SystemExit(main())
