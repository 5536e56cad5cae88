"""nsa-tune: the fastest attention implementation for a batch, from measurements of this GPU.

The public names. Importing them loads the standard library only.
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
