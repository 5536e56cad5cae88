"""Launch commands: the flags in use, read and changed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain

from nsa_tune._errors import UsageError
from nsa_tune.backend.types.profiles import CHECKPOINTS
from nsa_tune.reports.traffic.attention import DECODE_FLAG, FORCE_MQA, PREFILL_FLAG

_FLAGS = {
    "tp": ("--tp --tp-size --tensor-parallel-size", "--tensor-parallel-size -tp"),
    "dp": ("--dp --dp-size --data-parallel-size", "--data-parallel-size -dp"),
    "kv": ("--kv-cache-dtype", "--kv-cache-dtype"),
    "kernels": (f"{PREFILL_FLAG} {DECODE_FLAG}", ""),
    "chunk": ("--chunked-prefill-size", "--max-num-batched-tokens"),
    "running": ("--max-running-requests", "--max-num-seqs"),
    "fraction": ("--mem-fraction-static", "--gpu-memory-utilization"),
    "drafts": ("--speculative-num-draft-tokens", ""),
    "model": ("--model-path --model", "--model"),
}
_ALIASES = {
    engine: {what: tuple(names[i].split()) for what, names in _FLAGS.items()}
    for i, engine in enumerate(("sglang", "vllm"))
}
VALUED = frozenset(chain(*(names for each in _ALIASES.values() for names in each.values())))
"""Flags that are read, and take a value."""
_FORMATS = {
    "sglang": {"bfloat16": "bf16", "bf16": "bf16", "fp8_e4m3": "fp8"},
    "vllm": {"bfloat16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "fp8"},
}
_DP_ATTENTION = "--enable-dp-attention"
_NO_GRAPHS = ("--disable-prefill-cuda-graph", "--disable-cuda-graph", "--enforce-eager")


@dataclass(frozen=True, slots=True)
class Launch:
    """How an engine is started."""

    engine: str
    flags: Mapping[str, str]
    """Launch arguments by name, and assignments of variables: values as a shell reads them."""

    @classmethod
    def parse(cls, engine: str, text: str) -> Launch:
        """Flags as they are typed, or a whole command; UsageError when they cannot be read."""
        try:
            words = shlex.split(text.replace("\\\n", " "))
        except ValueError as error:
            raise UsageError(f"the flags {text!r} cannot be read: {error}") from None
        if "-m" in words:  # python -m sglang.launch_server
            at = words.index("-m")
            words = [w for w in words[:at] if "=" in w and w[0] != "-"] + words[at + 2 :]
        words = ["--model" if word == "serve" else word for word in words]  # vllm serve MODEL
        flags, latest = dict[str, str](), ""
        for word in words:
            name, equals, value = word.partition("=")
            if re.match(r"-\D", word) or (equals and name.isidentifier()):
                flags[name], latest = shlex.quote(value) if value else "", "" if equals else name
            elif latest:
                flags[latest] = f"{flags[latest]} {shlex.quote(word)}".lstrip()
        return cls(engine, flags)

    def name(self, what: str) -> str:
        """The flag of that meaning, as it is given or as it is usually written."""
        names = _ALIASES[self.engine][what]
        return next((alias for alias in names if alias in self.flags), names[0])

    def value(self, what: str) -> str | None:
        """The value given for "tp", "dp", "kv", "chunk", "running", "fraction" or "drafts"."""
        return next((self.flags[n] for n in _ALIASES[self.engine][what] if n in self.flags), None)

    def number(self, what: str) -> int | None:
        """The same as a whole number above 0; UsageError when it is none."""
        value = self.value(what)
        if value is not None and (not value.isdecimal() or int(value) < 1):
            raise UsageError(f"{self.name(what)} {value!r} is no whole number above 0")
        return None if value is None else int(value)

    @property
    def fraction(self) -> float | None:
        """Share of a GPU's memory for weights and pool; UsageError when it is none."""
        value = self.value("fraction")
        if value is not None and not re.fullmatch(r"0?\.\d*[1-9]\d*", value):
            raise UsageError(f"{self.name('fraction')} {value!r} is not between 0 and 1")
        return None if value is None else float(value)

    @property
    def kv_dtype(self) -> str | None:
        """ "bf16" or "fp8"; None where the engine decides; UsageError for another format."""
        value = self.value("kv")
        if value in (None, "auto"):
            return None
        formats = _FORMATS[self.engine]
        if value not in formats:
            names = ", ".join(("auto", *formats))
            raise UsageError(f"--kv-cache-dtype {value!r} is not priced; use one of {names}")
        return formats[value]

    @property
    def graphs(self) -> bool:
        """Whether prefills may run as CUDA graphs."""
        return not any(name in self.flags for name in _NO_GRAPHS)

    @property
    def dp_attention(self) -> int:
        """Ranks of data-parallel attention; 1: heads are split."""
        ranks = self.number("dp") or 1
        return 1 if self.engine == "sglang" and _DP_ATTENTION not in self.flags else ranks

    @property
    def unread(self) -> dict[str, list[str]]:
        """Flags that are not read, and of those that are the one that looks like it."""
        read = [*chain(*_ALIASES[self.engine].values()), *_NO_GRAPHS, _DP_ATTENTION, FORCE_MQA]
        unread = [name for name in self.flags if name.startswith("--") and name not in read]
        return {name: get_close_matches(name.replace("_", "-"), read, 1, 0.9) for name in unread}

    @property
    def misspelled(self) -> dict[str, str]:
        """Flags that are not read, but look like one that is, and what an answer says of them."""
        text = "{} is left out, as no such flag is known here: did you mean {}?"
        return {name: text.format(name, names[0]) for name, names in self.unread.items() if names}

    @property
    def answers(self) -> dict[str, str]:
        """What the flags for kernels answer, by question."""
        named = {PREFILL_FLAG: "sparse_prefill", DECODE_FLAG: "decode"}
        answers = {"prefill_path": "mla"} if self.flags.get(FORCE_MQA, "").lower() == "true" else {}
        return answers | {named[n]: value for n, value in self.flags.items() if n in named}

    def changed(self, changes: Mapping[str, str]) -> Launch:
        """With other flags."""
        return Launch(self.engine, {**self.flags, **changes})

    def kv_flag(self, kv_dtype: str) -> dict[str, str]:
        """The flag for a KV format."""
        fp8 = "fp8" if self.engine == "vllm" else "fp8_e4m3"
        return {"--kv-cache-dtype": "bfloat16" if kv_dtype == "bf16" else fp8}

    def without(self, *whats: str) -> Launch:
        """Without the flags of these meanings, or names."""
        names = [*chain.from_iterable(_ALIASES[self.engine].get(what, (what,)) for what in whats)]
        return Launch(self.engine, {n: v for n, v in self.flags.items() if n not in names})

    def command(self, model: str) -> str:
        """The whole command, its variables first."""
        path = self.value("model") or (CHECKPOINTS[model].path if model in CHECKPOINTS else "MODEL")
        start = ["vllm", "serve", path] if self.engine == "vllm" else [
            "python", "-m", "sglang.launch_server", "--model-path", path]  # fmt: skip
        flags = self.without("model").flags.items()
        variables = [f"{n}={v}" for n, v in flags if not n.startswith("-")]
        words = [f"{n} {v}".rstrip() for n, v in flags if n.startswith("-")]
        return " ".join([*variables, *start, *words])


def flags_of(*setups: str) -> dict[str, str]:
    """The flags that setups of `AttentionPrices` name; the default names none."""
    return {name: value for name, _, value in (one.partition(" ") for one in setups) if value}
