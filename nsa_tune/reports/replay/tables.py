"""A replay as tables of texts, for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_tune.backend.types.counted import counted
from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.replay.prices import Way
from nsa_tune.reports.replay.rest import KINDS, RestOfPass
from nsa_tune.reports.replay.result import KindOfPass, Replay
from nsa_tune.reports.replay.whole_prefills import ENGINE, Basis
from nsa_tune.reports.replay.whole_result import WholePasses, whole_tables


def facts(found: Replay) -> list[tuple[str, str]]:
    """(name, value) of what was replayed and what it rests on."""
    traffic, table = found.traffic, found.table
    rows = [
        ("trace", traffic.trace),
        ("table", f"{table.gpu}, {table.model}, {table.heads} local heads, {table.kv_layout}"),
        ("from", table.source),
        ("engine", f"{found.baseline}, prefills up to {found.graph_tokens} new tokens as graphs"),
        ("layers", str(table.layers)),
    ]
    if traffic.form == "requests":
        rows.insert(1, ("requests", _requests(found)))
        settings = ", ".join(f"{name} {value:g}" for name, value in traffic.scheduler.items())
        rows.append(("scheduler", settings))
    rows += [(f"{point} from", source) for point, source in table.borrowed.items()]
    if found.rest is not None:
        rows.append(("rest of a pass", found.rest.what or "as given"))
    if found.whole is not None:
        rows.append(("pass times", found.whole.source))
    return rows


def _requests(found: Replay) -> str:
    one = found.traffic
    return f"{one.requests}, {one.prompt_tokens} prompt tokens, {one.output_tokens} output tokens"


def warnings(found: Replay) -> list[str]:
    """What the figures do not hold, and how exact they are."""
    texts = []
    for name, kind in found.kinds.items():
        for point, passes in kind.unpriced.items():
            texts.append(
                f"{point} was not measured for {passes} of {kind.passes} {name} passes: it is left "
                "out of them, under every way"
            )
        if kind.extrapolated > 0.01:
            texts.append(
                f"{kind.extrapolated:.0%} of the {name} time lies outside of the measured batches"
            )
        shared = kind.shared_prices
        if shared is not None:
            texts.append(
                f"{name} passes that are alike share a price: {shared.median:.1%} off (median), "
                f"{shared.p90:.1%} (p90), {shared.total:+.2%} in the sum, on {shared.passes} "
                "passes drawn at random"
            )
    if found.whole is not None:
        texts += _of_whole(found.whole, found.rest is not None)
    if found.rest is None and found.whole is None:
        texts.append(
            "times are of attention alone; for times to first token and tokens a second give "
            "--rest (a file that says what the rest of a pass takes) or --pass-times (what an "
            "engine measured)"
        )
    elif found.rest is not None:
        texts += _of_rest(found, found.rest)
    return texts


def _of_rest(found: Replay, rest: RestOfPass) -> Iterator[str]:
    error = rest.error
    if "median" in error:
        yield (
            f"against {error.get('passes', 0):.0f} passes that the engine really ran, a pass's "
            f"price is {error['median']:.1%} off (median), {error.get('p90', 0.0):.1%} (p90)"
        )
    kinds = [kind for kind in KINDS if kind not in rest.gpu_ms]
    if kinds:
        yield (
            f"the file of --rest has no weights for {' or '.join(kinds)} passes: those for "
            f"{next(iter(rest.gpu_ms))} passes are used"
        )
    lacking = [point for point in rest.attention if point not in _priced(found)]
    if lacking:
        yield (
            f"{', '.join(lacking)} has no price here, and the file of --rest does not count it "
            "either: times to first token lack its time"
        )


def _of_whole(found: WholePasses, rest: bool) -> Iterator[str]:
    for one in found.setups:
        missing, every = one.bases.get(Basis.NONE, 0), sum(one.bases.values())
        if missing and one.name == ENGINE:
            yield (
                f"{missing} of {every} prefills are not priced as a whole: none like them were "
                "measured in the engine, and without --rest they take a stated 20,000 tokens a "
                "second in times to first token"
            )
        other = [
            f"{count} ({basis})"
            for basis, count in one.bases.items()
            if basis not in (Basis.NONE, Basis.MEASURED)
        ]
        if other:
            yield (
                f"{one.name}: of {every} prefills these were not measured in just this way: "
                f"{', '.join(other)}"
            )
    if not rest:
        yield "times to first token assume 30 ms for a decode pass; give --rest for its real time"


def _priced(found: Replay) -> set[str]:
    return {point for kind in found.kinds.values() for point in kind.steps}


def tables(found: Replay) -> list[DisplayTable]:
    """All tables."""
    every = [_ways(found), _steps(found), _questions(found), _lost(found), _chunks(found)]
    if found.whole is not None:
        every = whole_tables(found.whole, {one.way: one.ttft_s for one in found.served}) + every
    if found.served:
        every.insert(1, _served(found))
    return [one for one in every if one.rows]


def _ways(found: Replay) -> DisplayTable:
    rows = []
    for name, kind in found.kinds.items():
        engine = kind.ways[Way.ENGINE].seconds
        for way in Way:
            one = kind.ways[way]
            interval = f"{one.low:.1f} to {one.high:.1f}"
            rows.append(
                (name, str(way), f"{one.seconds:.1f}", interval, _saved(one.seconds, engine))
            )
        if kind.static is not None:
            words = " ".join(kind.static.flags) or "the defaults"
            seconds = kind.static.seconds
            rows.append(
                (name, f"best flags: {words}", f"{seconds:.1f}", "", _saved(seconds, engine))
            )
    passes = ", ".join(
        counted(kind.passes, f"{name} pass", f"{name} passes") for name, kind in found.kinds.items()
    )
    return DisplayTable(
        "Attention by who chooses",
        ("passes", "who chooses", "seconds", "if all estimates err alike", "saved"),
        tuple(rows),
        frozenset({2, 4}),
        f"All layers of {passes}.",
    )


def _saved(seconds: float, engine: float) -> str:
    if not engine or seconds == engine:
        return "-"
    return f"{round(1 - seconds / engine, 3) + 0.0:.1%}"


def _served(found: Replay) -> DisplayTable:
    rows = tuple(
        (
            one.way,
            f"{one.wall_s:.0f}",
            f"{one.busy_s / one.wall_s:.0%}" if one.wall_s else "-",
            *(f"{one.ttft_s[name]:.3f}" for name in ("p50", "p90", "p99", "mean")),
            f"{one.prompt_tokens_per_s:.0f}",
            f"{one.output_tokens_per_s:.0f}",
        )
        for one in found.served
    )
    return DisplayTable(
        "How the requests are served",
        (
            "who chooses", "seconds", "busy", "TTFT p50 s", "p90", "p99", "mean",
            "prompt tokens/s", "output tokens/s",
        ),
        rows,
        frozenset(range(1, 9)),
        "Each pass takes its priced attention and the stated rest."
        if found.whole is None
        else "Each prefill takes its measured time, where there is one.",
    )  # fmt: skip


def _steps(found: Replay) -> DisplayTable:
    rows = [
        (name, point, *(f"{times[way]:.2f}" for way in Way))
        for name, kind in found.kinds.items()
        for point, times in kind.steps.items()
    ]
    return DisplayTable(
        "Attention by step of a layer, seconds",
        ("passes", "step", *map(str, Way)),
        tuple(rows),
        frozenset(range(2, 2 + len(Way))),
    )


def _questions(found: Replay) -> DisplayTable:
    return DisplayTable(
        "What each question alone would save",
        ("passes", "question", "seconds", "of the attention"),
        tuple(row for name, kind in found.kinds.items() for row in _gains(name, kind)),
        frozenset({2, 3}),
        "If only this answer were the table's, and all others the engine's own.",
    )


def _gains(name: str, kind: KindOfPass) -> Iterator[tuple[str, ...]]:
    engine = kind.ways[Way.ENGINE].seconds
    for question, gain in sorted(kind.questions.items(), key=lambda pair: -pair[1]):
        yield name, question, f"{gain:.2f}", f"{gain / engine:.2%}" if engine else "-"


def _lost(found: Replay) -> DisplayTable:
    rows = tuple(
        (
            "prefill" if one.extend else "decode",
            _range(one.sequences),
            _range(one.new_tokens),
            _range(one.kv_tokens),
            str(one.passes),
            f"{one.engine_us / 1e6:.2f}",
            f"{one.lost_us / 1e6:.2f}",
            f"{one.engine_arms} -> {one.table_arms}",
            one.example if len(one.example) <= 40 else f"{one.example[:37]}...",
        )
        for one in found.lost
    )
    return DisplayTable(
        "Where the engine loses most",
        (
            "passes", "sequences", "new tokens", "kv tokens", "count", "seconds", "lost",
            "instead of -> best", "for example",
        ),
        rows,
        frozenset({4, 5, 6}),
    )  # fmt: skip


def _chunks(found: Replay) -> DisplayTable:
    rows = tuple(
        (
            str(one.prompt),
            str(one.chunk),
            str(one.passes),
            f"{one.engine:.3f}",
            f"{one.table:.3f}",
            "best" if one.best else "",
            ", ".join([*one.unpriced, *(["extrapolated"] if one.extrapolated else [])]),
        )
        for one in found.chunks
    )
    what = "Whole passes" if found.rest is not None else "Attention alone, in all layers"
    return DisplayTable(
        "One prompt by chunk size, seconds",
        ("prompt", "chunk", "passes", "engine", "table", "", "not counted"),
        rows,
        frozenset(range(5)),
        f"{what}; each chunk has all that came before as its prefix.",
    )


def _range(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"
