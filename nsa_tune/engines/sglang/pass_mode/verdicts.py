"""Which ways an engine's passes are run in: those that are right, and faster somewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.proof import Proof
from nsa_tune.engines.sglang.pass_mode.steering.choice import MARGIN, Choice
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a way is taken at all, and why."""

    on: bool
    why: str

    def __str__(self) -> str:
        return f"{'on' if self.on else 'off'} ({self.why})"


def verdicts_of(choice: Choice, times: PassTimes, proof: Proof) -> Mapping[str, Verdict]:
    """The verdict on each way besides SGLang's own that was compared or timed, and each kernel."""
    verdicts = {mode: Verdict(False, why) for mode, why in proof.wrong.items()}
    kernels = proof.errors.keys() - {*PassMode} - verdicts.keys()
    verdicts |= {kernel: Verdict(True, proof.why(kernel)) for kernel in sorted(kernels)}
    measured = {time.mode for time in times.times} | proof.errors.keys()
    for mode in PassMode:
        if mode in measured - verdicts.keys() - {PassMode.ENGINE}:
            gain = max(_gains(choice, times, mode), default=None)
            if mode not in proof.errors:
                verdict = Verdict(False, "no batch to compare it by has room")
            elif gain is None and mode is PassMode.TABLE_KERNEL and times.table is None:
                verdict = Verdict(False, "no table chooses kernels here")
            elif gain is None:
                # Where nothing was timed, nothing is chosen either, but for the table's kernels.
                verdict = Verdict(True, f"no pass of it was timed; {proof.why(mode)}")
            elif gain > 1 / (1 - MARGIN) or mode is PassMode.TABLE_KERNEL:
                verdict = Verdict(True, f"up to {gain:.1f} times as fast; {proof.why(mode)}")
            else:
                verdict = Verdict(False, f"nowhere more than {MARGIN:.0%} faster")
            verdicts[mode] = verdict
    return verdicts


def _gains(choice: Choice, times: PassTimes, mode: PassMode) -> Iterator[float]:
    """How many times as long SGLang's own way takes, for each pass that was measured in a way."""
    for time in times.times:
        if time.mode is mode and not time.padding:
            # Decode graphs select keys too, but do not say so.
            selects = time.selects or time.context > choice.index_topk
            engine_us = times.pass_us(PassMode.ENGINE, time.q_tokens, time.context, selects=selects)
            if engine_us is not None:
                yield engine_us / time.pass_us
