"""A GPU by a part of its name, as `--gpu H200` gives it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nsa_tune._cli.shared.options import model_of
from nsa_tune._errors import HeadsError, NoTunedData, StoreError, UsageError
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.db import places
from nsa_tune.db.reader import keys_in


def gpus_with_tables(*databases: Path | None) -> list[str]:
    """The GPUs that `databases`, or where None the default places, have tables of."""
    return sorted({gpu for database in databases or (None,) for gpu in _gpus_in(database)})


def _gpus_in(database: Path | None) -> Iterator[str]:
    for path in places.sources(database):
        with suppress(StoreError):
            yield from (key.gpu for key in keys_in(path))


def full_name(gpu: str, *databases: Path | None) -> str:
    """`gpu`, or the one GPU with tables whose name it is a part of.

    Raises:
        UsageError: when it is a part of several names.
        NoTunedData: when it is a part of none, and not the name of a known GPU.
    """
    if gpu in detect.KNOWN or gpu == detect.local_device_name():
        return gpu
    called = [name for name in detect.KNOWN if gpu.casefold() in name.casefold().split()]
    if len(called) == 1:  # "H20" is no H200, though a piece of its name
        return called[0]
    tuned = gpus_with_tables(*databases)
    name = _one_of(tuned, gpu)
    if name is None:
        tables = _listed(tuned)
        raise NoTunedData(f"there is no table of a GPU {gpu!r}; there are tables of {tables}")
    return name


def name_for_job(gpu: str) -> str:
    """The GPU that is known or has tables whose name `gpu` is a part of; else `gpu` itself, as a
    fleet may have GPUs that nobody here knows.

    Raises:
        UsageError: when it is a part of several names.
    """
    return _one_of(sorted({*detect.KNOWN, *gpus_with_tables()}), gpu) or gpu


def _one_of(names: list[str], part: str) -> str | None:
    """The name that `part` is, is a word of, or else is a piece of."""
    pieces = [name for name in names if part.casefold() in name.casefold()]
    words = [name for name in pieces if part.casefold() in name.casefold().split()]
    matching = [part] if part in names else words or pieces
    if len(matching) > 1:
        raise UsageError(f"--gpu {part} may be {_listed(matching)}; write more of the name")
    return next(iter(matching), None)


def gpu_and_model(
    gpu: str | None, model: str | None, heads: int | None, database: Path | None
) -> tuple[str, str]:
    """The GPU and the model that are meant; what is not given is this machine's.

    Raises:
        UsageError: when `gpu` is a part of several names, or when nothing is given but `heads` that
            the default model of a CPU does not have.
        NoTunedData: when `gpu` is a part of no name.
    """
    name = full_name(gpu, database) if gpu else detect.local_device_name()
    meant = model_of(model, name)
    if not (gpu or model) and heads is not None and name.startswith("CPU"):
        try:
            profile_of(meant).check_heads(heads)
        except HeadsError as error:
            tuned = [name for name in gpus_with_tables(database) if not name.startswith("CPU")]
            raise HeadsError(
                f"this machine has no GPU, and on its CPU {error}; or name a GPU with --gpu: there "
                f"are tables of {_listed(tuned)}"
            ) from error
    return name, meant


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
