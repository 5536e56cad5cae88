"""An advice as one screen of text: what to do, what it gives, and at the end what is not sure."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor, log2

from nsa_tune.reports.traffic.advice import ALONE, WITH_DP, WITH_PLUGIN, WITH_POOL, Advice, Outcome
from nsa_tune.reports.traffic.launch import Launch
from nsa_tune.reports.traffic.memory import Memory

_ALIKE = 1.2
"""Both formats' times that differ by less are not told apart: their ratio was up to 19 % off."""
_GROWING = "growing"
_TITLES = ("", "prefill s", "decode s", "TTFT mean", "TTFT p90", "TPOT p90", "tokens/s")


def lines(advice: Advice) -> Iterator[str]:
    """The answer; its first line is the advice in a sentence."""
    yield headline(advice)
    usual, tp = advice.usual, advice.given.number("tp") or 1
    if usual and (other := advice.outcome(WITH_POOL)):
        pair = (usual, other) if advice.kv_dtype == "bf16" else (other, usual)
        yield f"bf16 or fp8? {which(*pair, tp)}."
    if usual and (other := advice.outcome(WITH_DP)):
        text = which(usual, other, tp, (f"TP{tp}", "DP attention"))
        yield f"TP{tp} or DP attention? {text}; that ranks wait for each other is not counted."
    if advice.outcomes:
        yield from ("", f"    {advice.advised.command(advice.model)}", "")
        yield f"{advice.traffic}{'' if advice.whole_passes else ', attention alone'}:"
        columns = None if advice.outcomes[0].served else 3
        several = any(max(outcome.engines) > 1 for outcome in advice.outcomes)
        rows = (_TITLES, *(_row(outcome, several=several) for outcome in advice.outcomes))
        yield from _table([row[:columns] for row in rows])
        yield from ("", *(f"{name}: {text}" for name, text in _facts(advice)), "")
        yield from ("Not sure, or not counted:", *(f"- {note}" for note in advice.notes))


def headline(advice: Advice) -> str:
    """What to do, and what it gives, in one sentence."""
    memory = advice.memory
    if memory is not None and not memory.fits:
        return does_not_fit(memory, advice.given)
    given, advised, text = advice.outcomes[0], advice.usual, "no flag is surely faster"
    assert advised is not None
    flags = " and ".join(map(" ".join, advice.changes.items()))
    if flags:
        kind = "prefills" if given.decode_s == advised.decode_s else "passes"
        more = [(one.decode_s or 0.0) * (kind == "passes") for one in (given, advised)]
        share = 1 - (advised.prefill_s + more[1]) / (given.prefill_s + more[0])
        what = f"{kind} take" if advice.whole_passes else f"the attention of {kind} takes"
        text = f"{what} {share:.0%} less time"
    if advice.stands_in:
        return f"{advice.stands_in} {text}{flags and f' with {flags}'}. Measure it: `nsa-tune run`."
    start = f"Set {flags}" if flags else "Keep what you have"
    return f"{start}: {text}{_first_token(advised, given)}.{_count(advice, advised)}"


def _first_token(advised: Outcome, given: Outcome) -> str:
    """What that gives: the mean time to first token, and why it is so long without."""
    if advised.served is None or given.served is None:
        return ""
    mean, was = _s(advised.served.ttft_s["mean"]), _s(given.served.ttft_s["mean"])
    if advised is given:
        return f" (mean time to first token {mean})"
    text = f", and the mean time to first token is {mean} instead of {was}"
    span_s, takes_s = given.served.span_s, given.prefill_s + (given.decode_s or 0.0)
    queue = f": as given, passes take {takes_s:.0f} s in {span_s:.0f} s, so requests queue"
    return text + queue * (takes_s > 1.05 * span_s)


def _count(advice: Advice, advised: Outcome) -> str:
    """How many engines the trace needs, where that is not surely one."""
    alone, tp = advice.outcome(ALONE), advice.given.number("tp") or 1
    if alone is None:
        return ""
    usual, _, longest = (run.engines for run in alone.runs)
    serves = f"serves {1 / usual:.0%} of" if usual > 1 else "just keeps up with"
    more = "the more" if advised.engines[0] < advised.engines[1] else "also"
    there = advice.gpus // tp
    what = "one serves" if there == 1 else f"{there} engines on your {advice.gpus} GPUs serve"
    return (
        f" One engine ({tp} GPUs) {serves} this load; {_needs(advised, tp)} keep up, {more} where "
        f"all passes take {advice.error:.0%} longer. --speed "
        f"{floor(100 * there * advice.speed / longest) / 100:g} is what {what} then."
    )


def _needs(outcome: Outcome, tp: int) -> str:
    """The engines that serve the trace: by the prices, and surely."""
    counts = sorted({*outcome.engines})
    engines, gpus = (" to ".join(str(n * times) for n in counts) for times in (1, tp))
    return f"{engines} engine{'s' * (counts[-1] > 1)} ({gpus} GPUs)"


def which(
    one: Outcome, other: Outcome, tp: int = 1, names: tuple[str, str] = ("bf16", "fp8")
) -> str:
    """Which of two, KV formats if not `names`, serves a trace better; or what to measure."""
    a, b = names
    room = f"{b} holds {other.pool_tokens / one.pool_tokens:.1f} times the tokens"
    if one.served is None or other.served is None:
        unknown = "Not known, as whole passes were not measured"
        return f"{unknown}: send the trace to an engine with each; {room}"
    first, later = (_faster(one, other, times, names) for times in ("ttft_s", "tpot_s"))
    verdict = "No sure difference, so send the trace to an engine with each"
    if first or later:
        both = f"{first or 'unsure'} for the first token, {later or 'unsure'} for the next ones"
        verdict = first if first == later else both
    needed = [_needs(outcome, tp) for outcome in (one, other)]
    needs, count = f"both need {needed[0]}", "there"
    if needed[0] != needed[1]:
        needs = f"{a} needs {needed[0]}, {b} {needed[1]}"
        count = f"with {one.engines[1]} and {other.engines[1]} engines"
        fewer = a if one.engines < other.engines else b
        signs = {(x > y) - (x < y) for x, y in zip(one.engines, other.engines, strict=True)}
        verdict = f"{fewer} {'takes' if len(signs) == 1 else 'may take'} fewer GPUs"
    first_a, first_b, later_a, later_b = (
        _s(getattr(outcome.served, times)["mean"])
        for times in ("ttft_s", "tpot_s")
        for outcome in (one, other)
    )
    return (
        f"{verdict}: {needs}; {count} the first token takes {first_a} on average ({b}: "
        f"{first_b}), each one after it, with the prefills in between, {later_a} ({b}: {later_b}); "
        f"{room}"
    )


def _faster(one: Outcome, other: Outcome, times: str, names: tuple[str, str]) -> str:
    """Whose time is surely shorter: at the price, and with all passes shorter or longer by the
    model's error; "" where neither is."""
    pairs = zip(one.runs, other.runs, strict=True)
    # A trace of single tokens has no time of a further one.
    ratios = [getattr(b, times)["mean"] / (getattr(a, times)["mean"] or 1) for a, b in pairs]
    return names[0] if min(ratios) > _ALIKE else names[1] * (0 < max(ratios) < 1 / _ALIKE)


def does_not_fit(memory: Memory, launch: Launch) -> str:
    """Why, and what to do."""
    usable, tp = memory.static_fraction * memory.device_gib, launch.number("tp") or 1
    larger = max(2 * tp, 2 ** ceil(log2(tp * memory.weights_gib / usable)))
    return (
        f"This does not fit: the weights take {memory.weights_gib:.0f} GiB of each GPU, and "
        f"{usable:.0f} of its {memory.device_gib:.0f} GiB are for weights and KV pool. Use more "
        f'GPUs: --flags "{launch.name("tp")} {larger}".'
    )


def _row(outcome: Outcome, *, several: bool) -> tuple[str, ...]:
    decode = "-" if outcome.decode_s is None else f"{outcome.decode_s:.5g}"
    count = f", {outcome.engines[1]} engine{'s' * (outcome.engines[1] > 1)}"
    name = outcome.name + count * (several and not outcome.name.startswith(ALONE))
    row = name, f"{outcome.prefill_s:.5g}", decode
    if outcome.served is None:
        return row
    times, keeps_up = outcome.served, outcome.served.engines == 1
    p90 = _s(times.ttft_s["p90"]) if keeps_up else _GROWING
    ttft, tokens = interval(outcome), f"{times.output_tokens_per_s:.0f}"
    return (*row, ttft, p90, _s(times.tpot_s["p90"]), tokens)


def interval(outcome: Outcome) -> str:
    """The mean time to first token with its ends; none where the queue grows to the trace's end."""
    ends = [_s(run.ttft_s["mean"]) if run.engines == 1 else _GROWING for run in outcome.runs]
    return ends[0] if len({*ends}) == 1 else f"{ends[0]} ({ends[1]} to {ends[2]})"


def _s(seconds: float) -> str:
    """Seconds in words of two or three digits."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 1e3 else f"{seconds:.0f} s"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield f"    {first.ljust(widths[0])}  {'  '.join(cells)}".rstrip()


def _facts(advice: Advice) -> Iterator[tuple[str, str]]:
    memory = advice.memory
    if memory is not None:
        yield (
            "Fits",
            f"{memory.weights_gib:.0f} GiB of weights and a KV pool of {memory.pool_gib:.0f} GiB "
            f"({memory.pool_tokens:,} tokens) in each GPU's {memory.device_gib:.0f} GiB; "
            f"{1 - memory.static_fraction:.0%} left for activations and graphs",
        )
    yield "Engine", f"{advice.release} is assumed (--engine-version)"
    advised, plugin = advice.usual, advice.outcome(WITH_PLUGIN)
    if plugin and advised:
        yield "The plug-in", _plugin(advice, advised, plugin)
    if advised and (other := advice.outcome(WITH_POOL)):
        yield other.name.capitalize(), f"answers change: {other.command}"
    if advised and (other := advice.outcome(WITH_DP)):
        yield "With DP attention", other.command
    if advised and advised.served:
        yield (
            "Prefill s, decode s",
            "passes of one engine, those that the fastest flags run, in "
            f"{advised.served.span_s:.0f} s of trace: where they take longer, requests queue, and "
            f"where that is {_GROWING} they would wait ever longer",
        )
        yield "Intervals", advice.intervals
    yield "Priced by", advice.source


def _plugin(advice: Advice, advised: Outcome, plugin: Outcome) -> str:
    """What the plug-in adds to the advised flags."""
    share = 1 - plugin.prefill_s / advised.prefill_s if advised.prefill_s else 0.0
    than = "the advised flags" if advice.changes else "your flags"
    if share <= 0.005:
        return f"saves nothing more here than {than}"
    rank = "one rank's " * ((advice.given.number("tp") or 1) > 1)
    what = rank + ("prefills" if advice.whole_passes else "attention of prefills")
    return f"takes another {share:.0%} off {what} with {than} (`nsa-tune doctor`: is it on?)"
