"""Decisions in words: the reason of one field, and the whole plan as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from nsa_tune.backend.baselines.baseline import Baseline
from nsa_tune.backend.dispatch.decide import Choice, Verdict
from nsa_tune.backend.dispatch.plan import DERIVED, Consulted, Plan, Reason, Row
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Key

_Fact = TypeVar("_Fact", Row, Consulted)


def reason_of(choice: Choice, baseline: Baseline, table: str) -> Reason:
    """The reason behind `choice`; `table` names where the measurements are from."""
    match choice.verdict:
        case Verdict.BASELINE:
            source = baseline.source(choice.question)
        case Verdict.ONLY | Verdict.NONE:
            source = "hard limits"
        case Verdict.FORCED:
            source = "NSA_TUNE_FORCE"
        case _:
            source = table
    estimates = choice.estimates
    return Reason(
        verdict=choice.verdict,
        source=source,
        estimates_us={name: estimate.latency_us for name, estimate in estimates.items()},
        intervals_us={
            name: (estimate.low_us, estimate.high_us) for name, estimate in estimates.items()
        },
        guards=dict(choice.forbidden),
        text=_sentence(choice, baseline),
    )


def _sentence(choice: Choice, baseline: Baseline) -> str:
    text = _finding(choice, baseline)
    if any(estimate.extrapolated for estimate in choice.estimates.values()):
        text += ", estimated from outside of the measured range"
    return "; ".join((text, *_exclusions(choice.forbidden)))


def _exclusions(forbidden: Mapping[str, str]) -> Iterator[str]:
    """Why choices are not allowed, those of one reason together."""
    names: dict[str, list[str]] = {}
    for name, why in forbidden.items():
        arm, _, clause = why.partition(" ")
        if arm.rpartition("/")[2] == name:
            why = clause.removeprefix("has ").removeprefix("is ")
        names.setdefault(why, []).append(name)
    return (f"not {', '.join(alike)}: {why}" for why, alike in names.items())


def _finding(choice: Choice, baseline: Baseline) -> str:
    match choice.verdict:
        case Verdict.WIN:
            return _comparison(choice, "is faster than")
        case Verdict.UNSURE if _ahead(choice):
            return f"{_comparison(choice, 'looks faster than')}, which the intervals leave open"
        case Verdict.UNSURE:
            return _contradiction(choice)
        case Verdict.TIE:
            why = f"is {baseline.name}'s" if choice.choice == choice.default else "comes first"
            return f"{' and '.join(choice.tied)} take equally long; {choice.choice} {why}"
        case Verdict.ONLY:
            return f"only {choice.choice} is allowed"
        case Verdict.FORCED:
            return f"NSA_TUNE_FORCE asks for {choice.choice}, and no limit forbids it"
        case Verdict.BASELINE if choice.choice == choice.default:
            return f"too little is measured here; {baseline.name} takes {choice.choice}"
        case Verdict.BASELINE:
            default = f"{baseline.name}'s {choice.default}"
            return f"too little is measured here, and {default} is not allowed"
    return "every choice is forbidden"


def _ahead(choice: Choice) -> bool:
    """Whether the taken choice has the least estimate of all, and more than one has any."""
    times = {name: estimate.latency_us for name, estimate in choice.estimates.items()}
    return len(times) > 1 and min(times, key=times.__getitem__) == choice.choice


def _comparison(choice: Choice, verb: str) -> str:
    """The taken choice against the next best one."""
    times = {name: estimate.latency_us for name, estimate in choice.estimates.items()}
    assert choice.choice is not None
    taken = times.pop(choice.choice)
    other = min(times, key=times.__getitem__)
    return (
        f"{choice.choice} ({_microseconds(taken)}) {verb} {other} ({_microseconds(times[other])}) "
        f"by {times[other] / taken:.3g}x"
    )


def _contradiction(choice: Choice) -> str:
    """The latency models chose what the measurements nearby do not confirm."""
    times = {name: estimate.latency_us for name, estimate in choice.estimates.items()}
    others = {name: time for name, time in times.items() if name != choice.choice}
    if choice.choice not in times or not others:
        return (
            f"the latency models take {choice.choice}; too little is measured nearby to confirm it"
        )
    other = min(others, key=others.__getitem__)
    return (
        f"too close to tell: the latency models take {choice.choice} "
        f"({_microseconds(times[choice.choice])}), the measurements nearby speak for {other} "
        f"({_microseconds(others[other])})"
    )


def _microseconds(time_us: float) -> str:
    """Three or more significant digits, with the unit."""
    return f"{time_us:.0f} us" if time_us >= 1000 else f"{time_us:.3g} us"


_DERIVED_TEXTS: dict[str, dict[object, str]] = {
    "topk_transform": {
        "paged": "the kernel that takes the indices reads the pool itself",
        "ragged": "the sparse prefill kernel reads what was read back from the fp8 pool",
        None: "no sparse prefill kernel is allowed",
    },
    "dequantize_prefix": {
        True: "there is an fp8 prefix, and the kernel reads a copy of it",
        False: "there is no prefix, or nothing that must be widened for the kernel",
        None: "there is no prefill path",
    },
    "skip_topk": {
        True: "no sequence is longer than index_topk, so every token is selected",
        False: "the batch decodes, or a sequence is longer than index_topk",
    },
    "layout_conversion": {
        "packed_fp8.dequantize": "the pool is packed fp8, and the kernel reads bf16",
        "packed_fp8.narrow": "the pool is packed fp8, and the kernel reads e4m3 without scales",
        None: "the kernel reads the pool as it is, or nothing of it",
    },
}


def derived_reason(plan: Plan, name: str, baseline: Baseline) -> Reason:
    """The reason of a field that follows from the batch and the other choices."""
    text = _DERIVED_TEXTS[name][getattr(plan, name)]
    return Reason(Verdict.FORCED, f"coupled as in {baseline.name}", {}, {}, {}, text)


def explained(
    plan: Plan, source: str, lacking: Mapping[str, Sequence[str]], layers: int,
    points: Mapping[str, str],
) -> Iterator[str]:  # fmt: skip
    """The whole plan in lines: each decision with its estimates, then what they all rest on.

    Args:
        lacking: by point, the arms that the source knows too little of.
        layers: how many layers share what is computed once a pass.
        points: the decision point of each question.
    """
    batch, reasons = plan.batch, dict(plan.reasons)
    yield f"batch   {_short(str(batch))}"
    yield (
        f"        sequences {batch.batch_size}, new tokens {batch.q_tokens}, kv tokens "
        f"{batch.kv_tokens}, longest {batch.max_kv}" + (", captured" if batch.captured else "")
    )
    yield f"source  {source}"
    if lacking:
        yield "        which has too few measurements of these arms; `nsa-tune run` adds them:"
        yield from (f"        {point}: {', '.join(names)}" for point, names in lacking.items())
    key = next((reason.key for reason in reasons.values() if reason.key), None)
    if key is not None:
        yield f"key     {_key(key)}"
    for name, reason in reasons.items():
        yield f"{name} = {getattr(plan, name)}  ({reason.verdict})"
        yield f"    {reason.text}"
        if name not in DERIVED:
            yield from _figures(reason)
    # Questions of one point share arms, and arms of several points share names.
    by_point = [(points.get(name, name), reason) for name, reason in reasons.items()]
    rows = _by_arm((point, row) for point, reason in by_point for row in reason.rows)
    yield from _measurements(rows)
    yield from _costs_of_a_pass(rows, layers)
    yield from _limits(
        _by_arm((point, guard) for point, reason in by_point for guard in reason.consulted)
    )


def _figures(reason: Reason) -> Iterator[str]:
    for choice, time_us in sorted(reason.estimates_us.items(), key=lambda item: item[1]):
        interval = _interval(*reason.intervals_us[choice])
        yield f"    {choice:<16} {_microseconds(time_us):>10}  [{interval}]"
    yield f"    decided by {reason.source}"
    if reason.expected_regret is not None:
        yield f"    expected regret {reason.expected_regret:.2%}"
    for choice, change in reason.to_win.items():
        yield f"    {choice} would win with {change}"


_HARDLY_KNOWN = 100.0
"""Ends of an interval that are this factor apart say only that little is known."""


def _interval(low_us: float, high_us: float) -> str:
    if high_us > _HARDLY_KNOWN * low_us:
        return "may be off by more than 10x: too little is measured nearby"
    return f"{_microseconds(low_us)}, {_microseconds(high_us)}"


_MOST_ROWS = 3
"""Measurements of an arm that an explanation lists."""


def _measurements(by_arm: Mapping[str, Iterable[Row]]) -> Iterator[str]:
    if by_arm:
        yield "estimates are interpolated from"
    for arm, rows in by_arm.items():
        ordered = sorted(rows, key=lambda row: (-row.weight, row.batch))
        words = [
            f"{_short(row.batch)} {_microseconds(row.latency_us)} ({row.weight:.0%})"
            for row in ordered[:_MOST_ROWS]
        ]
        more = f" and {len(ordered) - _MOST_ROWS} more" if len(ordered) > _MOST_ROWS else ""
        yield f"    {arm}: {', '.join(words)}{more}"


def _costs_of_a_pass(by_arm: Mapping[str, Iterable[Row]], layers: int) -> Iterator[str]:
    """What of an arm's estimate is a share of what it takes once a pass."""
    word = counted(layers, "layer")
    for arm, rows in by_arm.items():
        costs = [(row.pass_us, row.weight) for row in rows if row.pass_us is not None]
        weight = sum(weight for _, weight in costs)
        if weight:
            mean_us = sum(cost * part for cost, part in costs) / weight
            yield f"{arm} takes {_microseconds(mean_us)} once a pass, spread over {word}"


def _by_arm(facts: Iterable[tuple[str, _Fact]]) -> dict[str, list[_Fact]]:
    """The facts of each arm, without repetitions, under the arm's point and name."""
    by_arm: dict[str, list[_Fact]] = {}
    for point, fact in dict.fromkeys(facts):
        by_arm.setdefault(f"{point} {fact.arm}", []).append(fact)
    return by_arm


def _limits(by_arm: Mapping[str, Iterable[Consulted]]) -> Iterator[str]:
    if by_arm:
        yield "limits checked"
    for arm, guards in by_arm.items():
        kept = ", ".join(guard.guard for guard in guards if guard.reason is None) or "none"
        passed = [guard.guard for guard in guards if guard.reason is not None]
        allowed = f"forbidden by {passed[0]}" if passed else "allowed"
        yield f"    {arm}: {allowed} (limits kept: {kept})"


def _key(key: Key) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in key.libraries)
    return (
        f"{key.gpu}, driver {key.driver or 'none'}, {key.model}, {key.heads} heads, "
        f"{key.kv_layout}, {key.protocol}, {libraries or 'no libraries'}"
    )


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."
