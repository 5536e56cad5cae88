"""A GPU by what people call it: `--gpu H200`, `--gpu "h100 pcie"`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from nsa_tune._cli.shared.options import model_of
from nsa_tune._errors import HeadsError, NoTunedData, StoreError, UsageError
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Key
from nsa_tune.db import places
from nsa_tune.db.reader import keys_in

_UNSAID = frozenset({"nvidia", "sxm", "sxm4", "sxm5"})
"""Words that the driver's names may lack: an H100 SXM is an "NVIDIA H100 80GB HBM3"."""


def keys_of(*databases: Path | None) -> Iterator[Key]:
    """The keys of all tables in `databases`, which must be readable; None: the default places."""
    for database in databases or (None,):
        for path in places.sources(database):
            with nullcontext() if path == database else suppress(StoreError):
                yield from keys_in(path)


def gpus_with_tables(*databases: Path | None) -> list[str]:
    """The GPUs that `databases`, or where None the default places, have tables of."""
    return sorted({key.gpu for key in keys_of(*databases)})


def full_name(gpu: str, *databases: Path | None) -> str:
    """The known GPU, or the one with tables, that `gpu` names; of several that with tables.

    Raises:
        UsageError: when it may be several.
        NoTunedData: when it is none.
    """
    if gpu in detect.KNOWN or gpu == detect.local_device_name():
        return gpu
    tuned = gpus_with_tables(*databases)
    named = _named(gpu, sorted({*detect.KNOWN, *tuned}))
    name = _one_of([name for name in named if name in tuned] or named, gpu)
    if name is None:
        raise NoTunedData(
            f"{gpu!r} is no GPU that nsa-tune knows: there are tables of {_listed(tuned)}, and "
            f"`nsa-tune gpus` lists what is known; `nsa-tune run` measures another one"
        )
    return name


def name_for_job(gpu: str) -> str:
    """The GPU that is known or has tables that `gpu` names; else `gpu` itself, as a fleet may have
    GPUs that nobody here knows.

    Raises:
        UsageError: when it may be several.
    """
    return _one_of(_named(gpu, sorted({*detect.KNOWN, *gpus_with_tables()})), gpu) or gpu


def _named(text: str, names: list[str]) -> list[str]:
    """The name of the words of `text`; else names that have them all, or of which it is a piece."""
    wanted = _words(text) - _UNSAID
    same = [name for name in names if wanted == _words(name) - _UNSAID]
    with_words = [name for name in names if wanted and wanted <= _words(name)]
    pieces = [name for name in names if text.casefold() in name.casefold()]
    return [text] if text in names else same or with_words or pieces


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", text.casefold()))


def _one_of(named: list[str], text: str) -> str | None:
    if len(named) > 1:
        raise UsageError(f"--gpu {text} may be {_listed(named)}; write more of the name")
    return next(iter(named), None)


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
