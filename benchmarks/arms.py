"""Every arm of every decision point: does it run here, how wrong is it, and one time.

    python -m benchmarks.arms [--model deepseek-v3.2,deepseek-v4] [--heads 128]
        [--kv-dtype bf16,fp8] [--overlap 0.5,0.8] [--points NAMES] [--batches WORDS]
        [--allow-lossy NAMES] [--sparse-only] [--budget 60] [--device cuda] [--json FILE]
        [--markdown FILE]

Each point has a few batches, or those of --batches. An arm's error is the largest of those that it
may run on, against the point's reference; its time is that of the first of them, and its rates are
of the work that the batch cannot do without, beside what the GPU reaches. An arm that does not run
is in the table too, with the reason. The files are written after every batch, so that a crash keeps
the rest. --overlap is what neighbouring queries of prefill select in common, as in `nsa-tune run`.
--sparse-only leaves dense attention out, whose kernels FlashInfer compiles for minutes at first.
--budget starts no batch after so many seconds; what is left then says so. Each point's first batch
comes before any second one.

On a CPU the profile is tiny, and the batches are the first of each point's grid.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product
from math import inf
from pathlib import Path

from nsa_tune import Batch
from nsa_tune._errors import NsaTuneError
from nsa_tune.autotune.bench import devices
from nsa_tune.autotune.bench.ceilings import measure_ceilings
from nsa_tune.autotune.bench.measure import ContextLost, measure_batch
from nsa_tune.autotune.bench.timing import Timer, timer_for
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.points import lossy_named, points_for
from nsa_tune.backend.types.point import Arm, Point, Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.reports.analysis.ceilings import Ceilings, ceilings_of, share_text
from nsa_tune.reports.analysis.layer_steps import limit_of
from nsa_tune.reports.analysis.work import work_of

SCHEMA = "nsa-tune/arms/2"

_BATCHES = {
    "prefill": ("extend:1024+1024", "extend:0+300,512+64,100+1", "extend:8192+512"),
    "decode": ("decode:n1:8192x32", "target_verify:n4:8191,100,9000", "decode:n1:300,2048,40000,1"),
    "indexer_layout": ("target_verify:n2:8192x64", "target_verify:n4:4096x16"),
    "indexer_metadata": ("decode:n1:8192x64", "target_verify:n2:9000,4096,77"),
    "indexer_prefill": ("extend:6144+1024", "extend:24576+8192"),
    "indexer_topk": ("extend:6144+1024", "decode:n1:20000x64"),
    "v4_prefill_c4": ("extend:8192+512", "extend:0+300"),
    "v4_prefill_c128": ("extend:8192+512", "extend:0+300"),
}
"""The last ones are what some arms alone are for, or may not run on."""
_OF_A_GRID = 2
_HEADINGS = (
    "point", "arm", "model", "heads", "KV layout", "overlap", "runs", "largest error", "us a layer",
    "us a pass", "TFLOP/s", "GB/s", "of the limit", "on", "",
)  # fmt: skip
_NOT_TRIED = "the budget was spent before"


@dataclass(slots=True)
class Row:
    """One arm in one setting."""

    point: str
    arm: str
    model: str
    heads: int
    kv_layout: str
    overlap: float | None = None
    status: str = "not run"
    """"ok", "wrong", "failed", or "not run"."""
    error: float | None = None
    """The largest relative error."""
    tolerance: float | None = None
    """What the error may be where an arm has a bound of its own."""
    batch: str = ""
    """The batch that was timed."""
    latency_us: float | None = None
    pass_us: float | None = None
    """What the first layer of a pass takes more."""
    tflop_per_s: float | None = None
    gb_per_s: float | None = None
    of_limit: float | None = None
    """The least time of the batch's work on this GPU over the arm's."""
    reason: str = ""

    def rate(self, batch: Batch, setting: Setting, ceilings: Ceilings | None) -> None:
        """Take over the rates at which the arm computes and moves what `batch` needs."""
        work = work_of(self.point, self.arm, batch, setting)
        if work is None or self.latency_us is None or self.batch != str(batch):
            return
        self.tflop_per_s = work.flops / self.latency_us / 1e6
        self.gb_per_s = work.moved / self.latency_us / 1e3
        least_us, _ = limit_of(self.point, self.arm, batch, setting, ceilings)
        self.of_limit = None if least_us is None else least_us / self.latency_us

    def add(self, one: Measurement) -> None:
        """Take over what a batch told; what failed once has failed."""
        if one.error is not None:
            self.error = max(self.error or 0.0, one.error)
        if one.status is not Status.OK:
            if self.status not in ("wrong", "failed"):
                self.status, self.reason = str(one.status), f"{one.batch}: {one.reason}"
        elif self.status == "not run":
            self.status, self.reason = "ok", ""
        if self.latency_us is None and one.latency_us is not None:
            self.batch, self.latency_us, self.pass_us = one.batch, one.latency_us, one.pass_us


@dataclass(frozen=True, slots=True)
class Trial:
    """How the arms of each point and setting are tried."""

    timer: Timer
    end: float = inf
    """By the monotonic clock: no batch is begun later."""
    sparse_only: bool = False
    batches: tuple[Batch, ...] = ()
    """In place of a point's own."""
    ceilings: Ceilings | None = None


def batches_of(point: Point, setting: Setting) -> list[Batch]:
    """The batches that the arms of `point` are tried on."""
    if setting.device.arch == "cpu":
        return point.grid(setting)[:_OF_A_GRID]
    words = _BATCHES.get(point.name)
    return point.grid(setting)[:_OF_A_GRID] if words is None else [Batch.parse(w) for w in words]


def why_not(arm: Arm, setting: Setting) -> str:
    """Why `arm` is no candidate in `setting`; "" where it is one, or is not meant for it."""
    if arm.archs is not None and setting.device.arch not in arm.archs:
        return f"no kernels for {setting.device.arch}"
    if arm.requires in setting.missing:
        return f"{arm.requires} is not installed"
    if not arm.offered(setting):
        return f"lossy, and not asked for: {arm.loss}"
    return ""


def rows_of(point: Point, setting: Setting, trial: Trial) -> Iterator[list[Row]]:
    """The rows of a point's arms: before the first batch, and after each. They are the same
    objects each time, so that the last ones are known also where measuring ends in an error."""
    device = devices.pick_device("cpu" if setting.device.arch == "cpu" else "cuda")

    def wanted(arm: Arm) -> bool:
        return not (trial.sparse_only and arm.name.startswith("mha/"))

    arms = [arm for arm in point.candidates(setting) if wanted(arm)]
    rows = {
        arm.name: Row(
            point.name, arm.name, setting.profile.name, setting.heads, str(setting.layout),
            setting.overlap, tolerance=arm.tolerance, reason=why_not(arm, setting) or _NOT_TRIED,
        )
        for arm in point.arms
        if setting.layout in arm.layouts and (arm in arms or not arm.reference) and wanted(arm)
    }  # fmt: skip
    yield list(rows.values())
    for batch in trial.batches or batches_of(point, setting):
        if time.monotonic() > trial.end:
            break
        allowed = [arm for arm in arms if arm.allowed(batch, setting) is None]
        for arm in arms:
            if rows[arm.name].status == "not run" and arm not in allowed:
                rows[arm.name].reason = str(arm.allowed(batch, setting))
        try:
            measured = measure_batch(point, batch, allowed, setting, device, trial.timer)
        except ContextLost as lost:
            for measurement in lost.measured:
                rows[measurement.arm].add(measurement)
            raise
        except NsaTuneError as error:
            print(f"{point.name} {batch}: {error}", file=sys.stderr)
            continue
        for measurement in measured:
            rows[measurement.arm].add(measurement)
            rows[measurement.arm].rate(batch, setting, trial.ceilings)
        yield list(rows.values())
    yield list(rows.values())


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    lines = [f"| {' | '.join(_HEADINGS)} |", "|---" * len(_HEADINGS) + "|"]
    for row in rows:
        error = "" if row.error is None else f"{row.error:.2g}"
        allowed = "" if row.tolerance is None else f" (may be {row.tolerance:g})"
        cells = (
            row.point, f"`{row.arm}`", row.model, str(row.heads), row.kv_layout,
            "" if row.overlap is None else f"{row.overlap:g}", row.status,
            error + allowed if error else "", _number(row.latency_us), _number(row.pass_us),
            _number(row.tflop_per_s), _number(row.gb_per_s), share_text(row.of_limit), row.batch,
            row.reason.replace("|", "/")[:160],
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def document(rows: Sequence[Row], setting: Setting, seconds: float) -> str:
    """The rows as JSON, with what they were measured on."""
    head = {
        "schema": SCHEMA, "gpu": setting.device.name, "driver": detect.driver_version(),
        "libraries": dict(setting.libraries), "seconds": round(seconds, 1),
        "arms": [asdict(row) for row in rows],
    }  # fmt: skip
    return json.dumps(head, indent=1) + "\n"


def _settings(arguments: argparse.Namespace) -> Iterator[Setting]:
    device = devices.pick_device(arguments.device)
    models = arguments.model or ("tiny" if device.type == "cpu" else "deepseek-v3.2,deepseek-v4")
    lossy = lossy_named(filter(None, arguments.allow_lossy.split(",")))
    shares = [float(word) for word in arguments.overlap.split(",") if word]
    overlaps: Sequence[float | None] = shares or (None,)
    for model in models.split(","):
        profile = profile_of(model)
        asked = arguments.heads or str(profile.heads)
        heads = [min(int(word), profile.heads) for word in asked.split(",")]
        for count, kv_dtype, overlap in product(heads, arguments.kv_dtype.split(","), overlaps):
            if profile.family == "v4" and kv_dtype == "bf16":
                continue
            yield devices.setting_of(device, model, count, kv_dtype, lossy, overlap)


def main() -> None:
    """Try every arm; Markdown on stdout."""
    parser = argparse.ArgumentParser(description="Every arm: does it run, how wrong, how fast.")
    parser.add_argument("--model", default="", help="comma-separated")
    parser.add_argument("--heads", default="", help="comma-separated; default: all of the model's")
    parser.add_argument("--kv-dtype", default="bf16,fp8", help="comma-separated")
    parser.add_argument("--overlap", default="", help="comma-separated; default: random selections")
    parser.add_argument("--points", default="", help="comma-separated; default: all")
    parser.add_argument("--batches", default="", help="space-separated; default: each point's own")
    parser.add_argument("--allow-lossy", default="", help="comma-separated")
    parser.add_argument("--sparse-only", action="store_true", help="without dense attention")
    parser.add_argument("--budget", type=float, default=inf, help="seconds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    settings, tried = _tried(arguments, start + arguments.budget)
    found: list[list[Row]] = [[] for _ in tried]

    def keep() -> None:
        rows = list(chain.from_iterable(found))
        if arguments.json is not None:
            arguments.json.write_text(document(rows, settings[0], time.monotonic() - start))
        if arguments.markdown is not None:
            arguments.markdown.write_text(markdown(rows))

    try:
        for i, rows in in_turns(tried):
            found[i] = rows
            keep()
    except ContextLost as lost:
        print(f"{lost}", file=sys.stderr)
        print(markdown(list(chain.from_iterable(found))), end="")
        sys.exit(lost.exit_code)
    print(markdown(list(chain.from_iterable(found))), end="")


def _tried(
    arguments: argparse.Namespace, end: float
) -> tuple[list[Setting], list[Iterator[list[Row]]]]:
    """The settings that are asked for, and the rows of each of their points."""
    names = [name for name in arguments.points.split(",") if name]
    settings, found = list(_settings(arguments)), []
    trial = _trial(arguments, settings[0], end)
    # What is scored and selected does not depend on the latents' layout: once is enough.
    seen: set[tuple[str, str]] = set()
    for setting in settings:
        for point in points_for(setting.profile):
            wanted = not names or point.name in names or point.group in names
            again = (point.name, setting.profile.name) in seen
            if not wanted or (again and point.name.startswith("indexer_")):
                continue
            seen.add((point.name, setting.profile.name))
            found.append(rows_of(point, setting, trial))
    return settings, found


def _trial(arguments: argparse.Namespace, setting: Setting, end: float) -> Trial:
    device = devices.pick_device(arguments.device)
    timer = timer_for(device)
    # A CPU's caches hold whole batches, so that no rate of its memory is a limit.
    measured = measure_ceilings(setting.device.arch, device, timer) if device.type == "cuda" else ()
    batches = tuple(map(Batch.parse, arguments.batches.split()))
    return Trial(timer, end, arguments.sparse_only, batches, ceilings_of(measured))


def in_turns(tried: Sequence[Iterator[list[Row]]]) -> Iterator[tuple[int, list[Row]]]:
    """The first batch of each point, then the second: an arm that compiles for minutes keeps none
    from its one time."""
    left = dict(enumerate(tried))
    while left:
        for i, rows in list(left.items()):
            found = next(rows, None)
            if found is None:
                del left[i]
            else:
                yield i, found


if __name__ == "__main__":
    main()
