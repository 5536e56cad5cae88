"""Tables into a registry and out of it.

A table has up to three files, named by the table's content: NAME.tsv, the manifest NAME.json, and
the manifest's signature NAME.json.sig. The manifest is written last, so a table with one is whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nsa_tune._errors import StoreCorrupt, StoreError, StoreMissing
from nsa_tune.backend.dispatch.refit import write_fitted
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db.text_table import read_text, written_content
from nsa_tune.fleet.registry.manifest import MOST_BYTES, Manifest
from nsa_tune.fleet.registry.places import Registry
from nsa_tune.fleet.registry.signatures import sign, signer_of

_MOST_TABLE = 2**24
_MOST_SIGNATURE = 2**16


class Published(NamedTuple):
    """What `publish` did."""

    manifest: Manifest
    known: bool
    """The table was there already."""


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose tables are taken."""

    allowed: Path | None = None
    """The allowed signers; None: signatures are not looked at."""
    required: bool = False
    """Tables without a signature are refused."""


@dataclass(frozen=True, slots=True)
class Found:
    """A table in a registry."""

    name: str
    registry: Registry
    manifest: Manifest | None
    """None where it cannot be read."""
    signer: str
    """Who signed it; "" where nobody did, or nobody asked."""
    problem: str
    """Why it is refused; "" where it is not."""

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """The table as a file.

        Raises:
            StoreError: when it is not the one of the manifest, or refused.
        """
        if self.manifest is None or self.problem:
            raise StoreError(self.problem)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{self.name}.tsv")
            data = self.registry.read(path.name, _MOST_TABLE)
            path.write_bytes(data)
            try:
                table = read_text(path)
            except StoreError as error:
                raise StoreCorrupt(str(error).replace(str(path), self._shown)) from None
            problem = self.manifest.why_not(table, data)
            if problem:
                raise StoreCorrupt(f"{self._shown} is not what its manifest says: {problem}")
            yield path

    @property
    def _shown(self) -> str:
        return f"{self.name}.tsv in {self.registry.shown}"


def publish(table: Table, registry: Registry, key: Path | None = None) -> Published:
    """Put `table` and its manifest into `registry`, signed by the SSH key in the file `key`.

    A table that is there stays as it is; it may get a signature.

    Raises:
        UsageError: when `key` cannot sign.
        StoreError: when the registry cannot be written, or has something else under that name.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.tsv")
        write_fitted(table, path)
        data, written = path.read_bytes(), read_text(path)
    content = written_content(data)
    known = _known(registry, content)
    manifest = Manifest.of(written, content, data) if known is None else known
    if manifest.why_not(written, data):
        raise StoreCorrupt(
            f"{content}.json in {registry.shown} is the manifest of another table; remove it"
        )
    told = manifest.as_bytes()
    # A signature is of the very bytes.
    kept = registry.read(f"{content}.json", MOST_BYTES) if known is not None else told
    signature = None if key is None else sign(kept, key)
    if known is None:
        registry.write(f"{content}.tsv", data)
    if signature is not None:
        registry.write(f"{content}.json.sig", signature)
    if known is None:
        registry.write(f"{content}.json", told)
    return Published(manifest, known is not None)


def _known(registry: Registry, content: str) -> Manifest | None:
    try:
        data = registry.read(f"{content}.json", MOST_BYTES)
    except StoreMissing:
        return None
    return Manifest.parse(data, f"{content}.json in {registry.shown}")


def found_in(
    registry: Registry, wanted: Callable[[Key], bool], trust: Trust | None = None
) -> Iterator[Found]:
    """The tables in `registry` that are `wanted`, sorted by name; those that are refused too.

    Raises:
        UsageError: when there is no file of allowed signers.
        StoreError: when the registry cannot be read.
    """
    names = registry.names()
    for name in names:
        if name.endswith(".json"):
            found = _found(registry, name.removesuffix(".json"), names, trust or Trust())
            if found.manifest is None or wanted(found.manifest.key):
                yield found


def _found(registry: Registry, name: str, names: list[str], trust: Trust) -> Found:
    shown = f"{name}.json in {registry.shown}"
    manifest, signer = None, ""
    try:
        data = registry.read(f"{name}.json", MOST_BYTES)
        manifest = Manifest.parse(data, shown)
        if manifest.content != name:
            raise StoreCorrupt(f"{shown} is the manifest of another table")
        if f"{name}.json.sig" not in names:
            if trust.required:
                raise StoreError(f"{shown} is not signed, and --require-signature refuses that")
        elif trust.allowed is not None:
            signature = registry.read(f"{name}.json.sig", _MOST_SIGNATURE)
            signer = _signer(data, signature, trust.allowed, shown)
    except StoreError as error:
        return Found(name, registry, manifest, "", str(error))
    return Found(name, registry, manifest, signer, "")


def _signer(data: bytes, signature: bytes, allowed: Path, shown: str) -> str:
    try:
        return signer_of(data, signature, allowed)
    except StoreError as error:
        raise StoreError(f"{shown} is refused: {error}") from None
