"""Launch commands: the flags in use, read and changed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nsa_tune._errors import UsageError
from nsa_tune.reports.traffic.attention import DECODE_FLAG, FORCE_MQA, PREFILL_FLAG
from nsa_tune.reports.traffic.memory import CHECKPOINTS

_ALIASES = {
    "sglang": {
        "tp": ("--tp", "--tp-size", "--tensor-parallel-size"),
        "dp": ("--dp", "--dp-size", "--data-parallel-size"),
        "kv": ("--kv-cache-dtype",),
        "chunk": ("--chunked-prefill-size",),
        "running": ("--max-running-requests",),
        "fraction": ("--mem-fraction-static",),
        "drafts": ("--speculative-num-draft-tokens",),
        "model": ("--model-path", "--model"),
    },
    "vllm": {
        "tp": ("--tensor-parallel-size", "-tp"),
        "dp": ("--data-parallel-size", "-dp"),
        "kv": ("--kv-cache-dtype",),
        "chunk": ("--max-num-batched-tokens",),
        "running": ("--max-num-seqs",),
        "fraction": ("--gpu-memory-utilization",),
        "drafts": (),
        "model": ("--model",),
    },
}
_KV = {"auto": None, "bf16": "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8",
       "fp8_ds_mla": "fp8"}  # fmt: skip
_KV_WORDS = {
    "sglang": {"bf16": "bfloat16", "fp8": "fp8_e4m3"},
    "vllm": {"bf16": "bfloat16", "fp8": "fp8"},
}
_NO_GRAPHS = ("--disable-prefill-cuda-graph", "--disable-cuda-graph", "--enforce-eager")
_DP_ATTENTION = "--enable-dp-attention"


@dataclass(frozen=True, slots=True)
class Launch:
    """How an engine is started."""

    engine: str
    flags: Mapping[str, str]
    """Launch arguments by name, "" for one without a value, and assignments of variables."""

    @classmethod
    def parse(cls, engine: str, text: str) -> Launch:
        """Flags as they are typed; the words of a whole command before them are left out.

        Raises:
            UsageError: when they cannot be read.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"the flags {text!r} cannot be read: {error}") from None
        flags: dict[str, str] = {}
        latest = ""
        for word in words:
            name, equals, value = word.partition("=")
            if word.startswith("-") or (equals and name.isidentifier()):
                flags[name], latest = value, "" if equals else name
            elif latest:
                flags[latest], latest = word, ""
        return cls(engine, flags)

    def value(self, what: str) -> str | None:
        """The value given for "tp", "dp", "kv", "chunk", "running", "fraction" or "drafts"."""
        return next((self.flags[n] for n in _ALIASES[self.engine][what] if n in self.flags), None)

    def number(self, what: str) -> int | None:
        """The same as a whole number above 0.

        Raises:
            UsageError: when it is none.
        """
        value = self.value(what)
        if value is None:
            return None
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(
                f"{_ALIASES[self.engine][what][0]} {value!r} is no whole number above 0"
            )
        return int(value)

    @property
    def fraction(self) -> float | None:
        """Share of a GPU's memory for weights and pool.

        Raises:
            UsageError: when it is none.
        """
        value = self.value("fraction")
        try:
            share = None if value is None else float(value)
        except ValueError:
            share = 0.0
        if share is not None and not 0 < share < 1:
            raise UsageError(
                f"{_ALIASES[self.engine]['fraction'][0]} {value!r} is not between 0 and 1"
            )
        return share

    @property
    def kv_dtype(self) -> str | None:
        """ "bf16" or "fp8"; None where the engine decides.

        Raises:
            UsageError: for another format.
        """
        value = self.value("kv")
        if value is not None and value not in _KV:
            raise UsageError(
                f"--kv-cache-dtype {value!r} is not priced; use one of {', '.join(_KV)}"
            )
        return None if value is None else _KV[value]

    @property
    def graphs(self) -> bool:
        """Whether prefills may run as CUDA graphs."""
        return not any(name in self.flags for name in _NO_GRAPHS)

    @property
    def dp_attention(self) -> int:
        """Ranks of data-parallel attention; 1: heads are split."""
        if self.engine == "sglang" and _DP_ATTENTION not in self.flags:
            return 1
        return self.number("dp") or 1

    @property
    def answers(self) -> dict[str, str]:
        """What the flags for kernels answer, by question."""
        named = {PREFILL_FLAG: "sparse_prefill", DECODE_FLAG: "decode"}
        found = {
            question: self.flags[flag] for flag, question in named.items() if flag in self.flags
        }
        if self.flags.get(FORCE_MQA, "false").lower() == "true":
            found["prefill_path"] = "mla"
        return found

    def changed(self, changes: Mapping[str, str]) -> Launch:
        """With other flags."""
        return Launch(self.engine, {**self.flags, **changes})

    def without(self, what: str) -> Launch:
        """Without the flags of that meaning."""
        names = _ALIASES[self.engine][what]
        return Launch(self.engine, {n: v for n, v in self.flags.items() if n not in names})

    def command(self, model: str) -> str:
        """The whole command, its variables first."""
        path = self.value("model") or (CHECKPOINTS[model].path if model in CHECKPOINTS else "MODEL")
        start = ["vllm", "serve", path] if self.engine == "vllm" else [
            "python", "-m", "sglang.launch_server", "--model-path", path]  # fmt: skip
        variables = [
            f"{n}={shlex.quote(v)}" for n, v in self.flags.items() if not n.startswith("-")
        ]
        words = [
            word
            for name, value in self.flags.items()
            if name.startswith("-") and name not in _ALIASES[self.engine]["model"]
            for word in ([name, value] if value else [name])
        ]
        return " ".join([*variables, shlex.join([*start, *words])])


def kv_flag(engine: str, kv_dtype: str) -> dict[str, str]:
    """The flag for a KV format."""
    return {"--kv-cache-dtype": _KV_WORDS[engine][kv_dtype]}


def flag_of(setup: str) -> dict[str, str]:
    """The flag that a setup of `AttentionPrices` names."""
    name, _, value = setup.partition(" ")
    return {name: value}


def differences(before: Launch, after: Launch) -> Iterator[str]:
    """Lines of a diff between two launches."""
    for name in dict.fromkeys([*before.flags, *after.flags]):
        old, new = before.flags.get(name), after.flags.get(name)
        if old != new:
            if old is not None:
                yield f"- {_word(name, old)}"
            if new is not None:
                yield f"+ {_word(name, new)}"


def _word(name: str, value: str) -> str:
    if not name.startswith("-"):
        return f"{name}={value}"
    return f"{name} {value}" if value else name
