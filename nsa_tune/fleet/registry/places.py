"""Where a registry is: a folder, or a bucket that fsspec can open. Both have files by name."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

from nsa_tune._errors import ExtraMissing, StoreError, StoreMissing, StoreReadOnly, UsageError
from nsa_tune._files import TooLong, open_regular, read_whole

_PROTOCOL = re.compile(r"([a-z][a-z0-9+.-]*)(?:::|://)", re.IGNORECASE)
_NAME = re.compile(r"[0-9a-f]{32}\.(?:tsv|json|json\.sig)")
_MOST_NAMES = 2**16
_FAILURES = (OSError, ValueError, RuntimeError, NotImplementedError, ImportError)
"""What a file system of fsspec raises for a bucket that is not there, or may not be used."""


class Registry(Protocol):
    """Files, each written whole."""

    @property
    def shown(self) -> str:
        """What to call it in messages."""
        ...

    def names(self) -> list[str]:
        """The names of a registry's files that are there, sorted.

        Raises:
            StoreError: when that cannot be told.
        """
        ...

    def read(self, name: str, most_bytes: int) -> bytes:
        """What is in a file.

        Raises:
            StoreMissing: when there is no such file.
            StoreError: when it cannot be read, or is larger.
        """
        ...

    def write(self, name: str, data: bytes) -> None:
        """Put a file in place.

        Raises:
            StoreReadOnly: when it cannot be written.
        """
        ...


def registry_of(place: str) -> Registry:
    """The registry at `place`, a folder's path or an address like s3://bucket/tables.

    Raises:
        UsageError: when fsspec does not know such an address.
        ExtraMissing: when fsspec, or what it needs for this kind of bucket, is not installed.
    """
    protocol = _PROTOCOL.match(place)
    if protocol is None:
        return _Folder(Path(place).expanduser())
    if protocol[1].lower() in ("http", "https"):
        raise UsageError(
            f"{place} is no registry; set NSA_TUNE_DB to the address of a service, or give a "
            "folder, or a bucket that files can be written to"
        )
    return _bucket(place)


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def shown(self) -> str:
        return str(self._path)

    def names(self) -> list[str]:
        try:
            return sorted(one.name for one in self._path.iterdir() if _NAME.fullmatch(one.name))
        except FileNotFoundError:
            raise StoreMissing(
                f"there is no registry {self._path}; `nsa-tune db publish` makes one"
            ) from None
        except OSError as error:
            raise StoreError(f"{self._path} cannot be read: {error.strerror}") from error

    def read(self, name: str, most_bytes: int) -> bytes:
        path = self._path / name
        try:
            with open_regular(path) as file:
                return read_whole(file, most_bytes)
        except FileNotFoundError:
            raise StoreMissing(f"there is no file {path}") from None
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        except TooLong as error:
            raise StoreError(f"{path} is refused: {error}") from None

    def write(self, name: str, data: bytes) -> None:
        draft = self._path / f".{name}.{token_hex(4)}"
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(data)
            draft.replace(self._path / name)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise StoreReadOnly(f"{self._path} cannot be written: {error.strerror}") from error


def _bucket(place: str) -> _Bucket:
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError:
        raise ExtraMissing.of("a registry in a bucket", "registry") from None
    try:
        files, root = url_to_fs(place)
    except ImportError as error:
        raise ExtraMissing(f"{place} needs another package: {error}") from error
    except _FAILURES as error:
        raise UsageError(f"{place} is no place that fsspec can open: {error}") from error
    return _Bucket(files, str(root).rstrip("/"), place)


class _Bucket:
    def __init__(self, files: Any, root: str, shown: str) -> None:
        self._files = files
        self._root = root
        self._shown = shown

    @property
    def shown(self) -> str:
        return self._shown

    def names(self) -> list[str]:
        try:
            # What a listing remembers may be older than what others have published.
            self._files.invalidate_cache()
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            raise StoreMissing(
                f"there is no registry {self._shown}; `nsa-tune db publish` makes one"
            ) from None
        except _FAILURES as error:
            raise StoreError(f"{self._shown} cannot be listed: {error}") from error
        names = (str(one).rstrip("/").rpartition("/")[2] for one in found[:_MOST_NAMES])
        return sorted(name for name in names if _NAME.fullmatch(name))

    def read(self, name: str, most_bytes: int) -> bytes:
        try:
            with self._files.open(f"{self._root}/{name}", "rb") as file:
                return read_whole(file, most_bytes)
        except FileNotFoundError:
            raise StoreMissing(f"there is no {name} in {self._shown}") from None
        except TooLong as error:
            raise StoreError(f"{name} in {self._shown} is refused: {error}") from None
        except _FAILURES as error:
            raise StoreError(f"{name} in {self._shown} cannot be read: {error}") from error

    def write(self, name: str, data: bytes) -> None:
        try:
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(f"{self._root}/{name}", data)
        except _FAILURES as error:
            raise StoreReadOnly(f"{self._shown} cannot be written: {error}") from error
