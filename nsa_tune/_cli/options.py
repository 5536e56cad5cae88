"""The options that several commands share, and what their values mean."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._errors import BatchError, UsageError
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.profiles import PROFILES, profile_of

__all__ = [
    "AsJson",
    "BatchWord",
    "Captured",
    "Database",
    "Engine",
    "Extend",
    "Format",
    "Gpu",
    "Heads",
    "KvDtype",
    "KvDtypeOption",
    "Model",
    "Prefix",
    "Strict",
    "Theme",
    "batch_of",
    "heads_of",
    "model_of",
    "share_of",
]


class KvDtype(StrEnum):
    """The KV formats that have a pool layout."""

    BF16 = "bf16"
    FP8 = "fp8"


class Engine(StrEnum):
    """Inference engines that the plug-ins and the advice know."""

    SGLANG = "sglang"


class Format(StrEnum):
    """What a report can be written as."""

    TERMINAL = "terminal"
    MD = "md"
    CSV = "csv"
    JSON = "json"
    HTML = "html"
    SVG = "svg"
    PNG = "png"


class Theme(StrEnum):
    """What a picture is made to stand on."""

    LIGHT = "light"
    DARK = "dark"


AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document with a versioned schema.")
]
Database = Annotated[
    Path | None,
    typer.Option(
        "--db",
        help="Database, instead of NSA_TUNE_DB or the one in the user's data directory.",
        dir_okay=False,
    ),
]
Gpu = Annotated[
    str | None, typer.Option("--gpu", help='GPU as its driver names it: "NVIDIA H100 80GB HBM3".')
]
Model = Annotated[
    str | None, typer.Option("--model", help=f"Model profile: {', '.join(PROFILES)}.")
]
Heads = Annotated[
    int | None,
    typer.Option("--heads", help="Local heads: the model's over the tensor-parallel size."),
]
KvDtypeOption = Annotated[KvDtype | None, typer.Option("--kv-dtype", help="Format of the KV pool.")]
BatchWord = Annotated[
    str | None,
    typer.Argument(
        metavar="[BATCH]",
        help="extend:PREFIX+NEW[xCOUNT],... or target_verify:nNEXT_N:CONTEXT[xCOUNT],...; "
        "decode and draft_extend are written like target_verify.",
        show_default=False,
    ),
]
Prefix = Annotated[
    str | None,
    typer.Option("--prefix", help="Prefix lengths of an extend, comma-separated: 0,512."),
]
Extend = Annotated[
    str | None,
    typer.Option("--extend", help="New tokens of each sequence, comma-separated: 300,64."),
]
Captured = Annotated[bool, typer.Option("--captured", help="The pass is captured in a CUDA graph.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Exit with 3 unless a table of this GPU, driver and libraries answers."
    ),
]


def batch_of(word: str | None, prefix: str | None, extend: str | None, captured: bool) -> Batch:
    """The batch that a command line describes: by one word, or by lists of lengths.

    Raises:
        BatchError: when it describes none, or two.
    """
    if (word is None) == (extend is None):
        raise BatchError(
            "give one batch: as a word like extend:1920+128, or with --extend (and --prefix)"
        )
    if word is not None:
        if prefix is not None:
            raise BatchError("--prefix goes with --extend, not with a batch given as a word")
        return replace(Batch.parse(word), captured=captured)
    news = _lengths(extend or "")
    prefixes = [0] * len(news) if prefix is None else _lengths(prefix)
    return Batch.extend(prefixes, news, captured=captured)


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BatchError(f"{text!r} is no list of lengths like 0,512") from None


def model_of(model: str | None, gpu: str) -> str:
    """The model to ask about: the one given, else V3.2 on a GPU and the tiny one on a CPU."""
    return model or ("tiny" if gpu.startswith("CPU") else "deepseek-v3.2")


def heads_of(heads: int | None, model: str) -> int:
    """The local heads to ask about: those given, else all of the model's."""
    return profile_of(model).heads if heads is None else heads


def share_of(option: str, text: str) -> float:
    """The share that `text` is: 0.05 of ``5%``, and of ``0.05`` too.

    Raises:
        UsageError: when it is none, or 100 % and more.
    """
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{option} {text!r} is no share; write it like 5%") from None
    if not 0 <= share < 1:
        raise UsageError(f"{option} {text!r} is not between 0% and 100%")
    return share
