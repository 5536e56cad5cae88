"""Groups of options that several commands share.

A group is a dataclass with a field for each option. `grouped` turns a parameter that is annotated
with a group into the group's options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from nsa_tune._cli.shared.gpus import full_name, gpu_and_model
from nsa_tune._cli.shared.options import (
    AllowLossy,
    Database,
    Gpu,
    Heads,
    KvDtype,
    KvFormat,
    Model,
    heads_of,
    listed,
)
from nsa_tune.backend.dispatch.dispatcher import Dispatcher
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import layout_of
from nsa_tune.backend.types.profiles import family_of
from nsa_tune.db import reader
from nsa_tune.reports.analysis.selection import TableFilter


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

    with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
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

    def filter(self, *databases: Path | None) -> TableFilter:
        """The filter that these options describe, where `databases` are read.

        Raises:
            UsageError: when --gpu is a part of several names.
            NoTunedData: when it is a part of none.
        """
        layout = (
            None if self.kv_dtype is None else str(layout_of(self.kv_dtype, family_of(self.model)))
        )
        gpu = None if self.gpu is None else full_name(self.gpu, *databases)
        return TableFilter(gpu, self.model, self.heads, layout)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options that say which model's attention layer is measured."""

    model: Model = None
    heads: Heads = None
    kv_dtype: KvFormat = KvDtype.FP8


@dataclass(frozen=True, slots=True)
class DispatcherOptions:
    """Options that choose the table of a dispatcher; what is not given is this machine's."""

    gpu: Gpu = None
    model: Model = None
    heads: Heads = None
    kv_dtype: KvFormat = KvDtype.FP8
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

    def open(self) -> Dispatcher:
        """The dispatcher.

        Raises:
            UsageError: as `Dispatcher.open`.
            NoTunedData: as `Dispatcher.open`, with `--strict`.
            StoreError: when the database of `--db` cannot be read. An engine goes on without it,
                but who names a file on the command line means that file.
        """
        if self.database is not None:
            reader.keys_in(self.database)
        gpu, model = gpu_and_model(self.gpu, self.model, self.heads, self.database)
        return Dispatcher.open(
            self.database,
            gpu,
            model=model,
            heads=heads_of(self.heads, model),
            kv_dtype=str(self.kv_dtype),
            strict=self.strict,
            layers=self.layers,
            allow_lossy=listed(self.allow_lossy),
        )


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """A batch, as one word."""

    batch: Annotated[
        str,
        typer.Argument(
            metavar="BATCH",
            help="extend:PREFIX+NEW,..., decode:n1:CONTEXT,... or "
            "target_verify:nNEXT_N:CONTEXT,... (draft_extend likewise); NEXT_N: new tokens of each "
            "sequence; xCOUNT behind a sequence repeats it.",
            show_default=False,
        ),
    ] = ""
    captured: Annotated[
        bool, typer.Option("--captured", help="The pass is captured in a CUDA graph.")
    ] = False

    def described(self) -> Batch:
        """The batch.

        Raises:
            BatchError: when the word is none.
        """
        return replace(Batch.parse(self.batch), captured=self.captured)
