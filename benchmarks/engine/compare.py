"""Compare engines: the plug-in beside SGLang's default and the best static configuration.

    python -m benchmarks.engine.compare RESULT.json ... [--of NAME] [--markdown FILE]

Each RESULT.json is what `benchmarks.engine.run` wrote. Labels may be given as LABEL=RESULT.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.engine.comparison import KINDS, Contest, Engine, Line, contest_of, read
from benchmarks.engine.configurations import DEFAULT
from benchmarks.engine.soak import MEMORY
from nsa_tune.autotune.bench.intervals import interval_of
from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.formats.markdown import markdown_table
from nsa_tune.reports.formats.terminal import print_tables

__all__ = ["main", "output_table", "soak_table", "state_table", "tables_of", "trace_table"]

_COLUMNS = (
    "", "default", "best static", "which", "plug-in", "over default", "", "over best static", "",
    "ran",
)  # fmt: skip
_NUMERIC = frozenset({1, 2, 4, 5, 7})
_CAPTURING = (
    "recording", "warming up", "instantiating", "preparing batches", "checking the top-k kernel",
    "the rest of capturing",
)  # fmt: skip
_START = (
    "the plug-in in all", "capturing", "recording", "comparing passes", "timing passes", "graphs",
    "graphs_mib", "released_mib", "used_mib",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; write what is asked for. 1 where a batch is lost to SGLang's default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", help="RESULT.json or LABEL=RESULT.json")
    parser.add_argument("--of", metavar="NAME", help="a configuration in the plug-in's place")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    engines = [_engine(text, options.of) for text in options.results]
    tables = list(tables_of(engines))
    print_tables("nsa-tune in SGLang", tables, Console(width=200, file=sys.stdout))
    if options.markdown:
        options.markdown.write_text("\n".join(map(_markdown, tables)))
    return int(any(contest_of(e, kind).count("default")["loss"] for e in engines for kind in KINDS))


def _engine(text: str, of: str | None) -> Engine:
    label, _, path = text.rpartition("=")
    engine = read(Path(path), label)
    for one in engine.document["configurations"] if of else ():
        one["plugin"] = one["name"] == of
    return engine


def tables_of(engines: Sequence[Engine]) -> Iterator[DisplayTable]:
    """What was measured, then each kind of test, then what else each engine noted."""
    yield head_table(engines)
    if starts := [engine for engine in engines if "start" in engine.document]:
        yield start_table(starts)
    for engine in engines:
        for kind in KINDS:
            contest = contest_of(engine, kind)
            if contest.lines:
                yield contest_table(contest, engine.label)
    for engine in engines:
        yield from _extras(engine)
    if ranked := [engine for engine in engines if engine.document["tests"].get("ranks")]:
        yield rank_table(ranked)
    yield from paused_tables(engines)
    soaks = ((one.label, one.document["tests"].get("soak")) for one in engines)
    if soaked := {label: rows for label, rows in soaks if rows}:
        yield soak_table(soaked)


def head_table(engines: Sequence[Engine]) -> DisplayTable:
    """The engines, and what they ran on."""
    rows = []
    for engine in engines:
        document = engine.document
        gpu, versions, tune = document["gpu"], document["versions"], document["nsa_tune"]
        rows.append((
            engine.label, str(document["kv_dtype"]), str(gpu.get("name", "")),
            str(gpu.get("driver_version", "")), str(versions.get("sglang", "")),
            str(versions.get("torch", "")), str(tune["commit"] or tune["sources"])[:12],
            str(document["started_as"]), str(document.get("up_s", document.get("start_s", ""))),
            ", ".join(document["errors"]) or "none",
        ))  # fmt: skip
    columns = (
        "engine", "KV", "GPU", "driver", "SGLang", "PyTorch", "nsa-tune", "graphs captured as",
        "start, s", "failed tests",
    )  # fmt: skip
    return DisplayTable("Engines", columns, tuple(rows))


def start_table(engines: Sequence[Engine]) -> DisplayTable:
    """What starts took on rank 0."""
    rows = []
    for engine in engines:
        start = engine.document["start"]
        found = {**start, **start.get("by_rank", ({},))[0], "used_mib": start["used_mib"][0]}
        found["capturing"] = round(sum(found.get(name, 0) for name in _CAPTURING), 1)
        rows.append((engine.label, *(str(found.get(name) or "") for name in _START)))
    return DisplayTable("Starts: rank 0's seconds, and MiB", ("engine", *_START), tuple(rows))


def rank_table(engines: Sequence[Engine]) -> DisplayTable:
    """Passes of rank 0 under mixed load, and how many of any rank differ."""
    rows = []
    for engine in engines:
        (row,), fault = engine.document["tests"]["ranks"], engine.document["options"]["fault"]
        passes, ways = (row["by_rank"]["0"][name] for name in ("passes", "ways"))
        found = (passes, passes - ways.get("engine", 0), row["differences"], row["table_events"])
        rows.append((engine.label, fault, *map(str, found)))
    columns = ("engine", "fault", "passes", "by the plug-in", "differ", "table events")
    return DisplayTable("Ranks", columns, tuple(rows))


def contest_table(contest: Contest, label: str) -> DisplayTable:
    """One row a batch or trace."""
    rows = tuple(_row(line) for line in contest.lines)
    title = f"{contest.kind.title} in {contest.kind.unit} ({label})"
    return DisplayTable(title, _COLUMNS, rows, _NUMERIC, _note(contest))


def _note(contest: Contest) -> str:
    """The sum in words; ratios are of the plug-in's time, so less than one is faster."""
    said = []
    for to, name in (("default", "the default"), ("static", "the best static of each row")):
        said.append(f"over {name}: {_counted(contest, to)}")
    return "; ".join(said) + ". Ratios of the plug-in's time, with 95 % intervals; verdicts at 1 %."


def _counted(contest: Contest, to: str) -> str:
    counts = contest.count(to)
    gain = contest.gain(to)
    ours, theirs = (sum(getattr(o, who).value for o in contest.lines) for who in ("plugin", to))
    total = f"{100 * (ours / theirs - 1):+.1f} % in sum" if theirs else ""
    mean = "" if gain is None else f" ({100 * gain:+.1f} % on average, {total})"
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) + mean


def _row(line: Line) -> tuple[str, ...]:
    return (
        line.name, _figure(line.default.value),
        _figure(line.static.value), line.static.configuration,
        _figure(line.plugin.value), _ratio(line.ratio("default")), line.verdict("default"),
        _ratio(line.ratio("static")), line.verdict("static"), line.plugin.ran,
    )  # fmt: skip


def _figure(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return ""
    interval = ratio["interval"]
    ends = "" if interval is None else f" ({interval[0]:.3f} to {interval[1]:.3f})"
    return f"{ratio['median']:.3f}{ends}"


def _extras(engine: Engine) -> Iterator[DisplayTable]:
    tests = engine.document["tests"]
    for row in tests.get("trace", ()):
        if row.get("configurations"):
            yield trace_table(engine.label, row)
    yield from output_table(engine.label, tests.get("outputs", ()))
    yield from state_table(engine.label, tests.get("states", ()))


def paused_tables(engines: Sequence[Engine]) -> Iterator[DisplayTable]:
    """The default of engines without the plug-in beside that of others, in which it is paused."""
    for kind in KINDS:
        times: dict[str, tuple[list[float], list[float]]] = {}
        for engine in engines:
            for row in engine.rows(kind):
                one = row["configurations"].get(DEFAULT, {"sweeps": {kind.metric: {}}})
                both = times.setdefault(kind.name(row), ([], []))
                both[bool(engine.plugins)].extend(one["sweeps"][kind.metric].values())
        rows = tuple((name, *_paused(*both)) for name, both in times.items() if both[0])
        if rows:
            columns = ("", "without", "paused", "over without, by 95 % intervals of the medians")
            yield DisplayTable(f"{kind.title}, default, {kind.unit}", columns, rows)


def _paused(without: Sequence[float], paused: Sequence[float]) -> tuple[str, ...]:
    shown = [_figure(median(times)) if times else "" for times in (without, paused)]
    ends = [end for times in (paused, without) for end in interval_of(times, 0.05) or ()]
    said = f"{ends[0] / ends[3]:.3f} to {ends[1] / ends[2]:.3f}" if len(ends) == 4 else ""
    return (*shown, said)


def trace_table(label: str, row: Mapping[str, Any]) -> DisplayTable:
    """What users wait for in one trace, by configuration."""
    shown = tuple(
        (
            name, f"{one['seconds']:.2f}",
            *(f"{one['ttft_ms'][what]:.0f}" for what in ("median", "mean", "p90")),
            f"{one['tokens_per_s']:.0f}", f"{one['prefill_gpu_ms']:.0f}", f"{one['peak_mib']}",
            f"{one['rounds']}",
        )
        for name, one in row["configurations"].items()
    )  # fmt: skip
    columns = (
        "configuration", "seconds", "TTFT, ms: median", "mean", "p90", "tokens/s",
        "prefill on the GPU, ms", "peak memory, MiB", "rounds",
    )  # fmt: skip
    title = f"Trace {row['trace']} ({label})"
    said = f"{row['requests']} requests with {row['prompt_tokens']} tokens in their prompts"
    note = f"{said}, {row['concurrency']} at a time. TTFT: time to first token."
    return DisplayTable(title, columns, shown, frozenset(range(1, 9)), note)


def output_table(label: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[DisplayTable]:
    """How far greedy tokens agree with those of the default."""
    shown = tuple(
        (
            str(row["configuration"]), str(row["requests"]), str(row["equal"]),
            f"{100 * row['share_equal']:.1f} %", _or_dash(row["first_difference"]["median"]),
            _or_dash(row["gap_nats"]["where answers part"]),
            _or_dash(row["gap_nats"]["where they are equal"]),
        )
        for row in rows
        if "share_equal" in row
    )  # fmt: skip
    columns = (
        "configuration", "requests", "equal", "share", "first difference, median position",
        "gap of the two best tokens there, nats", "gap elsewhere, nats",
    )  # fmt: skip
    if shown:
        note = "The row of the default is that engine against itself, run a second time."
        numeric = frozenset(range(1, 7))
        yield DisplayTable(f"Greedy tokens against the default ({label})", columns, shown, numeric,
                           note)  # fmt: skip


def state_table(label: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[DisplayTable]:
    """How far hidden states and logits of prefills differ from the default's."""
    shown = tuple(
        (
            str(row["case"]), name, ", ".join(one.get("ran", ())),
            *_differences(one["hidden_states"]), *_differences(one["logits"]),
            _or_dash((one.get("kl_nats") or {}).get("largest")),
            f"{one['same_best_token']} of {one['compared']}",
        )
        for row in rows
        for name, one in row["configurations"].items()
    )  # fmt: skip
    columns = (
        "batch", "configuration", "ran", "hidden states: median", "largest", "logits: median",
        "largest", "KL divergence, largest (nats)", "same best token",
    )  # fmt: skip
    if shown:
        note = (
            "Norm of the difference of a row over that of the row. The rows of the default are "
            "that engine against itself, run a second time."
        )
        yield DisplayTable(
            f"Prefill outputs against the default ({label})", columns, shown,
            frozenset({3, 4, 5, 6, 7}), note,
        )  # fmt: skip


def _differences(found: Mapping[str, Any] | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    bad = f" and {found['not_finite']} not finite" if found["not_finite"] else ""
    return f"{found['median']:.2g}", f"{found['largest']:.2g}{bad}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def soak_table(soaked: Mapping[str, Sequence[Mapping[str, Any]]]) -> DisplayTable:
    """Soaks side by side: memory up to the same requests, as far as all have come."""
    cells = [_soak_cells(rows[-1]) for rows in soaked.values()]
    curves = [[one for row in rows for one in row["curve"]] for rows in soaked.values()]
    common = min(map(len, curves))
    ends = [max(1, i * common // 8) for i in range(9)] if common else []
    for column, curve in zip(cells, curves, strict=True):
        for name, *values in zip(MEMORY, *curve[:common], strict=True):
            column[name] = " ".join(f"{max(values[:end])}" for end in ends)
    names = dict.fromkeys(name for column in cells for name in column)
    rows = tuple((name, *(column.get(name, "") for column in cells)) for name in names)
    note = (
        f"Memory: the most in the first call, in eighths and in all of the {common} that all did."
    )
    return DisplayTable("Soak", ("", *soaked), rows, note=note)


def _soak_cells(row: Mapping[str, Any]) -> dict[str, str]:
    counts = {name: row[name] for name in ("seconds", "requests", "passes")} | row["ways"]
    counts |= {"wrong answers": len(row["wrong_answers"])} | row["table_events"]
    return {name: f"{count}" for name, count in counts.items()}


def _markdown(table: DisplayTable) -> str:
    note = f"{table.note}\n\n" if table.note else ""
    return f"### {table.title}\n\n{note}{markdown_table(table)}"


if __name__ == "__main__":
    sys.exit(main())
