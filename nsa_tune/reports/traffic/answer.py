"""An advice as one screen of text: what to do, what it gives, and at the end what is not sure."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor, log2

from nsa_tune.reports.traffic.advice import ALONE, WITH_DP, WITH_PLUGIN, WITH_POOL, Advice, Outcome
from nsa_tune.reports.traffic.launch import Launch
from nsa_tune.reports.traffic.memory import Memory

_GROWING = "growing"
_TITLES = ("", "prefill s", "decode s", "TTFT mean", "TTFT p90", "TPOT p90", "tokens/s")


def lines(advice: Advice) -> Iterator[str]:
    """The answer; its first line is the advice in a sentence."""
    yield headline(advice)
    usual, tp = advice.usual, advice.given.number("tp") or 1
    if usual and (other := advice.outcome(WITH_POOL)):
        order = 1 if advice.kv_dtype == "bf16" else -1
        bf16, fp8 = (usual, other)[::order]
        kernels = fp8.command.partition("fp8_e4m3 ")[2]
        plugins = f"{_plugins(advice, order)}{kernels and f'; fp8 with {kernels}'}"
        yield f"bf16 or fp8? {which(bf16, fp8, tp)}{plugins}."
    if usual and (other := advice.outcome(WITH_DP)):
        text = which(usual, other, tp, (f"TP{tp}", "DP attention"))
        yield f"TP{tp} or DP attention? {text}; that ranks wait for each other is not counted."
    if advice.outcomes:
        yield from ("", f"    {advice.command}", "")
        yield f"{advice.traffic}{'' if advice.whole_passes else ', attention alone'}:"
        columns = None if advice.outcomes[0].served else 3
        several = any(outcome.shared > 1 for outcome in advice.outcomes)
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
    if ranks := advice.ranks:
        text = "by estimates, the least certain ones here, that serves this load better"
        there = advice.gpus // (advice.given.number("tp") or 1)
        less = f" As given, they serve {min(there / advised.loads[0], 1):.0%}."
        text += f"{_first_token(ranks, advised)}.{_count(advice, ranks)}"
        return f"Try DP attention: {text}{less * (there < advised.engines[1])}"
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
    """What that gives: the mean time to first token; nothing where the load is not served."""
    if advised.served is None or given.served is None or advised.loads[0] > 1:
        return ""
    mean = _s(advised.served.ttft_s["mean"])
    if advised is given:
        return f" (mean time to first token {mean})"
    was = f"instead of {interval(given)}"
    if advised.shared != given.shared:
        was = f"with {advised.shared} engine{'s' * (advised.shared > 1)}"
    return f", and the mean time to first token is {mean} {was}"


def _count(advice: Advice, advised: Outcome) -> str:
    """What the GPUs that there are serve, and what the trace needs, where one engine is too few."""
    tp = advice.given.number("tp") or 1
    there = max(advice.gpus // tp, 1)
    whose = f"Your {advice.gpus} GPUs serve" if advice.gpus else f"One engine ({tp} GPUs) serves"
    if there >= advised.engines[1]:
        return ""
    usual, _, longest = (there / load for load in advised.loads)
    speed = floor(100 * longest * advice.speed) / 100
    return (
        f" {whose} {min(usual, 1):.0%} of this load, {longest:.0%} where all passes take "
        f"{advised.error:.0%} longer (--speed {speed:g}); {_needs(advised, tp)} keep up."
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
        return f"Not known, as whole passes were not measured: send the trace to each; {room}"
    needed = [_needs(outcome, tp) for outcome in (one, other)]
    needs, count = f"both need {needed[0]}", "there"
    if needed[0] != needed[1]:
        needs = f"{a} needs {needed[0]}, {b} {needed[1]}"
    if one.shared != other.shared or one.shared != one.engines[1]:
        count = f"with {one.shared} and {other.shared} engines"
    first_a, first_b, later_a, later_b = (
        _s(getattr(outcome.served, times)["mean"])
        for times in ("ttft_s", "tpot_s")
        for outcome in (one, other)
    )
    return (
        f"{one.verdict(other, names)}: {needs}; {count} the first token takes {first_a} on "
        f"average ({b}: {first_b}), each one after it, with the prefills in between, {later_a} "
        f"({b}: {later_b}); {room}"
    )


def _plugins(advice: Advice, order: int) -> str:
    """The first token's mean times with the plug-in in both formats."""
    both = advice.outcome(WITH_PLUGIN), advice.outcome(f"{WITH_PLUGIN} and ")
    times = [_s(one.served.ttft_s["mean"]) for one in both[::order] if one and one.served]
    return f"; with the plug-in {times[0]} (fp8: {times[1]})" if len(times) == 2 else ""


def larger_tp(memory: Memory, launch: Launch) -> int:
    """GPUs on which the weights leave room."""
    usable, tp = memory.static_fraction * memory.device_gib, launch.number("tp") or 1
    return max(2 * tp, 1 << ceil(log2(tp * memory.weights_gib / usable)))


def does_not_fit(memory: Memory, launch: Launch) -> str:
    """Why, and what to do."""
    usable, tp = memory.static_fraction * memory.device_gib, launch.number("tp") or 1
    return (
        f"This does not fit on {tp} GPU{'s' * (tp > 1)}: the weights take {memory.weights_gib:.0f} "
        f"GiB of each, and {usable:.0f} of its {memory.device_gib:.0f} GiB are for weights and KV "
        f'pool. Use more: --flags "{launch.name("tp")} {larger_tp(memory, launch)}".'
    )


def _row(outcome: Outcome, *, several: bool) -> tuple[str, ...]:
    decode = "-" if outcome.decode_s is None else f"{outcome.decode_s:.5g}"
    count = f", {outcome.shared} engine{'s' * (outcome.shared > 1)}"
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
        share = 1 - plugin.prefill_s / advised.prefill_s if advised.prefill_s else 0.0
        than = "the advised flags" if advice.changes else "your flags"
        rank = "one rank's " * ((advice.given.number("tp") or 1) > 1)
        what = rank + ("prefills" if advice.whole_passes else "attention of prefills")
        text = f"takes another {share:.0%} off {what} with {than} (`nsa-tune doctor`: is it on?)"
        yield "The plug-in", text if share > 0.005 else f"saves nothing more here than {than}"
    if advised and (other := advice.outcome(WITH_POOL)):
        yield other.name.capitalize(), f"answers change: {other.command}"
    if advised and (other := advice.outcome(WITH_DP)):
        yield "With DP attention", f"{other.command} (the plug-in leaves it alone)"
    if advised and advised.served:
        yield (
            "Prefill s, decode s",
            f"all passes of one engine, in {advised.served.span_s:.0f} s of trace. An engine keeps "
            "up if it ends at most 1 % or 30 s after the last request came; else its queue is "
            f"{_GROWING}",
        )
        for text in dict.fromkeys(each.intervals for each in advice.outcomes):
            names = (each.name for each in advice.outcomes if each.intervals == text)
            yield f"Interval {', '.join(names)}", text
    yield "Priced by", advice.source
