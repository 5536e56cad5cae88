"""A goal: the cheapest deployment that holds times to first token and of a token on a trace."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import ceil
from typing import Any

from nsa_tune._errors import NoTunedData, UsageError
from nsa_tune.reports.traffic.advice import MOST_ENGINES, measured_runs, notes_on
from nsa_tune.reports.traffic.attention import PLUGIN
from nsa_tune.reports.traffic.deployment import Deployment, Traffic
from nsa_tune.reports.traffic.launch import flags_of
from nsa_tune.reports.traffic.served import Served, Setups

CHUNKS = (2048, 4096, 8192)
"""Chunk sizes that are tried besides the given one: those whose passes run as graphs."""
_SAMPLED, _SHORTLISTED = 0.2, 2
"""Part of a trace that all candidates serve, and how many of them serve all of it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Times that must not be exceeded, in seconds; None: any."""

    ttft_p90_s: float | None
    """Of nine in ten requests, to the first token."""
    tpot_s: float | None
    """Of an output token after the first, on average over the requests."""
    factor: float = 1.0
    """How many times their price passes take."""

    def excess(self, served: Served) -> float:
        """How many times its limit the worse of both takes; 1 or less holds the goal."""
        pairs = ((served.ttft_s["p90"], self.ttft_p90_s), (served.tpot_s["mean"], self.tpot_s))
        return max(taken / limit for taken, limit in pairs if limit is not None)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One deployment, so many times."""

    command: str
    plugin: bool
    engines: int
    gpus: int
    served: Served
    excess: float


@dataclass(frozen=True, slots=True)
class GoalAnswer:
    """What was found."""

    goal: Goal
    traffic: str
    candidates: tuple[Candidate, ...]
    """The cheapest without the plug-in and with it, or the nearest; the cheaper one first."""
    sure: Candidate | None
    """The first where passes take longer by the model's error; None where it holds no goal."""
    source: str
    error: float
    gpus: int
    """The most that an answer may take; 0: any number."""
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        return {"schema": "nsa-tune/goal/1", **asdict(self)}


def cheapest(
    deployments: Sequence[Deployment], traffic: Traffic, goal: Goal, gpus: int = 0
) -> GoalAnswer:
    """The cheapest of `deployments`, with each chunk size and its best flags, that holds `goal`
    on `gpus`, if not 0. NoTunedData without whole passes of one whole model, beside which DP
    attention may be of a few layers; UsageError when none fits, or without a trace."""
    if traffic.trace is None:
        raise UsageError("a goal needs the requests of --trace")
    runs = f"intervals of times to first token: {measured_runs(deployments[0])}"
    notes = [*notes_on(deployments[0], traffic), runs]
    fitting = [deployment for deployment in deployments if deployment.fits]
    if not fitting:
        raise UsageError("none of these deployments fits into memory; use a larger --tp in --flags")
    whole = [deployment for deployment in fitting if deployment.exact]
    if not whole:
        raise NoTunedData(f"a goal needs prices of whole passes of the whole model: {notes[0]}")
    ranks = [one for one in fitting if one.model is not None and not one.exact and one.dp > 1]
    few = replace(traffic, requests=ceil(_SAMPLED * len(whole[0].requests(traffic))))
    plain = _Search(_with_chunks(whole, few), few, traffic, goal)
    searches = [plain, replace(plain, plugin=True)]
    if ranks:
        searches.append(replace(plain, options=_with_chunks(ranks, few)))
        notes.append(f"DP attention: {measured_runs(ranks[0])}; the plug-in leaves it alone")
    found = [(search.found(gpus), search) for search in searches]
    found.sort(key=lambda pair: (max(pair[0].excess, 1), pair[0].gpus))
    best, search = found[0]
    error, sure = search.options[0].error, None
    if best.excess <= 1:
        slower = replace(goal, factor=1 + error)
        sure = replace(search, goal=slower).found(gpus, fewest=best.engines)
    candidates, source = tuple(candidate for candidate, _ in found), whole[0].source
    return GoalAnswer(goal, traffic.name, candidates, sure, source, error, gpus, tuple(notes))


def _with_chunks(deployments: Sequence[Deployment], few: Traffic) -> list[Deployment]:
    """Each with every chunk size, which share prices, and the flags that are best by those."""
    found = list[Deployment]()
    for one in deployments:
        one.count(few)
        found += (one, *(one.with_chunk(chunk) for chunk in CHUNKS if chunk != one.chunk))
    return found


@dataclass(frozen=True, slots=True)
class _Search:
    """Looks for the fewest engines among deployments of as many GPUs."""

    options: Sequence[Deployment]
    few: Traffic
    """The first part of the trace, which all options serve."""
    traffic: Traffic
    goal: Goal
    plugin: bool = False

    def found(self, gpus: int, *, fewest: int = 1) -> Candidate:
        """The candidate with the fewest engines that holds the goal, else the nearest."""
        best = cache(self._best)
        most = max(gpus // self.options[0].tp, 1) if gpus else MOST_ENGINES
        counts = range(fewest, most + 1)
        at = bisect_left(counts, True, key=lambda engines: best(engines).excess <= 1)
        if at < len(counts):
            return best(counts[at])
        tried = [best(engines) for engines in sorted({1, 2, 4, 8, 16, 32, most}) if engines <= most]
        least = min(candidate.excess for candidate in tried)
        # More engines that come hardly nearer are not worth it.
        return next(candidate for candidate in tried if candidate.excess <= 1.05 * least)

    def _best(self, engines: int) -> Candidate:
        """Of all options with so many engines that farthest within the goal, or nearest."""
        few = [self._candidate(option, self.few, engines).excess for option in self.options]
        order = sorted(range(len(few)), key=few.__getitem__)[:_SHORTLISTED]
        every = [self._candidate(self.options[i], self.traffic, engines) for i in order]
        return min(every, key=lambda candidate: candidate.excess)

    def _candidate(self, option: Deployment, traffic: Traffic, engines: int) -> Candidate:
        setups = Setups(PLUGIN, PLUGIN) if self.plugin else option.best_setups()
        requests = option.requests(replace(traffic, engines=engines))
        served = option.serve(requests, setups, self.goal.factor, keep=True)
        command = option.launch.changed(flags_of(*setups)).command(option.served)
        gpus, excess = engines * option.tp, self.goal.excess(served)
        return Candidate(command, self.plugin, engines, gpus, served, excess)


def goal_lines(answer: GoalAnswer) -> Iterator[str]:
    """The answer as text; its first line says what holds the goal."""
    first, *others = answer.candidates
    yield from (goal_headline(answer), "", f"    {first.command}", "")
    for candidate in others:
        beyond = " (beyond the goal)" * (candidate.excess > 1)
        text = f"{_how(candidate)}: {_times(candidate)}{beyond}"
        yield from (text, f"    {candidate.command}", "")
    yield f"Priced by: {answer.source}; one in four measured times is over {answer.error:.0%} off"
    yield "Not sure, or not counted:"
    yield "- engines take requests in turn: a router that follows prefixes does better"
    yield "- tried: chunks of 2048, 4096 and 8192; both KV formats where none is given"
    ranks = "" if len(answer.candidates) > 2 else "DP attention (only with --gpus), "
    yield f"- not tried, as not measured as a whole: {ranks}another --tp, roles, drafts"
    yield from (f"- {note}" for note in answer.notes)


def goal_headline(answer: GoalAnswer) -> str:
    """What holds the goal, in a sentence."""
    first, sure, trace = answer.candidates[0], answer.sure, answer.traffic
    trace += f" with {answer.gpus} GPUs" if answer.gpus else ""
    if sure is None:
        return (
            f"Nothing that is priced holds it on {trace}. The nearest takes "
            f"{first.excess:.2f} times the limit: {_how(first)}, {_times(first)}."
        )
    text = f"{_how(first)} hold{'s' * (first.engines == 1)} it on {trace}: {_times(first)}."
    slower = f"if all passes take {answer.error:.0%} longer than priced (one in four measured did)"
    if sure.excess > 1:
        return f"{text} That is not sure: {slower}, nothing that is priced holds it."
    if (sure.engines, sure.command) == (first.engines, first.command):
        return f"{text} That holds, too, {slower}."
    command = "." if sure.command == first.command else f": {sure.command}"
    return f"{text} To be sure, start {_how(sure)}, which hold it even {slower}{command}"


def _how(candidate: Candidate) -> str:
    engines = f"{candidate.engines} engines" if candidate.engines > 1 else "One engine"
    with_plugin = " with the plug-in" if candidate.plugin else ""
    ranks = " with DP attention" * ("--enable-dp-attention" in candidate.command)
    return f"{engines}{with_plugin}{ranks} ({candidate.gpus} GPUs)"


def _times(candidate: Candidate) -> str:
    ttft, tpot = candidate.served.ttft_s["p90"], candidate.served.tpot_s["mean"]
    tokens = candidate.engines * candidate.served.output_tokens_per_s
    text = f"time to first token p90 {ttft:.3g} s, {tpot * 1e3:.3g} ms a token"
    return f"{text}, {tokens:.0f} output tokens/s"
