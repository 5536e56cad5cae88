"""Single options that several commands share, and how the text of an option is read."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._errors import UsageError
from nsa_tune.backend.types.profiles import PROFILES, REUSING, profile_of
from nsa_tune.db import places
from nsa_tune.remote.address import address_in


class KvDtype(StrEnum):
    """Formats of the KV pool."""

    BF16 = "bf16"
    FP8 = "fp8"


class Engine(StrEnum):
    """Inference engines with a plug-in."""

    SGLANG = "sglang"
    VLLM = "vllm"


class Format(StrEnum):
    """Output formats of a report."""

    TERMINAL = "terminal"
    MD = "md"
    CSV = "csv"
    JSON = "json"
    HTML = "html"
    SVG = "svg"


AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document with a versioned schema.")
]


def _local(place: Path | None) -> Path | None:
    return None if place is None else places.local(place)


def _no_address(place: Path | None) -> Path | None:
    address = None if place is None else address_in(place)
    if address is not None:
        raise UsageError(f"--db is {address.shown}, which is only read; give a file to write")
    return place


Database = Annotated[
    Path | None,
    typer.Option(
        "--db",
        help="Database: a file, or an address. Default: NSA_TUNE_DB, or the one in the user's "
        "data directory.",
        dir_okay=False,
        callback=_local,
    ),
]
DatabaseToWrite = Annotated[
    Path | None,
    typer.Option(
        "--db",
        help="Database file. Default: NSA_TUNE_DB, or the one in the user's data directory.",
        dir_okay=False,
        callback=_no_address,
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help='GPU: its name, "NVIDIA H100 80GB HBM3", or a part of it, H100.'),
]


def known_model(text: str | None) -> str | None:
    """The known model that a name or a path spells: "deepseek-ai/DeepSeek-V3.2"; else the same."""
    whole = r"(?<![a-z0-9]){}(?![a-z0-9.])"
    found = [
        name
        for name in (*PROFILES, *REUSING)
        if re.search(whole.format(re.escape(name)), (text or "").lower())
    ]
    return max(found, key=len, default=text)


Model = Annotated[
    str | None,
    typer.Option("--model", callback=known_model, help=f"Model profile: {', '.join(PROFILES)}."),
]
Heads = Annotated[
    int | None,
    typer.Option(
        "--heads", help="Local heads: the model's heads divided by the tensor-parallel size."
    ),
]

AllowLossy = Annotated[
    str,
    typer.Option(
        "--allow-lossy",
        help="Also use these lossy arms (less precise than the others), comma-separated: "
        "flashmla_sparse_q8 (computes in fp8).",
    ),
]
KvFormat = Annotated[KvDtype, typer.Option("--kv-dtype", help="Format of the KV pool.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def names_of(option: str, text: str) -> tuple[str, ...]:
    """The comma-separated names in `text`; none for "all".

    Raises:
        UsageError: when a name is empty.
    """
    if text == "all":
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(f"{option} {text!r} lacks a name; write names separated by commas")
    return names


def listed(text: str) -> tuple[str, ...]:
    """The comma-separated names in `text`, none for ""."""
    return tuple(name.strip() for name in text.split(",")) if text.strip() else ()


def model_of(model: str | None, gpu: str) -> str:
    """`model`, or the default: deepseek-v3.2 on a GPU, tiny on a CPU."""
    return model or ("tiny" if gpu.startswith("CPU") else "deepseek-v3.2")


def heads_of(heads: int | None, model: str) -> int:
    """`heads`, or by default all heads of `model`."""
    return profile_of(model).heads if heads is None else heads


def share_of(option: str, text: str) -> float:
    """The number that `text` stands for: 0.05 for both ``5%`` and ``0.05``.

    Raises:
        UsageError: when it is not a number, or not from 0 % to below 100 %.
    """
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a percentage; write it like 5%") from None
    if not 0 <= share < 1:
        raise UsageError(f"{option} {text!r} is not between 0% and 100%")
    return share


def duration(option: str, text: str | None) -> float | None:
    """Seconds of a text like 2s or 30ms.

    Raises:
        UsageError: when it is none.
    """
    if text is None:
        return None
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text.strip())
    if parts is None or not float(parts[1]):
        raise UsageError(f"{option} {text!r} is no time; write it like 2s or 30ms")
    return float(parts[1]) * (1e-3 if parts[2] == "ms" else 1.0)
