"""What a table's answers cost on batches that it was not tuned on, beside the engine's baseline.

    python benchmarks/regret.py measure --heads 128 --kv-dtype fp8 --batches 100 --out held-out.tsv
    python benchmarks/regret.py score held-out.tsv [--db TABLE] [--sums] [--taken]
    python benchmarks/regret.py table HELD_OUT...
    python benchmarks/regret.py left-out TABLE...

`measure` needs the GPU: it draws seeded random batches, half of them ragged, and times every arm.
`score` replays that file, or a zip of some, anywhere: regret is the time of the arm that was chosen
over the best arm's, minus one. Without --db the shipped table answers; --sums asks it without the
lengths; --taken asks for a kernel only where the table takes its path, --kept for queries that keep
such a share of their keys. `table` takes several files, `left-out` a table's own batches.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from nsa_tune import Batch, Dispatcher, Plan
from nsa_tune.backend.baselines import SGLANG_0_5_17, SGLANG_0_5_23, VLLM_0_33_0
from nsa_tune.backend.costmodel.regret import regret
from nsa_tune.backend.dispatch.table_planner import Match
from nsa_tune.backend.points import POINTS, points_for
from nsa_tune.backend.types.point import Arm, Point, Question, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.db.text_table import read_text
from nsa_tune.engines.dispatchers import with_costs
from nsa_tune.engines.sglang.costs import sharing

_TRIES, _PARTS = 1000, 8
"""Random batches among which one leaves a choice, if any does, and parts of a table left out."""
_QUESTIONS = [(point, question) for point in POINTS.values() for question in point.questions]
_WHOLE = Question("path and kernel", {arm.name: (arm.name,) for arm in POINTS["prefill"].arms})
_KV_DTYPES = {"bf16": "bf16", "fp8_packed": "fp8", "v4_paged": "fp8"}

Choose = Callable[[Batch], str | None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One held-out batch: what each choice of one question was measured to cost."""

    batch: Batch
    cost_us: dict[str, float]

    def regret(self, choice: str | None) -> float | None:
        """Relative loss of `choice`; None where it was not measured."""
        return None if choice not in self.cost_us else regret(self.cost_us, choice)


def measure(arguments: argparse.Namespace) -> None:
    """Time all arms on random batches and write them as a text table, however that ends.

    A file that is there already is gone on with, and batches that were disturbed are timed again.
    """
    from nsa_tune.autotune.bench import devices
    from nsa_tune.autotune.bench.measure import measure_batch
    from nsa_tune.autotune.bench.timing import timer_for
    from nsa_tune.db.exchange import write_text

    device = devices.pick_device(arguments.device)
    timer = timer_for(device)
    given = (arguments.model, arguments.heads, arguments.kv_dtype)
    setting = devices.setting_of(device, *given, overlap=arguments.overlap)
    key, out = devices.key_of(setting, timer.protocol), arguments.out
    before = read_text(out) if out.exists() else None
    if before is not None and before.key != key:
        off = [f"{name}: {old}, here {new}" for name, old, new in before.key.differences(key)]
        raise SystemExit(f"{out} is of another key ({'; '.join(off)}); give another --out")
    rows = {(r.point, r.batch, r.arm): r for r in (before.measurements if before else ())}
    points = points_for(setting.profile, arguments.points.split(",") if arguments.points else ())
    end = time.monotonic() + arguments.budget
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for point, batch, arms in drawn(points, setting, arguments.batches, arguments.seed):
            if time.monotonic() > end:
                break
            done = (rows.get((point.name, str(batch), arm.name)) for arm in arms)
            if all(row is not None and _is_steady(row) for row in done):
                continue
            # Arms are timed against each other, so all of them again.
            for row in measure_batch(point, batch, arms, setting, device, timer):
                rows[row.point, row.batch, row.arm] = row
    finally:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_text(Table(key, setting.device, tuple(rows.values()), "", now), out)


def _is_steady(row: Measurement) -> bool:
    """Whether the device was undisturbed: half of the interval is at most a quarter of the time."""
    if row.latency_us is None or row.low_us is None or row.high_us is None:
        return True
    return row.high_us - row.low_us <= 0.5 * row.latency_us


def drawn(
    points: Sequence[Point], setting: Setting, batches: int, seed: int
) -> Iterator[tuple[Point, Batch, list[Arm]]]:
    """`batches` different random ones of each point that leave a choice, with the arms; points in
    turn."""
    some = [point for point in points if len(list(point.candidates(setting))) > 1]
    randoms = {point.name: Random(seed) for point in some}
    seen: dict[str, set[Batch]] = {point.name: set() for point in some}
    for _ in range(batches):
        for point in some:
            for _ in range(_TRIES):
                batch = point.sample(setting, randoms[point.name])
                arms = [a for a in point.candidates(setting) if a.allowed(batch, setting) is None]
                if len(arms) > 1 and batch not in seen[point.name]:
                    seen[point.name].add(batch)
                    yield point, batch, arms
                    break


def cells(
    table: Table, point: str, question: Question, without: Set[str] = frozenset()
) -> Iterator[Cell]:
    """The batches on which `question` of `point` has a choice, the arms in `without` aside."""
    times: dict[str, dict[str, float]] = {}
    layers = profile_of(table.key.model).alike
    for row in (one.amortised(layers) for one in table.measurements):
        if row.point == point and row.status is Status.OK and row.latency_us is not None:
            times.setdefault(row.batch, {})[row.arm] = row.latency_us
    for word, by_arm in times.items():
        cost = {
            choice: min(by_arm[arm] for arm in timed)
            for choice, arms in question.choices.items()
            if (timed := by_arm.keys() & {*arms} - without)
        }
        if len(cost) > 1:
            yield Cell(Batch.parse(word), cost)


def timed_arms(rows: Iterable[Measurement]) -> set[tuple[str, str]]:
    """The points and arms of `rows`."""
    return {(row.point, row.arm) for row in rows}


def with_arms(dispatcher: Dispatcher, timed: Set[tuple[str, str]]) -> Dispatcher:
    """`dispatcher` with no other arms of the points in `timed` than those (point, arm)."""
    assert dispatcher.table is not None, "only a table answers"
    untimed = timed_arms(dispatcher.table.measurements) - timed
    for point in {point for point, _ in timed}:
        more = frozenset(arm for name, arm in untimed if name == point)
        if more:
            setting = dispatcher.setting
            dispatcher = with_costs(dispatcher, point, setting, lambda row, _: row, without=more)
    return dispatcher


def choosers(dispatcher: Dispatcher, question: Question) -> dict[str, Choose]:
    """Who decides: the table, the engines' baselines, and always the same choice."""
    found: dict[str, Choose] = {"nsa-tune": lambda batch: _choice(dispatcher.plan(batch), question)}
    eager = () if dispatcher.setting.profile.has_indexer else (SGLANG_0_5_17,)
    for engine in (SGLANG_0_5_23, *eager, VLLM_0_33_0):
        if question.name in engine.defaults:
            found[engine.name] = engine.chooser(question, dispatcher.setting)
    for choice in question.choices:
        found[f"always {choice}"] = partial(_always, choice)
    return found


def summed(batch: Batch) -> Batch:
    """`batch` as an engine that keeps no lengths gives it."""
    return Batch.from_totals(
        mode=batch.mode, batch_size=batch.batch_size, q_tokens=batch.q_tokens,
        kv_tokens=batch.kv_tokens, max_kv=batch.max_kv,
    )  # fmt: skip


def summary(regrets: list[float]) -> dict[str, float]:
    """Mean, median, 99th percentile and worst of relative regrets."""
    ordered, count, last = sorted(regrets), len(regrets), len(regrets) - 1
    return {
        "batches": count, "mean": sum(ordered) / count, "median": ordered[last // 2],
        "p99": ordered[min(round(0.99 * count), last)], "worst": ordered[-1],
    }  # fmt: skip


def opened(held_out: Table, db: Path | None, without: Set[str] = frozenset()) -> Dispatcher:
    """What answers for the batches of `held_out`, with its arms only, those in `without` aside."""
    key = held_out.key
    dispatcher = Dispatcher.open(
        db, key.gpu, model=key.model, heads=key.heads, kv_dtype=_KV_DTYPES[key.kv_layout]
    )
    # A machine with that GPU may have other versions than the table: those do not matter here.
    if dispatcher.match not in (Match.EXACT, Match.STALE):
        sys.exit(f"there is no table of {key.gpu} to score: {dispatcher.source}")
    timed = timed_arms(held_out.measurements)
    return with_arms(dispatcher, {(point, arm) for point, arm in timed if arm not in without})


def _always(choice: str, _: Batch) -> str:
    return choice


def _choice(plan: Plan, question: Question) -> str | None:
    kernel = plan.mha_kernel if plan.prefill_path == "mha" else plan.sparse_prefill
    return f"{plan.prefill_path}/{kernel}" if question is _WHOLE else getattr(plan, question.name)


def losses(some: Sequence[Cell], choose: Choose, *, sums: bool = False) -> list[float] | None:
    """The regret on each batch; None where the choice was not measured on all of them."""
    regrets = [one.regret(choose(summed(one.batch) if sums else one.batch)) for one in some]
    kept = [loss for loss in regrets if loss is not None]
    return kept if len(kept) == len(some) else None


def score(arguments: argparse.Namespace) -> None:
    """Print the regret of each chooser for each question."""
    for _, held_out in held_out_tables(arguments.table):
        key, dispatcher = held_out.key, opened(held_out, arguments.db)
        if arguments.kept:
            dispatcher = sharing(dispatcher, arguments.kept)
        result = []
        for point, question in (*_QUESTIONS, (POINTS["prefill"], _WHOLE)):
            some = list(cells(held_out, point.name, question))
            if arguments.taken:
                some = [one for one in some if is_taken(dispatcher, question, one.batch)]
            for name, choose in choosers(dispatcher, question).items() if some else ():
                regrets = losses(some, choose, sums=arguments.sums)
                if regrets is not None:
                    result.append({"question": question.name, "who": name, **summary(regrets)})
        print(f"{key.gpu}, {key.model}, {key.heads} heads, {key.kv_layout}; {dispatcher.source}")
        _print_rows(("question", "who"), result)


def is_taken(dispatcher: Dispatcher, question: Question, batch: Batch) -> bool:
    """Whether the way that `dispatcher` runs `batch` asks for an arm of `question` at all."""
    path = f"{dispatcher.plan(batch).prefill_path}/"
    return any(arm.startswith(path) for arms in question.choices.values() for arm in arms)


def table(arguments: argparse.Namespace) -> None:
    """Print what the shipped tables' choices lose, by question and held-out table, and by all."""
    rows, total = list(shipped_losses(arguments.files)), defaultdict[str, list[float]](list)
    for question, _, regrets in rows:
        total[question] += regrets
    rows = sorted([*rows, *((question, "~ all", regrets) for question, regrets in total.items())])
    said = [{"question": of, "held-out table": name, **summary(lost)} for of, name, lost in rows]
    _print_rows(("question", "held-out table"), said)


def left_out(arguments: argparse.Namespace) -> None:
    """Print what tables lose on batches of their own that were left out of the fit."""
    for path in arguments.tables:
        whole, found = read_text(path), defaultdict[tuple[str, str], list[float]](list)
        words = sorted({row.batch for row in whole.measurements})
        Random(1).shuffle(words)
        for part in range(_PARTS):
            away, rest = frozenset(words[part::_PARTS]), opened(whole, path)
            for name in rest.policies:
                rest = with_costs(rest, name, rest.setting, partial(_outside, away))
            rows = tuple(row for row in whole.measurements if row.batch in away)
            for point, question in _QUESTIONS:
                for cell in cells(replace(whole, measurements=rows), point.name, question):
                    for who, choose in choosers(rest, question).items():
                        loss = cell.regret(choose(cell.batch))
                        found[question.name, who] += [] if loss is None else [loss]
        print(f"\n{path.stem}\n")
        known = [(*key, regrets) for key, regrets in found.items() if regrets]
        said = [{"question": of, "who": who, **summary(lost)} for of, who, lost in known]
        _print_rows(("question", "who"), said)


def _outside(away: Set[str], row: Measurement, _: Batch) -> Measurement | None:
    return None if row.batch in away else row


def shipped_losses(files: Iterable[Path]) -> Iterator[tuple[str, str, list[float]]]:
    """(question, held-out table, regrets of the shipped table's choices) of held-out files."""
    for name, held_out in chain.from_iterable(map(held_out_tables, files)):
        dispatcher = opened(held_out, None)
        for point, question in _QUESTIONS:
            batches = list(cells(held_out, point.name, question))
            # Where a table has no times the engine's baseline answers.
            if not batches or not dispatcher.policies[point.name].measured:
                continue
            regrets = losses(batches, choosers(dispatcher, question)["nsa-tune"])
            if regrets:
                yield question.name, name, regrets


def held_out_tables(path: Path) -> Iterator[tuple[str, Table]]:
    """The tables of a text file, or of a zip of such files, with their names."""
    if path.suffix != ".zip":
        yield "/".join(path.parts[-2:]), read_text(path)
        return
    with zipfile.ZipFile(path) as packed, TemporaryDirectory() as folder:
        for name in sorted(packed.namelist()):
            yield f"{path.stem}/{name}", read_text(Path(packed.extract(name, folder)))


def _print_rows(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    print("|", " | ".join(names), "| batches | mean | median | p99 | worst |")
    print("|---" * (len(names) + 5) + "|")
    for row in rows:
        heads = " | ".join(str(row[name]) for name in (*names, "batches"))
        figures = " | ".join(f"{row[name]:.2%}" for name in ("mean", "median", "p99", "worst"))
        print(f"| {heads} | {figures} |")


def main() -> None:
    """Parse and run one of the commands."""
    parser = argparse.ArgumentParser(description="Regret on batches that were not tuned on.")
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure", help="time all arms on random batches")
    measuring.add_argument("--device", default="auto")
    measuring.add_argument("--model", default="deepseek-v3.2")
    measuring.add_argument("--heads", type=int, default=128)
    measuring.add_argument("--kv-dtype", default="fp8")
    measuring.add_argument("--batches", type=int, default=100, help="per decision point")
    measuring.add_argument("--overlap", type=float, help="of selections, as in nsa-tune run")
    measuring.add_argument("--points", help="decision points, comma-separated; default: all")
    measuring.add_argument("--budget", type=float, default=inf, help="seconds after which to stop")
    measuring.add_argument("--seed", type=int, default=7)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.set_defaults(run=measure)
    scoring = commands.add_parser("score", help="regret of the table's answers on a held-out file")
    scoring.add_argument("table", type=Path)
    scoring.add_argument("--db", type=Path)
    scoring.add_argument("--sums", action="store_true", help="ask without the lengths")
    scoring.add_argument("--taken", action="store_true", help="kernels only where they run")
    scoring.add_argument("--kept", type=float, help="share of its keys that a query keeps")
    scoring.set_defaults(run=score)
    listing = commands.add_parser("table", help="the shipped tables' regret on several files")
    listing.add_argument("files", type=Path, nargs="+")
    listing.set_defaults(run=table)
    leaving = commands.add_parser("left-out", help="regret on a table's own batches, left out")
    leaving.add_argument("tables", type=Path, nargs="+")
    leaving.set_defaults(run=left_out)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
