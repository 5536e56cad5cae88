"""Two tables of times by step, from a table of measurements or measured now.

    python -m benchmarks.by_step decode [--heads 16,64,128] [--kv-dtype bf16]
    python -m benchmarks.by_step chunks [--heads 128] [--kv-dtype fp8]
        [--gpu NAME] [--db TABLE] [--measure [--out FILE]]

`decode` prints what each sparse kernel takes for 1 to 256 rows at a context of 8192 tokens, with
the time that reading the selected tokens alone would take. `chunks` prints, for chunks of 8192
tokens at contexts of 8k, 32k and 64k, the time of each step of a layer: before, by the engine's own
choices, and after, by the best ones, beside the physical limit.

Without --measure the table's estimates are printed, and a step that it has no times of is empty.
With it, which needs the GPU, exactly these batches are measured with every arm, and --out keeps the
rows as a text table, one for each head count (HEADS in its name is replaced).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.costmodel.policy import Policy, Survey
from nsa_tune.backend.costmodel.surface import Estimate
from nsa_tune.backend.dispatch.decide import pick
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.point import Point, Question, Setting
from nsa_tune.backend.types.records import Measurement, Status, Table
from nsa_tune.reports.analysis.layer_steps import LayerSteps, layer_steps
from nsa_tune.reports.analysis.roofline import POINT as ROOFLINE
from nsa_tune.reports.analysis.roofline import Ceilings, ceilings_of

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 8192
CHUNK = 8192
CONTEXTS = (8192, 32768, 65536)
_FIRST = ("fa3", "flashmla_sparse", "flashmla_kv", "tilelang", "triton", "triton_split")
"""Columns, in this order; other arms follow."""


def decode_batches() -> list[Batch]:
    """One for each number of rows."""
    return [Batch.decode([CONTEXT] * rows) for rows in ROWS]


def chunk_batches() -> list[Batch]:
    """One for each context."""
    return [Batch.extend([context - CHUNK], [CHUNK]) for context in CONTEXTS]


def memory_us(rows: int, setting: Setting, ceilings: Ceilings | None) -> float | None:
    """What reading each row's selection takes at the measured bandwidth, nothing twice."""
    if ceilings is None:
        return None
    token = setting.layout.token_bytes(setting.profile.rank, setting.profile.rope)
    return 1e6 * rows * setting.profile.index_topk * token / ceilings.bytes_per_s


def measured(
    setting: Setting, batches: Sequence[Batch], points: Sequence[Point]
) -> Iterator[Measurement]:
    """Every arm of `points` on `batches`, and the ceilings. Needs the device of `setting`."""
    from nsa_tune.autotune.bench import devices
    from nsa_tune.autotune.bench.ceilings import measure_ceilings
    from nsa_tune.autotune.bench.measure import measure_batch
    from nsa_tune.autotune.bench.timing import timer_for

    device = devices.pick_device("cpu" if setting.device.arch == "cpu" else "cuda")
    timer = timer_for(device)
    if device.type == "cuda":
        yield from measure_ceilings(setting.device.arch, device, timer)
    for batch in batches:
        for point in points:
            if batch.mode in point.modes and setting.profile.family in point.families:
                arms = [a for a in point.candidates(setting) if a.allowed(batch, setting) is None]
                if arms:
                    yield from measure_batch(point, batch, arms, setting, device, timer)


def here(setting: Setting) -> Setting:
    """`setting` with the facts and libraries of this machine."""
    from nsa_tune.autotune.bench import devices
    from nsa_tune.backend import libraries as providers
    from nsa_tune.backend.hardware import detect

    device = devices.pick_device("cpu" if setting.device.arch == "cpu" else "cuda")
    return replace(
        setting, device=devices.describe(device), libraries=dict(detect.library_versions()),
        missing=providers.missing(),
    )  # fmt: skip


def keep(path: Path, setting: Setting, rows: Sequence[Measurement]) -> None:
    """Write `rows` as a text table."""
    from nsa_tune.autotune.bench import devices
    from nsa_tune.autotune.bench.timing import protocol_of
    from nsa_tune.db.exchange import write_text

    device = devices.pick_device("cpu" if setting.device.arch == "cpu" else "cuda")
    key = devices.key_of(setting, protocol_of(device))
    write_text(Table(key, setting.device, tuple(rows), "", ""), path)


Times = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By point, batch and arm: microseconds of a layer with its share of the pass."""


def times_of(rows: Sequence[Measurement], setting: Setting) -> Times:
    """The successful measurements of `rows`."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in (one.amortised(setting.sharing) for one in rows):
        if row.status is Status.OK and row.latency_us is not None and row.point != ROOFLINE:
            found.setdefault(row.point, {}).setdefault(row.batch, {})[row.arm] = row.latency_us
    return found


class Told(Policy):
    """A policy that answers from measurements of exactly the batches that it is asked about."""

    def __init__(self, policy: Policy, rows: Sequence[Measurement]) -> None:
        own = [row for row in rows if row.point == policy.point.name]
        super().__init__(policy.features, policy.fitted, lambda: own)
        self._own = {(row.batch, row.arm): row for row in own if row.status is Status.OK}
        self._times = times_of(own, policy.setting).get(policy.point.name, {})

    def survey(self, batch: Batch) -> Survey:
        """The allowed arms with what was measured."""
        found, times = super().survey(batch), self._times.get(str(batch), {})
        return found._replace(latencies={arm: times.get(arm) for arm in found.latencies})

    def estimates(self, batch: Batch) -> dict[str, Estimate]:
        """What was measured, as if it were exact."""
        times = self._times.get(str(batch), {})
        return {arm: Estimate(us, us, us, extrapolated=False) for arm, us in times.items()}

    def rows_used(self, arm: str, batch: Batch) -> list[tuple[Measurement, float]]:
        """The one row."""
        row = self._own.get((str(batch), arm))
        return [] if row is None else [(row, 1.0)]


def estimated(policies: Mapping[str, Policy], batches: Sequence[Batch]) -> Times:
    """The estimates of the allowed arms."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, policy in policies.items():
        for batch in batches:
            if batch.mode in policy.point.modes:
                allowed = policy.survey(batch).latencies
                every = policy.estimates(batch)
                own = {arm: every[arm].latency_us for arm in allowed if arm in every}
                found.setdefault(name, {})[str(batch)] = own
    return found


def decode_table(
    times: Times, setting: Setting, ceilings: Ceilings | None
) -> Iterator[tuple[str, ...]]:
    """Rows of text: the heading first."""
    arms = [arm.name for arm in POINTS["decode"].candidates(setting)]
    every = {arm for by_arm in times.get("decode", {}).values() for arm in by_arm}
    shown = [arm for arm in (*_FIRST, *arms) if arm in every]
    shown = list(dict.fromkeys(shown))
    yield ("heads", "rows", *shown, "memory alone")
    for rows, batch in zip(ROWS, decode_batches(), strict=True):
        by_arm = times.get("decode", {}).get(str(batch), {})
        limit = memory_us(rows, setting, ceilings)
        cells = [_us(by_arm.get(arm)) for arm in shown]
        yield (str(setting.heads), str(rows), *cells, _us(limit))


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def chunk_steps(
    policies: Mapping[str, Policy], dispatcher: Dispatcher, ceilings: Ceilings | None
) -> Iterator[LayerSteps]:
    """The steps of each chunk, by `policies`."""
    baseline, setting = dispatcher.baseline, dispatcher.setting
    for batch in chunk_batches():

        def choose(policy: Policy, question: Question, batch: Batch = batch) -> str | None:
            default = baseline.choose(question, batch, policy.setting)
            return pick(question, policy.survey(batch), default)[0]

        yield layer_steps(batch, policies, setting, baseline, choose, ceilings)


def chunk_table(found: LayerSteps) -> Iterator[tuple[str, ...]]:
    """Rows of text of one chunk: the heading first, the sum last."""
    yield ("batch", "step", "before", "us", "after", "us", "least us", "bound by")
    for step in found.steps:
        before, after = _us(step.default_us), _us(step.latency_us)
        yield (found.batch, step.name, step.default or "-", before, step.arm or "-", after,
               _us(step.least_us), step.bound or step.note[:60] or "-")  # fmt: skip
    total = ("" if found.default_us is None else _us(found.default_us), "", _us(found.total_us))
    yield (found.batch, "together", "", *total, "", "")


def _print(rows: Iterator[tuple[str, ...]]) -> None:
    for i, row in enumerate(rows):
        print(f"| {' | '.join(row)} |")
        if i == 0:
            print("|---" * len(row) + "|")


def _show(arguments: argparse.Namespace, heads: int) -> None:
    dispatcher = Dispatcher.open(
        arguments.db, arguments.gpu, model=arguments.model, heads=heads,
        kv_dtype=arguments.kv_dtype,
    )  # fmt: skip
    print(f"{dispatcher.source}", file=sys.stderr)
    setting, policies = dispatcher.setting, dict(dispatcher.policies)
    decoding = arguments.what == "decode"
    points = [POINTS["decode"]] if decoding else list(POINTS.values())
    batches = decode_batches() if decoding else chunk_batches()
    table = dispatcher.table
    rows = [] if table is None else list(table.measurements)
    if arguments.measure:
        setting = here(setting)
        rows = []
        for row in measured(setting, batches, points):
            rows.append(row)
            print(row.point, row.batch, row.arm, row.latency_us, row.pass_us, row.reason or "ok",
                  file=sys.stderr)  # fmt: skip
            if arguments.out is not None:
                keep(Path(str(arguments.out).replace("HEADS", str(heads))), setting, rows)
    times = times_of(rows, setting) if arguments.measure else estimated(policies, batches)
    ceilings = ceilings_of(rows)
    if decoding:
        _print(decode_table(times, setting, ceilings))
        return
    if arguments.measure:
        policies = {name: Told(policy, rows) for name, policy in policies.items()}
    for found in chunk_steps(policies, dispatcher, ceilings):
        _print(chunk_table(found))
        print()


def main() -> None:
    """Parse, measure where asked to, and print Markdown."""
    parser = argparse.ArgumentParser(description="Times by step of a layer.")
    parser.add_argument("what", choices=("decode", "chunks"))
    parser.add_argument("--model", default="deepseek-v3.2")
    parser.add_argument("--heads", default="128", help="comma-separated")
    parser.add_argument("--kv-dtype", default="fp8")
    parser.add_argument("--gpu", help="default: this machine's")
    parser.add_argument("--db", type=Path)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for heads in arguments.heads.split(","):
        _show(arguments, int(heads))
        print()


if __name__ == "__main__":
    main()
