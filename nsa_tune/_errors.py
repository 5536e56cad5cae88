"""Every error that nsa-tune raises on purpose.

NsaTuneError                   exit code 1
 |-- UsageError                exit code 2: the caller asked for something that cannot be
 |    |-- BatchError           a batch with impossible lengths
 |    |-- UnknownName          a model, point, arm, format or layout that does not exist
 |    `-- HeadsError           local heads that do not divide the model's heads
 |-- NoTunedData               exit code 3: nothing was measured for this key
 |-- MachineUnfit              exit code 5: this machine cannot measure what was asked
 |    |-- DeviceMissing        no such device here
 |    `-- LibraryMissing       a kernel library is not installed
 |-- ExtraMissing              a Python package of an optional extra is not installed
 `-- StoreError                a database or table that cannot be used
      |-- StoreMissing         there is no such file
      |-- StoreReadOnly        the file cannot be written
      |-- StoreNewer           the file was written by a newer nsa-tune
      `-- StoreCorrupt         the file is not a table of nsa-tune, or is damaged
"""

from __future__ import annotations


class NsaTuneError(Exception):
    """Base of every error raised on purpose; its text is one sentence for the user."""

    exit_code = 1

    def __str__(self) -> str:
        """The sentence; bytes of a file's name that are no text are escaped, for any log."""
        return super().__str__().encode("utf-8", "backslashreplace").decode()


class UsageError(NsaTuneError):
    """The caller asked for something that cannot be."""

    exit_code = 2


class BatchError(UsageError):
    """A batch with impossible lengths: negative, zero, absurd, or of unequal counts."""


class UnknownName(UsageError):
    """A model, decision point, arm, format or layout that does not exist."""

    @classmethod
    def of(cls, what: str, given: str, known: list[str]) -> UnknownName:
        """The error for `given`, with the names that would have been right."""
        return cls(f"unknown {what} {given!r}; use one of: {', '.join(known)}")


class HeadsError(UsageError):
    """Local heads that do not divide the model's heads."""


class NoTunedData(NsaTuneError):
    """Nothing was measured for this key."""

    exit_code = 3


class MachineUnfit(NsaTuneError):
    """This machine cannot measure what was asked."""

    exit_code = 5


class DeviceMissing(MachineUnfit):
    """There is no such device here."""


class LibraryMissing(MachineUnfit):
    """A kernel library is not installed, or none of its builds answers on this GPU."""


class ExtraMissing(NsaTuneError):
    """A Python package of an optional extra is not installed."""

    @classmethod
    def of(cls, purpose: str, extra: str) -> ExtraMissing:
        """The error for `purpose`, with the pip command that ends it."""
        return cls(
            f"{purpose} needs an optional package: pip install '.[{extra}]' in nsa-tune's checkout"
        )


class StoreError(NsaTuneError):
    """A database or a text table that cannot be used."""


class StoreMissing(StoreError):
    """There is no such database or table file."""


class StoreReadOnly(StoreError):
    """The database cannot be written."""


class StoreNewer(StoreError):
    """The database was written by a newer nsa-tune."""


class StoreCorrupt(StoreError):
    """The file is not a database or table of nsa-tune, or it is damaged."""
