"""Batch: what one forward pass holds, and the sums that its decisions depend on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from operator import add, index, sub

from nsa_tune._errors import BatchError
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.lengths import MAX_TOKENS, pairs_of


class Mode(StrEnum):
    """Which kind of forward pass a batch is; the words are SGLang's."""

    EXTEND = "extend"
    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"


_MODES: dict[str, Mode] = {str(mode): mode for mode in Mode}
_EXTEND = Mode.EXTEND
_INTS = (int,) * 5


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. Make it with `extend`, `decode`, `verify`, `draft_extend` or `from_totals`.

    All numbers are tokens, summed over the sequences unless their name says otherwise.
    """

    mode: Mode
    batch_size: int
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
    kv_lens: tuple[int, ...] | None = None
    """Each sequence's kv tokens; None when only the sums are known."""
    new_lens: tuple[int, ...] | None = None
    """Each sequence's new tokens, likewise."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens that were in the KV pool before this pass."""
        return self.kv_tokens - self.q_tokens

    @property
    def lens(self) -> tuple[tuple[int, int], ...] | None:
        """(prefix, new) of each sequence; None when only the sums are known."""
        if self.kv_lens is None or self.new_lens is None:
            return None
        return tuple(zip(map(sub, self.kv_lens, self.new_lens), self.new_lens, strict=True))

    @property
    def given_lens(self) -> tuple[tuple[int, int], ...]:
        """`lens` of a batch that is measured.

        Raises:
            BatchError: when only the sums are known.
        """
        if (lens := self.lens) is None:
            raise BatchError("a batch of sums only cannot be measured; give the lengths")
        return lens

    @property
    def sums(self) -> Batch:
        """The same batch without its lengths."""
        if self.kv_lens is None:
            return self
        return Batch(
            self.mode, self.batch_size, self.q_tokens, self.kv_tokens, self.max_kv, self.pairs,
            self.next_n, self.captured, None, None,
        )  # fmt: skip

    @classmethod
    def extend(
        cls, prefix_lens: Sequence[int], extend_lens: Sequence[int], *, captured: bool = False
    ) -> Batch:
        """A prefill: sequence i has `prefix_lens[i]` cached and `extend_lens[i]` new tokens.

        Raises:
            BatchError: on no sequence, unequal counts, a negative prefix, or no new token.
        """
        prefixes, news = _checked(prefix_lens, extend_lens)
        kv_lens = tuple(map(add, prefixes, news))
        q_tokens = sum(news)
        return cls(
            Mode.EXTEND, len(news), q_tokens, sum(kv_lens), max(kv_lens),
            pairs_of(prefixes, kv_lens, q_tokens), 1, captured, kv_lens, news,
        )  # fmt: skip

    @classmethod
    def decode(cls, context_lens: Sequence[int], *, captured: bool = False) -> Batch:
        """One new token a sequence; `context_lens` counts it.

        Raises:
            BatchError: on no sequence or a context below 1.
        """
        return _of_contexts(Mode.DECODE, context_lens, 1, captured)

    @classmethod
    def verify(cls, context_lens: Sequence[int], next_n: int, *, captured: bool = False) -> Batch:
        """A target verification of `next_n` tokens a sequence; `context_lens` counts them.

        Raises:
            BatchError: on no sequence, next_n below 1, or a context shorter than next_n.
        """
        return _of_contexts(Mode.TARGET_VERIFY, context_lens, next_n, captured)

    @classmethod
    def draft_extend(
        cls, context_lens: Sequence[int], next_n: int, *, captured: bool = False
    ) -> Batch:
        """A draft model's extend by `next_n` tokens a sequence; `context_lens` counts them.

        Raises:
            BatchError: as `verify`.
        """
        return _of_contexts(Mode.DRAFT_EXTEND, context_lens, next_n, captured)

    @classmethod
    def from_totals(
        cls,
        *,
        mode: str,
        q_tokens: int,
        kv_tokens: int,
        max_kv: int,
        batch_size: int = 1,
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
        kind = mode if type(mode) is Mode else _MODES.get(mode) if isinstance(mode, str) else None
        if kind is None:
            raise BatchError(f"unknown mode {_shown(mode)}; use one of: {', '.join(_MODES)}")
        types = type(q_tokens), type(kv_tokens), type(max_kv), type(batch_size), type(pairs)
        if types != _INTS or next_n is not None:
            # An int32 of numpy would wrap around in the products of the guards.
            try:
                q_tokens, kv_tokens = index(q_tokens), index(kv_tokens)
                max_kv, batch_size = index(max_kv), index(batch_size)
                pairs = None if pairs is None else index(pairs)
                next_n = None if next_n is None else index(next_n)
            except TypeError as error:
                raise BatchError(f"sums must be whole numbers: {error}") from None
        if not 0 < batch_size <= q_tokens <= kv_tokens <= MAX_TOKENS:
            raise BatchError(
                "a batch needs 1 <= batch_size <= q_tokens <= kv_tokens < 2**31, "
                f"got {_shown(batch_size)}, {_shown(q_tokens)} and {_shown(kv_tokens)}"
            )
        each = 1 if kind is _EXTEND else q_tokens // batch_size
        uneven = kind is not _EXTEND and q_tokens != batch_size * each
        if uneven or next_n not in (None, each):
            raise BatchError(
                f"next_n {_shown(next_n)} contradicts {counted(q_tokens, 'new token')} in "
                f"{counted(batch_size, 'sequence')} in mode {mode}"
            )
        if max_kv > kv_tokens - (batch_size - 1) or kv_tokens > max_kv * batch_size:
            raise BatchError(
                f"max_kv {_shown(max_kv)} contradicts {counted(kv_tokens, 'kv token')} in "
                f"{counted(batch_size, 'sequence')}"
            )
        if pairs is None:
            new = q_tokens / batch_size
            pairs = round(q_tokens * ((kv_tokens - q_tokens) / batch_size + (new + 1) / 2))
        elif not q_tokens <= pairs <= q_tokens * max_kv:
            raise BatchError(
                f"pairs {_shown(pairs)} contradicts {q_tokens} queries of at most {max_kv} keys"
            )
        return Batch(
            kind, batch_size, q_tokens, kv_tokens, max_kv, pairs, each, captured, None, None
        )

    def __str__(self) -> str:
        """The batch as one word, read back by `parse`: ``extend:1920+128,0+300x4``."""
        if self.kv_lens is None or self.new_lens is None:
            return (
                f"{self.mode}:q={self.q_tokens},kv={self.kv_tokens},max={self.max_kv},"
                f"n={self.batch_size}"
            )
        if self.mode is Mode.EXTEND:
            pairs = zip(self.kv_lens, self.new_lens, strict=True)
            return f"{self.mode}:{_fold([f'{kv - new}+{new}' for kv, new in pairs])}"
        return f"{self.mode}:n{self.next_n}:{_fold(map(str, self.kv_lens))}"

    @classmethod
    def parse(cls, text: str) -> Batch:
        """The batch that `str` wrote. One with sums only cannot be read back.

        Raises:
            BatchError: when `text` is not of that form.
        """
        if not isinstance(text, str):
            raise BatchError(f"a batch is read from a word, not from {type(text).__name__}")
        match = _WORD.fullmatch(text)
        if match is None or match["mode"] not in _MODES:
            raise BatchError(
                f"{text!r} is no batch; write extend:PREFIX+NEW[xCOUNT],..., "
                "decode:n1:CONTEXT[xCOUNT],... or target_verify:nNEXT_N:CONTEXT[xCOUNT],..."
            )
        word, next_n, lens = match.groups()
        mode = _MODES[word]
        if (mode is _EXTEND) != (next_n is None):
            if mode is _EXTEND:
                raise BatchError(f"{text!r}: write an extend as extend:PREFIX+NEW[xCOUNT],...")
            raise BatchError(
                f"{text!r}: write it as {mode}:nNEXT_N:CONTEXT[xCOUNT],... (NEXT_N: new tokens of "
                f"each sequence), such as {mode}:n1:300,129"
            )
        return _of_runs(mode, int(next_n or 1), text, lens)


# --- making batches


def _checked(
    prefix_lens: Iterable[int], new_lens: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lengths as plain integers.

    Raises:
        BatchError: when they cannot be.
    """
    try:
        prefixes, news = tuple(prefix_lens), tuple(new_lens)
    except TypeError as error:
        raise _no_lengths(error) from None
    try:
        prefixes, news = tuple(map(index, prefixes)), tuple(map(index, news))
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
            f"got {_shown(min(prefixes))} and {_shown(min(news))}"
        )
    if sum(prefixes) + sum(news) > MAX_TOKENS:
        tokens = _shown(sum(prefixes) + sum(news))
        raise BatchError(f"{tokens} kv tokens pass the int32 of the kernels")
    return prefixes, news


def _of_contexts(mode: Mode, context_lens: Iterable[int], next_n: int, captured: bool) -> Batch:
    try:
        contexts = tuple(context_lens)
    except TypeError as error:
        raise _no_lengths(error) from None
    count = len(contexts)
    try:
        next_n = index(next_n)
        if type(sum(contexts)) is not int:
            contexts = tuple(map(index, contexts))
    # Python overflows where a sum has a float in it and a number that no float holds.
    except (TypeError, OverflowError) as error:
        raise BatchError(f"lengths must be whole numbers: {error}") from None
    kv_tokens = sum(contexts)
    if next_n < 1:
        raise BatchError(f"next_n must be at least 1, got {_shown(next_n)}")
    if contexts and min(contexts) < next_n:
        raise BatchError(
            f"a context counts its {_shown(next_n)} new tokens, so {_shown(min(contexts))} is too "
            "short"
        )
    if not contexts or kv_tokens > MAX_TOKENS:
        _checked([context - next_n for context in contexts], [next_n] * count)
    pairs = next_n * kv_tokens - count * (next_n * (next_n - 1) // 2)
    return Batch(
        mode, count, count * next_n, kv_tokens, max(contexts), pairs, next_n, captured, contexts,
        (next_n,) * count,
    )  # fmt: skip


def _no_lengths(error: TypeError) -> BatchError:
    return BatchError(f"lengths come as a list of whole numbers, one a sequence: {error}")


def _shown(value: object) -> str:
    """`value` in a message: Python refuses to write a number of some thousand digits."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    return repr(value) if isinstance(value, str | int | None) else type(value).__name__


# --- words

_MOST_WRITTEN = 2**18

_WORD = re.compile(
    r"(?P<mode>[a-z_]+):(?:n(?P<next_n>\d{1,9}):)?"
    r"(?P<lens>\d{1,10}(?:\+\d{1,10})?(?:x\d{1,6})?(?:,\d{1,10}(?:\+\d{1,10})?(?:x\d{1,6})?)*)"
)


def _fold(words: Iterable[str]) -> str:
    """Runs of equal words written once, with their count."""
    repeated = ((word, sum(1 for _ in run)) for word, run in groupby(words))
    return ",".join(word if count == 1 else f"{word}x{count}" for word, count in repeated)


def _of_runs(mode: Mode, next_n: int, text: str, lens: str) -> Batch:
    """The batch of `text`, summed run by run: a table has thousands of equal sequences."""
    extends = mode is _EXTEND
    batch_size = q_tokens = kv_tokens = pairs = longest = 0
    kv_lens: list[int] = []
    new_lens: list[int] = []
    for run in lens.split(","):
        word, _, times = run.partition("x")
        word, plus, more = word.partition("+")
        if bool(plus) != extends:
            form = "each sequence of an extend is" if extends else "only an extend has"
            raise BatchError(f"{text!r}: {form} PREFIX+NEW")
        count = int(times) if times else 1
        new = int(more) if extends else next_n
        kv = int(word) + new if extends else int(word)
        if not (new >= 1 and kv >= new and count >= 1):
            raise BatchError(f"{text!r}: new lengths at least 1, and contexts that hold them")
        batch_size += count
        if batch_size > _MOST_WRITTEN:
            raise BatchError(f"a written batch has at most {_MOST_WRITTEN} sequences")
        q_tokens += count * new
        kv_tokens += count * kv
        pairs += count * (new * (kv - new) + new * (new + 1) // 2)
        if kv > longest:
            longest = kv
        kv_lens += [kv] * count
        new_lens += [new] * count
    if kv_tokens > MAX_TOKENS:
        raise BatchError(f"{kv_tokens} kv tokens pass the int32 of the kernels")
    return Batch(
        mode, batch_size, q_tokens, kv_tokens, longest, pairs, next_n, False, tuple(kv_lens),
        tuple(new_lens),
    )  # fmt: skip
