"""The charts of a replay: attention by who chooses, and the shapes on which the engine loses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nsa_tune.reports.charts.chunk_rates import chunk_rates
from nsa_tune.reports.charts.figures import Chart
from nsa_tune.reports.charts.theme import SCHEMA, Rows, Spec, tips
from nsa_tune.reports.replay.prices import Way
from nsa_tune.reports.replay.result import Replay

_LABEL_PX = 320
"""Width of the longest label."""
_SHORTEST = 0.002
"""Steps below this part of all attention are drawn as one."""


def ways_chart(found: Replay) -> Chart:
    """Seconds of attention for each way to choose, a bar made of its steps."""
    rows: Rows = [*_ways(found)]
    told = {"way": "chosen by", "step": "step", "text": "time"}
    spec = _bars("ways", rows, "way", "seconds of attention", told, parts="step")
    spec["encoding"]["order"] = {"field": "place", "type": "quantitative"}
    return Chart(spec, {"ways": rows})


def _ways(found: Replay) -> Iterator[dict[str, object]]:
    whole = found.total(Way.ENGINE) or 1.0
    for way in Way:
        place, small = 0, 0.0
        for kind, one in found.kinds.items():
            for point, times in one.steps.items():
                if one.steps[point][Way.ENGINE] < _SHORTEST * whole:
                    small += times[way]
                    continue
                place += 1
                name = point if point.startswith(kind) else f"{kind}: {point}"
                yield _row(way, name, times[way], place)
        if small:
            yield _row(way, "other", small, place + 1)


def _row(way: Way, step: str, seconds: float, place: int) -> dict[str, object]:
    return {
        "way": str(way), "step": step, "seconds": round(seconds, 4), "text": f"{seconds:.2f} s",
        "place": place,
    }  # fmt: skip


def whole_chart(found: Replay) -> Chart | None:
    """Seconds of whole prefills for each setup, a bar made of the ways that they run; None without
    pass times."""
    rows: Rows = [
        {
            "setup": one.name,
            "way": way,
            "seconds": round(passes.seconds, 4),
            "passes": str(passes.passes),
            "text": f"{passes.seconds:.2f} s; by the engine itself {passes.engine_seconds:.2f} s",
        }
        for one in (found.whole.setups if found.whole is not None else ())
        for way, passes in one.ways.items()
    ]
    if not rows:
        return None
    told = {"setup": "setup", "way": "way", "passes": "passes", "text": "time"}
    title = "seconds of prefill passes, host included"
    return Chart(_bars("whole", rows, "setup", title, told, parts="way"), {"whole": rows})


def lost_chart(found: Replay) -> Chart | None:
    """Seconds that the engine loses, by shape of a pass; None where it loses nothing."""
    rows: Rows = [
        {
            "shape": f"{number}. like {_short(one.example)}",
            "seconds": round(one.lost_us / 1e6, 4),
            "passes": str(one.passes),
            "instead": f"{one.engine_arms} -> {one.table_arms}",
            "example": _short(one.example),
            "text": f"{one.lost_us / 1e6:.2f} s of {one.engine_us / 1e6:.2f} s",
        }
        for number, one in enumerate(found.lost, 1)
    ]
    if not rows:
        return None
    told = {"example": "like", "passes": "passes", "text": "lost", "instead": "instead of -> best"}
    return Chart(_bars("lost", rows, "shape", "seconds lost", told), {"lost": rows})


def chunks_chart(found: Replay) -> Chart | None:
    """Prompt tokens a second against chunk size; None without such prompts."""
    rows: Rows = [
        {
            "chunk": one.chunk,
            "rate": round(one.prompt / seconds, 1),
            "prompt": str(one.prompt),
            "who": who,
            "best": one.best,
            "extrapolated": one.extrapolated,
            "arms": ", ".join(one.unpriced),
        }
        for one in found.chunks
        for who, seconds in (("table", one.table), (found.baseline, one.engine))
        if seconds
    ]
    if not rows:
        return None
    spec = chunk_rates(
        list(dict.fromkeys(row["prompt"] for row in rows)), ["table", found.baseline]
    )
    whole = "whole passes" if found.rest is not None else "attention alone"
    spec["encoding"]["y"]["axis"]["title"] = f"prompt tokens a second, {whole}"
    told = {
        "prompt": "prompt",
        "who": "chosen by",
        "chunk": "chunk size",
        "rate": "tokens a second",
    }
    spec["layer"][1]["encoding"]["tooltip"] = tips({**told, "arms": "not counted"})
    return Chart(spec, {"chunks": rows})


def _bars(
    data: str, rows: Rows, field: str, title: str, told: Mapping[str, str], parts: str | None = None
) -> Spec:
    """A bar of seconds for each value of `field`, in the order of the rows; made of `parts`."""
    order = _values(rows, field)
    spec: Spec = {
        "$schema": SCHEMA,
        "data": {"name": data},
        "width": "container",
        "height": (26 if parts is None else 34) * len(order),
        "encoding": {
            "y": {
                "field": field, "type": "nominal", "sort": order,
                "axis": {"title": None, "labelLimit": _LABEL_PX},
            },
            "x": {
                "field": "seconds", "type": "quantitative",
                "axis": {"title": title, "tickCount": 6},
            },
        },
        "layer": [{"mark": {"type": "bar"}, "encoding": {"tooltip": tips(told)}}],
    }  # fmt: skip
    if parts is not None:
        spec["encoding"]["x"]["stack"] = "zero"
        spec["encoding"]["color"] = {
            "field": parts, "type": "nominal", "scale": {"domain": _values(rows, parts)},
            "legend": {"title": None, "orient": "top", "columns": 3},
        }  # fmt: skip
        spec["layer"][0]["mark"] |= {"stroke": "white", "strokeWidth": 0.5}
    return spec


def _values(rows: Rows, field: str) -> list[str]:
    return list(dict.fromkeys(str(row[field]) for row in rows))


def _short(text: str) -> str:
    return text if len(text) <= 34 else f"{text[:31]}..."
