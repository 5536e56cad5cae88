"""Decisions in words: the reason of one field, and the whole plan as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nsa_tune.backend.plan import DERIVED, Plan, Reason
from nsa_tune.backend.verdict import Choice, Verdict

if TYPE_CHECKING:
    from nsa_tune.backend.rules.rule import Rule

__all__ = ["derived_reason", "explained", "reason_of"]


def reason_of(choice: Choice, rule: Rule, table: str) -> Reason:
    """The reason behind `choice`; `table` names where the measurements are from."""
    match choice.verdict:
        case Verdict.RULE:
            source = rule.source(choice.answer)
        case Verdict.ONLY | Verdict.NONE:
            source = "hard limits"
        case _:
            source = table
    estimates = choice.estimates
    return Reason(
        verdict=choice.verdict,
        source=source,
        estimates_us={name: one.latency_us for name, one in estimates.items()},
        intervals_us={name: (one.low_us, one.high_us) for name, one in estimates.items()},
        guards=dict(choice.forbidden),
        text=_sentence(choice, rule),
    )


def _sentence(choice: Choice, rule: Rule) -> str:
    match choice.verdict:
        case Verdict.WIN:
            text = _comparison(choice, "is faster than")
        case Verdict.UNSURE:
            text = f"{_comparison(choice, 'looks faster than')}, which the intervals leave open"
        case Verdict.TIE:
            why = f"is {rule.name}'s" if choice.choice == choice.default else "comes first"
            text = f"{' and '.join(choice.tied)} take equally long; {choice.choice} {why}"
        case Verdict.ONLY:
            text = f"only {choice.choice} is allowed"
        case Verdict.RULE if choice.choice == choice.default:
            text = f"too little is measured here; {rule.name} takes {choice.choice}"
        case Verdict.RULE:
            text = f"too little is measured here, and {rule.name}'s {choice.default} is not allowed"
        case _:
            text = "every choice is forbidden"
    if any(one.extrapolated for one in choice.estimates.values()):
        text += ", estimated from outside of the measured range"
    if choice.forbidden:
        text += "; " + "; ".join(f"not {name}: {why}" for name, why in choice.forbidden.items())
    return text


def _comparison(choice: Choice, verb: str) -> str:
    """The taken choice against the next best one."""
    times = {name: one.latency_us for name, one in choice.estimates.items()}
    assert choice.choice is not None
    taken = times.pop(choice.choice)
    other = min(times, key=times.__getitem__)
    return (
        f"{choice.choice} ({_microseconds(taken)}) {verb} {other} ({_microseconds(times[other])}) "
        f"by {times[other] / taken:.3g}x"
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
        True: "there is an fp8 prefix, and the kernel reads bf16",
        False: "there is no prefix, or nothing that must be widened for the kernel",
        None: "there is no prefill path",
    },
    "skip_topk": {
        True: "no sequence is longer than index_topk, so every token is selected",
        False: "the batch decodes, or a sequence is longer than index_topk",
    },
}


def derived_reason(plan: Plan, name: str, rule: Rule) -> Reason:
    """The reason of a field that follows from the batch and the other choices."""
    text = _DERIVED_TEXTS[name][getattr(plan, name)]
    return Reason(Verdict.FORCED, f"coupled as in {rule.name}", {}, {}, {}, text)


def explained(plan: Plan, source: str) -> str:
    """The whole plan as text, the estimates of each question below it."""
    return "\n".join(_lines(plan, source))


def _lines(plan: Plan, source: str) -> Iterator[str]:
    batch = plan.batch
    yield f"batch   {_short(str(batch))}"
    yield (
        f"        sequences {batch.sequences}, new tokens {batch.q_tokens}, kv tokens "
        f"{batch.kv_tokens}, longest {batch.max_kv}" + (", captured" if batch.captured else "")
    )
    yield f"source  {source}"
    for name, reason in plan.reasons.items():
        yield f"{name} = {getattr(plan, name)}  ({reason.verdict})"
        yield f"    {reason.text}"
        if name in DERIVED:
            continue
        for choice, time_us in sorted(reason.estimates_us.items(), key=lambda item: item[1]):
            low_us, high_us = reason.intervals_us[choice]
            yield (
                f"    {choice:<16} {_microseconds(time_us):>10}  "
                f"[{_microseconds(low_us)}, {_microseconds(high_us)}]"
            )
        yield f"    decided by {reason.source}"


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."
