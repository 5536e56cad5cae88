"""Batch: what one forward pass holds, and the sums that its decisions depend on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import index, mul

from nsa_tune._errors import BatchError

__all__ = ["MAX_TOKENS", "Batch", "Mode"]

MAX_TOKENS = 2**31 - 1
"""Kernels index tokens with int32: no length or sum may pass this."""


class Mode(StrEnum):
    """Which kind of forward pass a batch is; the words are SGLang's."""

    EXTEND = "extend"
    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. Make it with `extend`, `decode`, `verify`, `draft_extend` or `from_totals`.

    All numbers are tokens, summed over the sequences unless their name says otherwise.
    """

    mode: Mode
    sequences: int
    q_tokens: int
    """New tokens: the rows that attention computes."""
    kv_tokens: int
    """Tokens attended to, the new ones among them."""
    max_kv: int
    """The longest sequence's kv tokens."""
    pairs: int
    """(query, key) pairs that dense causal attention computes."""
    next_n: int = 1
    """New tokens a sequence, where it is the same for all (1 in extend)."""
    captured: bool = False
    """True while a CUDA graph captures or replays the pass."""
    lens: tuple[tuple[int, int], ...] | None = None
    """(prefix, new) of each sequence; None when only the sums are known."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens that were in the KV pool before this pass."""
        return self.kv_tokens - self.q_tokens

    @classmethod
    def extend(
        cls, prefix_lens: Sequence[int], extend_lens: Sequence[int], *, captured: bool = False
    ) -> Batch:
        """A prefill: sequence i has `prefix_lens[i]` cached and `extend_lens[i]` new tokens.

        Raises:
            BatchError: on no sequence, unequal counts, a negative prefix, or no new token.
        """
        return cls._of_lens(Mode.EXTEND, prefix_lens, extend_lens, 1, captured)

    @classmethod
    def decode(cls, context_lens: Sequence[int], *, captured: bool = False) -> Batch:
        """One new token a sequence; `context_lens` counts it.

        Raises:
            BatchError: on no sequence or a context below 1.
        """
        return cls._of_contexts(Mode.DECODE, context_lens, 1, captured)

    @classmethod
    def verify(cls, context_lens: Sequence[int], next_n: int, *, captured: bool = False) -> Batch:
        """A target verification of `next_n` tokens a sequence; `context_lens` counts them.

        Raises:
            BatchError: on no sequence, next_n below 1, or a context shorter than next_n.
        """
        return cls._of_contexts(Mode.TARGET_VERIFY, context_lens, next_n, captured)

    @classmethod
    def draft_extend(
        cls, context_lens: Sequence[int], next_n: int, *, captured: bool = False
    ) -> Batch:
        """A draft model's extend by `next_n` tokens a sequence; `context_lens` counts them.

        Raises:
            BatchError: as `verify`.
        """
        return cls._of_contexts(Mode.DRAFT_EXTEND, context_lens, next_n, captured)

    @classmethod
    def from_totals(
        cls,
        *,
        mode: str,
        q_tokens: int,
        kv_tokens: int,
        max_kv: int,
        sequences: int = 1,
        pairs: int | None = None,
        next_n: int | None = None,
        captured: bool = False,
    ) -> Batch:
        """A batch from sums that the engine has already.

        Without `pairs` the sequences are taken as equally long. `next_n` is q_tokens over
        sequences, except in an extend, where it is 1.

        Raises:
            BatchError: when the sums are no whole numbers, or contradict each other.
        """
        if mode not in _MODES:
            raise BatchError(f"unknown mode {mode!r}; use one of: {', '.join(_MODES)}")
        try:
            # An int32 of numpy would wrap around in the products of the guards.
            q_tokens, kv_tokens = index(q_tokens), index(kv_tokens)
            max_kv, sequences = index(max_kv), index(sequences)
            pairs = None if pairs is None else index(pairs)
            next_n = None if next_n is None else index(next_n)
        except TypeError as error:
            raise BatchError(f"sums must be whole numbers: {error}") from None
        if not 0 < sequences <= q_tokens <= kv_tokens <= MAX_TOKENS:
            raise BatchError(
                "a batch needs 1 <= sequences <= q_tokens <= kv_tokens < 2**31, "
                f"got {sequences}, {q_tokens} and {kv_tokens}"
            )
        each = 1 if mode == Mode.EXTEND else q_tokens // sequences
        if next_n not in (None, each) or (mode != Mode.EXTEND and q_tokens != sequences * each):
            raise BatchError(
                f"next_n {next_n} contradicts {q_tokens} new tokens in {sequences} sequences "
                f"in mode {mode}"
            )
        if max_kv > kv_tokens - (sequences - 1) or kv_tokens > max_kv * sequences:
            raise BatchError(
                f"max_kv {max_kv} contradicts {kv_tokens} kv tokens in {sequences} sequences"
            )
        if pairs is None:
            new = q_tokens / sequences
            pairs = round(q_tokens * ((kv_tokens - q_tokens) / sequences + (new + 1) / 2))
        elif not q_tokens <= pairs <= q_tokens * max_kv:
            raise BatchError(
                f"pairs {pairs} contradicts {q_tokens} queries of at most {max_kv} keys"
            )
        return cls(
            _MODES[mode], sequences, q_tokens, kv_tokens, max_kv, pairs, each, captured, None
        )

    @classmethod
    def _of_contexts(
        cls, mode: Mode, context_lens: Iterable[int], next_n: int, captured: bool
    ) -> Batch:
        try:
            next_n, contexts = index(next_n), list(map(index, context_lens))
        except TypeError as error:
            raise BatchError(f"lengths must be whole numbers: {error}") from None
        if next_n < 1:
            raise BatchError(f"next_n must be at least 1, got {next_n}")
        if contexts and min(contexts) < next_n:
            raise BatchError(
                f"a context counts its {next_n} new tokens, so {min(contexts)} is too short"
            )
        prefixes = [context - next_n for context in contexts]
        return cls._of_lens(mode, prefixes, [next_n] * len(contexts), next_n, captured)

    @classmethod
    def _of_lens(
        cls, mode: Mode, prefix_lens: Iterable[int], new_lens: Iterable[int], next_n: int,
        captured: bool,
    ) -> Batch:  # fmt: skip
        try:
            prefixes, news = list(map(index, prefix_lens)), list(map(index, new_lens))
        except TypeError as error:
            raise BatchError(f"lengths must be whole numbers: {error}") from None
        if not prefixes or len(prefixes) != len(news):
            raise BatchError(
                "a batch needs one prefix length and one new length a sequence, "
                f"got {len(prefixes)} and {len(news)}"
            )
        if min(prefixes) < 0 or min(news) < 1:
            raise BatchError(
                "prefix lengths must be at least 0 and new lengths at least 1, "
                f"got {min(prefixes)} and {min(news)}"
            )
        q_tokens, prefix_tokens = sum(news), sum(prefixes)
        if q_tokens + prefix_tokens > MAX_TOKENS:
            raise BatchError(f"{q_tokens + prefix_tokens} kv tokens pass the int32 of the kernels")
        pairs = sum(map(mul, prefixes, news)) + (sum(map(mul, news, news)) + q_tokens) // 2
        max_kv = max(map(int.__add__, prefixes, news))
        lens = tuple(zip(prefixes, news, strict=True))
        return cls(
            mode, len(news), q_tokens, q_tokens + prefix_tokens, max_kv, pairs, next_n, captured,
            lens,
        )  # fmt: skip

    def __str__(self) -> str:
        """The batch as one word, read back by `parse`: ``extend:1920+128,0+300x4``."""
        if self.lens is None:
            return (
                f"{self.mode}:q={self.q_tokens},kv={self.kv_tokens},max={self.max_kv},"
                f"n={self.sequences}"
            )
        if self.mode is Mode.EXTEND:
            words = [f"{prefix}+{new}" for prefix, new in self.lens]
            return f"{self.mode}:{_fold(words)}"
        contexts = [str(prefix + new) for prefix, new in self.lens]
        return f"{self.mode}:n{self.next_n}:{_fold(contexts)}"

    @classmethod
    def parse(cls, text: str) -> Batch:
        """The batch that `str` wrote. One with sums only cannot be read back.

        Raises:
            BatchError: when `text` is not of that form.
        """
        match = _WORD.fullmatch(text)
        if match is None or match["mode"] not in _MODES:
            raise BatchError(
                f"{text!r} is no batch; write extend:PREFIX+NEW[xCOUNT],... or "
                "target_verify:nNEXT_N:CONTEXT[xCOUNT],..."
            )
        mode, words = _MODES[match["mode"]], _unfold(match["lens"])
        if (mode is Mode.EXTEND) != (match["next_n"] is None):
            raise BatchError(f"{text!r}: next_n goes with every mode but extend")
        if mode is Mode.EXTEND:
            if any("+" not in word for word in words):
                raise BatchError(f"{text!r}: each sequence of an extend is PREFIX+NEW")
            pairs = [word.split("+") for word in words]
            return cls.extend([int(p) for p, _ in pairs], [int(e) for _, e in pairs])
        if any("+" in word for word in words):
            raise BatchError(f"{text!r}: only an extend has PREFIX+NEW")
        return cls._of_contexts(mode, [int(word) for word in words], int(match["next_n"]), False)


_MOST_WRITTEN = 2**18
_MODES = {str(mode): mode for mode in Mode}
_WORD = re.compile(
    r"(?P<mode>[a-z_]+):(?:n(?P<next_n>\d{1,9}):)?"
    r"(?P<lens>\d{1,10}(?:\+\d{1,10})?(?:x\d{1,6})?(?:,\d{1,10}(?:\+\d{1,10})?(?:x\d{1,6})?)*)"
)


def _fold(words: list[str]) -> str:
    """Runs of equal words written once, with their count."""
    runs: list[tuple[str, int]] = []
    for word in words:
        if runs and runs[-1][0] == word:
            runs[-1] = (word, runs[-1][1] + 1)
        else:
            runs.append((word, 1))
    return ",".join(word if count == 1 else f"{word}x{count}" for word, count in runs)


def _unfold(text: str) -> list[str]:
    words: list[str] = []
    for run in text.split(","):
        word, _, count = run.partition("x")
        words.extend([word] * int(count or 1))
        if len(words) > _MOST_WRITTEN:
            raise BatchError(f"a written batch has at most {_MOST_WRITTEN} sequences")
    return words
