"""An advice as one screen of text: what to do, what it gives, and at the end what is not sure."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, log2

from nsa_tune.reports.traffic.advice import AS_GIVEN, OTHER_FORMAT, WITH_PLUGIN, Advice, Outcome
from nsa_tune.reports.traffic.launch import Launch
from nsa_tune.reports.traffic.memory import Memory

_ALIKE = 1.2
"""Mean times of both KV formats that differ by less are not told apart: on six traces in an engine
their ratio was up to 19 % off."""
_GROWING = "growing"
_TITLES = ("", "prefill s", "decode s", "TTFT mean", "TTFT p90", "TPOT p90", "tokens/s")


def lines(advice: Advice) -> Iterator[str]:
    """The answer; its first line is the advice in a sentence."""
    yield headline(advice)
    usual, other = advice.usual, advice.outcome(OTHER_FORMAT)
    if usual and other:
        bf16 = advice.kv_dtype == "bf16"
        text = bf16_or_fp8(*(usual, other) if bf16 else (other, usual))
        better = "fp8" if bf16 else "bf16"
        keeps = f" The command keeps {advice.kv_dtype}; that for {better} is below."
        yield f"bf16 or fp8? {text}.{keeps if text.startswith(f'{better}:') else ''}"
    if advice.outcomes:
        yield from ("", f"    {advice.advised.command(advice.model)}", "")
        if advice.changes:
            changes = (f"    {line}" for line in advice.changes)
            yield from ("Changes against your flags:", *changes, "")
        shared = f", one of {advice.engines} engines" if advice.engines > 1 else ""
        alone = "" if advice.whole_passes else ", attention alone"
        yield f"{advice.traffic}{shared}{alone}:"
        columns = None if advice.outcomes[0].served else 3
        rows = (_TITLES, *map(_row, advice.outcomes))
        yield from _table([row[:columns] for row in rows])
        yield from ("", *(f"{name}: {text}" for name, text in _facts(advice)), "")
        yield from ("Not sure, or not counted:", *(f"- {note}" for note in advice.notes))


def headline(advice: Advice) -> str:
    """What to do, and what it gives, in one sentence."""
    memory = advice.memory
    if memory is not None and not memory.fits:
        return does_not_fit(memory, advice.given)
    given, advised = advice.outcome(AS_GIVEN), advice.usual
    assert given is not None
    if advised is None or advised is given:
        return f"Keep what you have: no flag is surely faster{_load(advice, given)}."
    flags = " and ".join(line[2:] for line in advice.changes if line.startswith("+"))
    decodes = [outcome.decode_s or 0.0 for outcome in (given, advised)]
    kind = "prefills" if decodes[0] == decodes[1] else "passes"
    more = decodes if kind == "passes" else [0.0, 0.0]
    before, after = given.prefill_s + more[0], advised.prefill_s + more[1]
    what = f"{kind} take" if advice.whole_passes else f"the attention of {kind} takes"
    text = f"Set {flags}: {what} {1 - after / before:.0%} less time"
    return f"{text}{_load(advice, advised, given)}."


def _load(advice: Advice, outcome: Outcome, before: Outcome | None = None) -> str:
    """What that gives for a trace: the time to first token, and how many engines it needs."""
    if outcome.served is None:
        return ""
    mean = _s(outcome.served.ttft_s["mean"])
    if before is not None and before.served is not None:
        was = _s(before.served.ttft_s["mean"])
        text = f", and the mean time to first token is {mean} instead of {was}"
    else:
        text = f" (mean time to first token {mean})"
    if advice.engines == 1:
        return text
    return (
        f"{text}. Start {advice.engines} such engines, which take requests in turn: one serves "
        f"only {1 / advice.load:.0%} of this load, and fewer may not keep up"
    )


def bf16_or_fp8(bf16: Outcome, fp8: Outcome) -> str:
    """Which KV format serves a trace better, and why; or what to measure."""
    room = f"fp8 holds {fp8.pool_tokens / bf16.pool_tokens:.1f} times the tokens"
    if bf16.served is None or fp8.served is None:
        unknown = "Not known, as whole passes were not measured"
        return f"{unknown}: send the trace to an engine with each; {room}"
    first, later = (_faster(bf16, fp8, which) for which in ("ttft_s", "tpot_s"))
    verdict = "No sure difference, so send the trace to an engine with each"
    if first or later:
        both = f"{first or 'unsure'} for the first token, {later or 'unsure'} for the next ones"
        verdict = first if first == later else both
    first_a, first_b, later_a, later_b = (
        _s(times["mean"])
        for times in (bf16.served.ttft_s, fp8.served.ttft_s, bf16.served.tpot_s, fp8.served.tpot_s)
    )
    return (
        f"{verdict}: the first token takes {first_a} on average (fp8: {first_b}), each one after "
        f"it, with the prefills in between, {later_a} (fp8: {later_b}); {room}"
    )


def _faster(bf16: Outcome, fp8: Outcome, which: str) -> str:
    """The format whose time is surely shorter: at the price, and with all passes shorter or longer
    by the model's error; "" where neither is."""
    pairs = zip(bf16.runs, fp8.runs, strict=True)
    # A trace of single tokens has no time of a further one.
    ratios = [getattr(b, which)["mean"] / (getattr(a, which)["mean"] or 1) for a, b in pairs]
    return "bf16" if min(ratios) > _ALIKE else "fp8" if 0 < max(ratios) < 1 / _ALIKE else ""


def does_not_fit(memory: Memory, launch: Launch) -> str:
    """Why, and what to do."""
    usable, tp = memory.static_fraction * memory.device_gib, launch.number("tp") or 1
    larger = max(2 * tp, 2 ** ceil(log2(tp * memory.weights_gib / usable)))
    return (
        f"This does not fit: the weights take {memory.weights_gib:.0f} GiB of each GPU, and "
        f"{usable:.0f} of its {memory.device_gib:.0f} GiB are for weights and KV pool. Use more "
        f'GPUs: --flags "{launch.name("tp")} {larger}".'
    )


def _row(outcome: Outcome) -> tuple[str, ...]:
    decode = "-" if outcome.decode_s is None else f"{outcome.decode_s:.5g}"
    row = outcome.name, f"{outcome.prefill_s:.5g}", decode
    if outcome.served is None:
        return row
    tokens = f"{outcome.served.output_tokens_per_s:.0f}"
    ttft = interval(outcome, "mean"), interval(outcome, "p90")
    return (*row, *ttft, _s(outcome.served.tpot_s["p90"]), tokens)


def interval(outcome: Outcome, which: str) -> str:
    """A time to first token with its ends, by how far the model may be off. Where the queue grows
    as long as the trace lasts, its length says how long that is, and nothing else."""
    ends = (_s(run.ttft_s[which]) if run.engines == 1 else _GROWING for run in outcome.runs)
    usual, least, most = ends
    return f"{usual} ({least} to {most})"


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
    advised, plugin = advice.usual, advice.outcome(WITH_PLUGIN)
    if plugin and advised:
        yield "The plug-in", _plugin(advice, advised, plugin)
    if advised and (other := advice.outcome(OTHER_FORMAT)):
        # Never advised, as answers change with the format.
        tokens = f"{other.pool_tokens:,} tokens fit instead of {advised.pool_tokens:,}"
        yield other.name.capitalize(), f"{tokens}; answers change: {other.command}"
    if advice.error:
        error = f"{advice.error:.0%}"
        yield (
            "Intervals",
            f"if all passes took {error} less or more; one in four measured is off by more"
            + f"; {_GROWING}: that engine would not keep up, so requests wait ever longer"
            * any(run.engines > 1 for outcome in advice.outcomes for run in outcome.runs),
        )
    yield "Priced by", advice.source


def _plugin(advice: Advice, advised: Outcome, plugin: Outcome) -> str:
    """What the plug-in adds to the advised flags."""
    share = 1 - plugin.prefill_s / advised.prefill_s if advised.prefill_s else 0.0
    than = "the advised flags" if advice.changes else "your flags"
    if share <= 0.005:
        return f"saves nothing more here than {than}"
    what = "prefills" if advice.whole_passes else "attention of prefills"
    what = f"takes another {share:.0%} off the {what} with {than}"
    return "; ".join((what, *advice.plugin, "`nsa-tune doctor` says what of it is on in yours"))
