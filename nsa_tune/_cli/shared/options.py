"""Options that several commands share, one by one and in groups.

A group is a dataclass with a field for each option. `grouped` turns a parameter that is annotated
with a group into the group's options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from nsa_tune._errors import BatchError, UsageError
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import layout_of
from nsa_tune.backend.types.profiles import PROFILES, family_of, profile_of
from nsa_tune.db import reader
from nsa_tune.fleet.pull.address import address_in
from nsa_tune.reports.analysis.selection import TableFilter

__all__ = [
    "AllowLossy",
    "AsJson",
    "BatchOptions",
    "Database",
    "DatabaseToWrite",
    "DispatcherOptions",
    "Engine",
    "Format",
    "Heads",
    "KvDtype",
    "Model",
    "TableOptions",
    "Theme",
    "grouped",
    "heads_of",
    "listed",
    "model_of",
    "share_of",
]


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
    PNG = "png"


class Theme(StrEnum):
    """Page colours that a picture can be drawn for."""

    LIGHT = "light"
    DARK = "dark"


AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document with a versioned schema.")
]


def _local(place: Path | None) -> Path | None:
    return None if place is None else reader.local(place)


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
    str | None, typer.Option("--gpu", help='GPU as its driver names it: "NVIDIA H100 80GB HBM3".')
]
Model = Annotated[
    str | None, typer.Option("--model", help=f"Model profile: {', '.join(PROFILES)}.")
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
        help="Arms, comma-separated, that may be taken though they round more than others: "
        "flashmla_sparse_q8 (computes in fp8).",
    ),
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of its groups in their place, as Typer reads them."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if not is_dataclass(hints[name]):
            parameters.append(
                parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name])
            )
            continue
        groups[name] = hints[name]
        within = get_type_hints(hints[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, parameter.KEYWORD_ONLY, default=field.default,
                annotation=within[field.name],
            )
            for field in fields(hints[name])
        ]  # fmt: skip

    @wraps(command)
    def with_groups(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    with_groups.__annotations__ = {one.name: one.annotation for one in parameters}
    with_groups.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_groups


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Options that choose tables by their key."""

    gpu: Gpu = None
    model: Model = None
    heads: Heads = None
    kv_dtype: Annotated[
        KvDtype | None, typer.Option("--kv-dtype", help="Format of the KV pool.")
    ] = None

    @property
    def filter(self) -> TableFilter:
        """The filter that these options describe."""
        layout = (
            None if self.kv_dtype is None else str(layout_of(self.kv_dtype, family_of(self.model)))
        )
        return TableFilter(self.gpu, self.model, self.heads, layout)


@dataclass(frozen=True, slots=True)
class DispatcherOptions:
    """Options that choose the table of a dispatcher; what is not given is this machine's."""

    gpu: Gpu = None
    model: Model = None
    heads: Heads = None
    kv_dtype: Annotated[KvDtype, typer.Option("--kv-dtype", help="Format of the KV pool.")] = (
        KvDtype.FP8
    )
    database: Database = None
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            min=1,
            help="Layers that share what is computed once a pass. Default: the whole model's.",
        ),
    ] = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit with 3 unless a table of this GPU, driver and libraries answers."
        ),
    ] = False
    allow_lossy: AllowLossy = ""

    def open(self, *, heads: int | None = None) -> Dispatcher:
        """The dispatcher, or the one for other local `heads`.

        Raises:
            UsageError: as `Dispatcher.open`.
            NoTunedData: as `Dispatcher.open`, with `--strict`.
        """
        gpu = self.gpu or detect.local_device_name()
        model = model_of(self.model, gpu)
        return Dispatcher.open(
            self.database,
            gpu,
            model=model,
            heads=heads_of(self.heads, model) if heads is None else heads,
            kv_dtype=str(self.kv_dtype),
            strict=self.strict,
            layers=self.layers,
            allow_lossy=listed(self.allow_lossy),
        )


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """A batch, as one word or as lists of lengths."""

    batch: Annotated[
        str | None,
        typer.Argument(
            metavar="[BATCH]",
            help="extend:PREFIX+NEW,... or target_verify:nNEXT_N:CONTEXT,...; decode and "
            "draft_extend like target_verify; xCOUNT behind a sequence repeats it.",
            show_default=False,
        ),
    ] = None
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", help="Prefix lengths of an extend, comma-separated: 0,512."),
    ] = None
    extend: Annotated[
        str | None,
        typer.Option("--extend", help="New tokens of each sequence, comma-separated: 300,64."),
    ] = None
    captured: Annotated[
        bool, typer.Option("--captured", help="The pass is captured in a CUDA graph.")
    ] = False

    def described(self) -> Batch:
        """The batch.

        Raises:
            BatchError: when the options describe none, or two.
        """
        if (self.batch is None) == (self.extend is None):
            raise BatchError(
                "give one batch: as a word like extend:1920+128, or with --extend (and --prefix)"
            )
        if self.batch is not None:
            if self.prefix is not None:
                raise BatchError("--prefix goes with --extend, not with a batch given as a word")
            return replace(Batch.parse(self.batch), captured=self.captured)
        news = _lengths(self.extend or "")
        prefixes = [0] * len(news) if self.prefix is None else _lengths(self.prefix)
        return Batch.extend(prefixes, news, captured=self.captured)


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BatchError(f"{text!r} is not a list of lengths like 0,512") from None


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
