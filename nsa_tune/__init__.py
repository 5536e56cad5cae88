"""nsa-tune: the fastest attention implementation for a batch, from measurements of this GPU.

The public names. Importing them loads the standard library only, and `import nsa_tune` loads no
module but its errors: engines import it in processes that never decide anything. `Batch`,
`Dispatcher`, `Plan` and `Reason` are imported when they are first used.
"""

from __future__ import annotations

from nsa_tune._errors import (
    BatchError,
    DeviceMissing,
    ExtraMissing,
    HeadsError,
    LibraryMissing,
    MachineUnfit,
    NoTunedData,
    NsaTuneError,
    StoreCorrupt,
    StoreError,
    StoreMissing,
    StoreNewer,
    StoreReadOnly,
    UnknownName,
    UsageError,
)

# What type checkers take as true; importing `typing` for it would load 25 modules.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from nsa_tune.backend.dispatch.dispatcher import Dispatcher
    from nsa_tune.backend.dispatch.plan import Plan, Reason
    from nsa_tune.backend.types.batch import Batch

__all__ = [
    "Batch",
    "BatchError",
    "DeviceMissing",
    "Dispatcher",
    "ExtraMissing",
    "HeadsError",
    "LibraryMissing",
    "MachineUnfit",
    "NoTunedData",
    "NsaTuneError",
    "Plan",
    "Reason",
    "StoreCorrupt",
    "StoreError",
    "StoreMissing",
    "StoreNewer",
    "StoreReadOnly",
    "UnknownName",
    "UsageError",
    "__version__",
]

__version__ = "0.1.0"

_DEFINED_IN = {
    "Batch": "nsa_tune.backend.types.batch",
    "Dispatcher": "nsa_tune.backend.dispatch.dispatcher",
    "Plan": "nsa_tune.backend.dispatch.plan",
    "Reason": "nsa_tune.backend.dispatch.plan",
}


def _import_name(name: str) -> object:
    """The public class `name`, imported now and kept."""
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_DEFINED_IN[name]), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # or no name would be unknown to a type checker
    __getattr__ = _import_name


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
