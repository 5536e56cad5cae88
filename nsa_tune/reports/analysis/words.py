"""Titles of questions and batches, for headings: `prefill_path` is "Prefill: MHA or MLA"."""

from __future__ import annotations

from nsa_tune.backend.types.batch import Batch, Mode
from nsa_tune.backend.types.counted import counted
from nsa_tune.reports.analysis.slices import lengths_of

_MODES = {
    Mode.EXTEND: "Prefill",
    Mode.DECODE: "Decode",
    Mode.TARGET_VERIFY: "Verification",
    Mode.DRAFT_EXTEND: "Draft extension",
}
_QUESTIONS = {
    "prefill_path": ("Prefill", "MHA or MLA"),
    "mha_kernel": ("Prefill", "MHA kernel"),
    "sparse_prefill": ("Prefill", "MLA kernel"),
    "absorbed_prefill": ("Prefill", "MLA kernel"),
    "decode": ("Decode", "attention kernel"),
    "indexer_prefill": ("Prefill", "indexer logits kernel"),
    "indexer_topk": ("Prefill", "top-k kernel"),
    "indexer_layout": ("Verification", "layout of the indexer's queries"),
    "indexer_metadata": ("", "indexer schedule kernel"),
    "v4_prefill_c4": ("Prefill", "attention kernel, compression ratio 4"),
    "v4_prefill_c128": ("Prefill", "attention kernel, compression ratio 128"),
}
"""Name of a question to the phase in which it arises most, and what is chosen."""


def question_title(question: str, mode: Mode | None = None) -> str:
    """The title of a question, in `mode` if one is given: ``Prefill: MHA or MLA``."""
    phase, choice = _QUESTIONS.get(question, ("", question.replace("_", " ")))
    phase = phase if mode is None else _MODES[mode]
    return f"{phase}: {choice}" if phase else choice[:1].upper() + choice[1:]


def batch_title(batch: Batch) -> str:
    """A batch of equal sequences in words: ``8192 new tokens behind 24576``; others as text."""
    lengths = lengths_of(batch)
    if lengths is None:
        return str(batch)
    count = counted(lengths["sequences"], "sequence")
    if batch.mode is Mode.EXTEND:
        behind = f" behind {lengths['prefix']}" if lengths["prefix"] else ""
        each = "" if lengths["sequences"] == 1 else f"{count}, each "
        return f"{each}{counted(lengths['new'], 'new token')}{behind}"
    step = "decode" if batch.mode is Mode.DECODE else f"{_MODES[batch.mode].lower()}"
    return f"{step} of {count} with {lengths['context']} tokens of context"
