"""`nsa-tune doctor`: can this machine measure, and what would disturb it? Each check is a
function that yields what it found."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, util
from itertools import chain
from pathlib import Path

from nsa_tune._errors import StoreError, StoreMissing, UsageError
from nsa_tune.backend import libraries as providers
from nsa_tune.backend.hardware import detect, nvml
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.records import Table
from nsa_tune.db import places
from nsa_tune.db import reader as tables
from nsa_tune.remote.fetching import Fetched


class State(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing, and harmless."""
    WARN = "warn"
    """Measuring works, but may be disturbed or incomplete."""
    FAIL = "fail"
    """Measuring does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis."""

    subject: str
    state: State
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, and the conclusion."""

    findings: tuple[Finding, ...]
    task: str = "measure"
    """What the machine shall be able to do, as in "this machine can ..."."""

    @property
    def fit(self) -> bool:
        """Whether the machine can do it."""
        return all(finding.state is not State.FAIL for finding in self.findings)

    @property
    def conclusion(self) -> str:
        """One line: whether the machine is fit, or what to fix first."""
        for state, words in (
            (State.FAIL, f"This machine cannot {self.task}"),
            (State.WARN, f"This machine can {self.task}, but look at this first"),
        ):
            found = [finding for finding in self.findings if finding.state is state]
            if found:
                return f"{words}: {', '.join(dict.fromkeys(each.subject for each in found))}."
        return f"OK: this machine is ready to {self.task} on {detect.local_device_name()}."


def examine(database: Path | None = None) -> Diagnosis:
    """All checks of this machine. `database` is where measurements would be stored."""
    checks = (
        gpus(), torch_build(), kernel_libraries(), clocks(), other_processes(), charts(),
        databases(database),
    )  # fmt: skip
    return Diagnosis(tuple(chain.from_iterable(checks)))


def examine_engine(engine: str, database: Path | None = None) -> Diagnosis:
    """Whether the plug-in is active in `engine` ("sglang" or "vllm"): imports the engine's
    attention backends in a process of its own."""
    from nsa_tune.engines.health import health
    from nsa_tune.engines.sglang.health import of_sglang
    from nsa_tune.engines.vllm.plugin import PLUGIN as VLLM

    looked_at = health(VLLM, db=database) if engine == "vllm" else of_sglang(database)
    findings = tuple(
        Finding(subject, State.OK if ok else State.FAIL, text) for subject, ok, text in looked_at
    )
    return Diagnosis(findings, f"steer {'vLLM' if engine == 'vllm' else 'SGLang'}")


def gpus() -> Iterator[Finding]:
    """The GPUs, or the CPU."""
    names = nvml.gpu_names()
    for i, name in enumerate(names):
        unknown = "" if name in detect.KNOWN else ", a model that nsa-tune does not know"
        yield Finding(f"GPU {i}", State.OK if not unknown else State.NOTE, f"{name}{unknown}")
    if names:
        yield Finding("driver", State.OK, detect.driver_version() or "unknown")
    else:
        text = (
            f"no NVIDIA GPU; the reference arms run on the {detect.cpu_name()}. `advise`, "
            "`replay` and `report` need none, nor torch"
        )
        yield Finding("GPU", State.NOTE, text)


def torch_build() -> Iterator[Finding]:
    """PyTorch, and whether it sees the GPUs that the driver reports."""
    if util.find_spec("torch") is None:
        text = "not installed: pip install '.[tune]' in nsa-tune's checkout"
        yield Finding("torch", State.FAIL, text)
        return
    import torch

    names = nvml.gpu_names()
    if names and not torch.cuda.is_available():
        text = f"{torch.__version__} cannot use this GPU; install a CUDA build of torch"
        yield Finding("torch", State.FAIL, text)
    else:
        cuda = f", CUDA {torch.version.cuda}" if names else ""
        yield Finding("torch", State.OK, f"{torch.__version__}{cuda}")


def kernel_libraries() -> Iterator[Finding]:
    """Which distribution provides each kernel library."""
    # Without a GPU nothing needs them.
    absent = State.WARN if nvml.gpu_names() else State.NOTE
    for name, library in providers.PROVIDERS.items():
        provider = providers.answering(name)
        if provider is None:
            state = State.NOTE if library.optional else absent
            kind = "optional, " if library.optional else ""
            yield Finding(name, state, f"{kind}not installed: {library.install}")
        else:
            text = f"{provider.distribution} {provider.version}, as {provider.module}"
            yield Finding(name, State.OK, text)


def clocks() -> Iterator[Finding]:
    """Clocks and temperature of the GPUs, and what slows them down now."""
    for i in range(len(nvml.gpu_names())):
        state = nvml.gpu_state(i)
        if state is None:
            yield Finding(f"clocks {i}", State.NOTE, "the driver does not report them")
            continue
        slowed = ", ".join(state.throttle_reasons) or "nothing slows it down"
        text = (
            f"SM {state.sm_clock_mhz} of {state.sm_clock_max_mhz} MHz, memory "
            f"{state.memory_clock_mhz} MHz, {state.temperature_c} C; {slowed}"
        )
        yield Finding(f"clocks {i}", State.WARN if state.unsteady else State.OK, text)


def other_processes() -> Iterator[Finding]:
    """Other processes that compute on the GPUs."""
    for i in range(len(nvml.gpu_names())):
        state = nvml.gpu_state(i)
        others = [pid for pid in state.processes if pid != os.getpid()] if state else []
        if others:
            text = f"other processes compute here: process {', '.join(map(str, others))}"
            yield Finding(f"processes {i}", State.WARN, text)
        else:
            yield Finding(f"processes {i}", State.OK, "no other process computes here")


def charts() -> Iterator[Finding]:
    """The optional package that draws charts."""
    try:
        version = metadata.version("vl-convert-python")
    except metadata.PackageNotFoundError:
        text = (
            "reports have tables only; pip install '.[report]' in nsa-tune's checkout adds charts"
        )
        yield Finding("charts", State.NOTE, text)
    else:
        yield Finding("charts", State.OK, f"vl-convert-python {version}")


def databases(place: Path | None = None) -> Iterator[Finding]:
    """The server of the database where it has one, the database, and the shipped tables."""
    named = place or os.environ.get("NSA_TUNE_DB", "")
    try:
        served = places.fetched_from(named) if named else None
        if served is not None:
            yield _of_server(served)
        local = places.user_database() if served is not None else place
        yield _of_database(local or places.database_to_write())
    except UsageError as error:
        yield Finding("database", State.FAIL, str(error))
    shipped = places.shipped()
    yield Finding("shipped tables", State.OK if shipped else State.NOTE, str(len(shipped)))


def _of_server(served: Fetched) -> Finding:
    if served.path is None:
        return Finding("server", State.WARN, served.sentence)
    try:
        stored = tables.tables_in(served.path)
    except StoreError as error:
        return Finding("server", State.WARN, f"{served.sentence}; it cannot be used: {error}")
    text = f"{served.sentence}: {_extent(stored)}, in {served.path}"
    return Finding("server", State.WARN if served.problem else State.OK, text)


def _extent(stored: Sequence[Table]) -> str:
    rows = sum(len(table.measurements) for table in stored)
    return f"{counted(len(stored), 'table')}, {counted(rows, 'measurement')}"


def _of_database(path: Path) -> Finding:
    try:
        stored = tables.read_database(path)
    except StoreMissing:
        text = f"{path} does not exist yet; `nsa-tune run` creates it"
        return Finding("database", State.NOTE, text)
    except StoreError as error:
        return Finding("database", State.FAIL, str(error))
    text = f"{path}: {_extent(stored)}"
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return Finding("database", State.OK, text)
    return Finding(
        "database", State.WARN, f"{text}; it is not writable, give another one with --db"
    )
