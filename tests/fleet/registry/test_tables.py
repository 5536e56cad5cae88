"""Tables into a registry and out of it: manifests, signatures, folders and buckets."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa_tune._errors import (
    ExtraMissing,
    NsaTuneError,
    StoreCorrupt,
    StoreError,
    StoreMissing,
    StoreReadOnly,
    UsageError,
)
from nsa_tune.backend.types.records import Key, Table
from nsa_tune.db.text_table import read_text
from nsa_tune.fleet.registry import places, signatures
from nsa_tune.fleet.registry.manifest import Manifest
from nsa_tune.fleet.registry.places import Registry, registry_of
from nsa_tune.fleet.registry.tables import Found, Trust, found_in, publish
from tests.records import KEY, failed, ok
from tests.records import table as made

TABLE = made(
    *(
        ok(f"extend:{prefix}+64", arm, us + prefix / 100)
        for prefix in range(0, 1200, 100)
        for arm, us in (("mha/fa3", 20.0), ("mla/flashmla_kv", 30.0))
    ),
    failed("extend:0+64", "mla/flashmla_sparse", "no kernel"),
)


def _all(key: Key) -> bool:
    return True


@pytest.fixture(params=["folder", "bucket"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    """An empty registry."""
    if request.param == "folder":
        yield registry_of(str(tmp_path / "registry"))
        return
    import fsspec

    yield registry_of(f"memory://{tmp_path.name}/tables")
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the SSH keys alice and mallory, and a file in which alice is allowed."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("alice", "mallory"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)],
            check=True, timeout=60,
        )  # fmt: skip
    kind, public, _ = (folder / "alice.pub").read_text().split()
    (folder / "allowed").write_text(f"alice@example.com {kind} {public}\n")
    return folder


def _only(registry: Registry, trust: Trust | None = None) -> Found:
    (found,) = found_in(registry, _all, trust)
    return found


def _opened(found: Found) -> Table:
    with found.opened() as path:
        return read_text(path)


def test_what_is_published_is_found_and_read(registry: Registry) -> None:
    published = publish(TABLE, registry)

    found = _only(registry)
    table = _opened(found)
    assert not published.known
    assert found.manifest == published.manifest
    assert sorted(map(repr, table.measurements)) == sorted(map(repr, TABLE.measurements))
    assert registry.names() == [f"{found.name}.json", f"{found.name}.tsv"]


def test_a_manifest_says_what_the_table_is(registry: Registry) -> None:
    manifest = publish(TABLE, registry).manifest
    data = registry.read(f"{manifest.content}.tsv", 10**6)
    document: dict[str, Any] = json.loads(registry.read(f"{manifest.content}.json", 10**6))

    assert document["key"]["libraries"] == dict(KEY.libraries)
    assert document["key"]["driver"] == KEY.driver
    assert document["sha256"] == hashlib.sha256(data).hexdigest()
    assert f"# content = {document['content']}\n".encode() in data
    assert document["counts"] == {"prefill": {"batches": 12, "failed": 1, "ok": 24}}
    assert document["rows"] == 25
    assert set(document["held_out_regret"]["prefill_path"]) == {"mean", "most", "batches"}
    assert document["held_out_regret"]["prefill_path"]["batches"] == 11


def test_publishing_again_changes_nothing(registry: Registry) -> None:
    first = publish(TABLE, registry)
    before = {name: registry.read(name, 10**6) for name in registry.names()}
    again = publish(replace(TABLE, measurements=TABLE.measurements[::-1]), registry)

    assert again == (first.manifest, True)
    assert {name: registry.read(name, 10**6) for name in registry.names()} == before


def test_only_what_is_wanted_is_found(registry: Registry) -> None:
    publish(TABLE, registry)
    publish(replace(TABLE, key=replace(KEY, heads=16)), registry)

    assert len(list(found_in(registry, _all))) == 2
    assert [one.manifest.key.heads for one in found_in(registry, lambda key: key.heads == 16)
            if one.manifest] == [16]  # fmt: skip


def test_a_registry_that_is_not_there(registry: Registry) -> None:
    with pytest.raises(StoreMissing, match="there is no"):
        list(found_in(registry, _all))


# --- what is wrong with a table


def _rewritten(registry: Registry, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(registry.read(f"{name}.json", 10**6))
    change(document)
    registry.write(f"{name}.json", json.dumps(document).encode())


def _other_rows(registry: Registry, name: str) -> None:
    """Other measurements, with a right digest and a manifest that is told of the new SHA-256."""
    other = replace(TABLE, measurements=TABLE.measurements[:3])
    data = registry.read(f"{publish(other, registry).manifest.content}.tsv", 10**6)
    registry.write(f"{name}.tsv", data)
    fresh = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    _rewritten(registry, name, lambda found: found.update(fresh))


def _write(end: str, data: bytes) -> Callable[[Registry, str], None]:
    return lambda registry, name: registry.write(f"{name}{end}", data)


def _say(**fields: object) -> Callable[[Registry, str], None]:
    return lambda registry, name: _rewritten(registry, name, lambda found: found.update(fields))


def _faster(registry: Registry, name: str) -> None:
    data = registry.read(f"{name}.tsv", 10**6)
    registry.write(f"{name}.tsv", data.replace(b"ok\t20\t", b"ok\t10\t"))


def _other_driver(registry: Registry, name: str) -> None:
    _rewritten(registry, name, lambda found: found["key"].update(driver="1.2"))


DAMAGES: dict[str, tuple[Callable[[Registry, str], None], str]] = {
    "times": (_faster, "was changed since it was written"),
    "no table": (_write(".tsv", b"junk"), "not a table of nsa-tune"),
    "other rows": (_other_rows, "it has other measurements than the manifest counts"),
    "other hash": (_say(sha256="0" * 64), f"not {'0' * 64}"),
    "other driver": (_other_driver, "its key is another one than the manifest's"),
    "other name": (_say(content="ab" * 16), "is the manifest of another table"),
    "cut": (_write(".json", b"["), "is no manifest"),
    "a list": (_write(".json", b"[]"), "is no manifest: it is no JSON object"),
    "key": (_say(key=[]), "is no manifest: it is no JSON object"),
    "deep": (_write(".json", b"[" * 10**5), "is no manifest"),
    "empty": (_write(".json", b"{}"), "is no manifest"),
    "a number": (_say(content=3), "is no manifest"),
    "long": (_write(".json", b" " * 2**19), "it has more than 262144 bytes"),
    "newer": (_say(schema="nsa-tune/manifest/9"), "which this nsa-tune does not read"),
}


@pytest.mark.parametrize(("change", "words"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_not_as_it_was_published_is_refused(
    change: Callable[[Registry, str], None], words: str, registry: Registry
) -> None:
    name = publish(TABLE, registry).manifest.content
    change(registry, name)

    found = next(one for one in found_in(registry, _all) if one.name == name)
    with pytest.raises(StoreError) as caught:
        _opened(found)
    assert words in str(caught.value)
    assert registry.shown in str(caught.value)


def test_a_manifest_of_something_else_is_not_published_over(registry: Registry) -> None:
    name = publish(TABLE, registry).manifest.content
    _rewritten(registry, name, lambda found: found.update(sha256="0" * 64))

    with pytest.raises(StoreCorrupt, match="is the manifest of another table; remove it"):
        publish(TABLE, registry)


# --- signatures


def test_a_signed_table_names_its_signer(registry: Registry, keys: Path) -> None:
    publish(TABLE, registry, keys / "alice")

    found = _only(registry, Trust(keys / "allowed", required=True))

    assert found.signer == "alice@example.com"
    assert _opened(found).key == KEY


def test_a_table_can_be_signed_later(registry: Registry, keys: Path) -> None:
    publish(TABLE, registry)
    assert publish(TABLE, registry, keys / "alice").known

    assert _only(registry, Trust(keys / "allowed", required=True)).problem == ""


def _resigned(registry: Registry, name: str, keys: Path) -> None:
    """Mallory's signature in the place of Alice's."""
    data = registry.read(f"{name}.json", 10**6)
    registry.write(f"{name}.json.sig", signatures.sign(data, keys / "mallory"))


def _better(registry: Registry, name: str, keys: Path) -> None:
    """A manifest that somebody changed after Alice had signed it."""
    _rewritten(registry, name, lambda found: found["held_out_regret"].clear())


def _elsewhere(registry: Registry, name: str, keys: Path) -> None:
    """Alice's signature for another purpose, such as a commit."""
    data = registry.read(f"{name}.json", 10**6)
    done = subprocess.run(
        ["ssh-keygen", "-Y", "sign", "-f", str(keys / "alice"), "-n", "git"],
        input=data, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    registry.write(f"{name}.json.sig", done.stdout)


def _junk(registry: Registry, name: str, keys: Path) -> None:
    registry.write(f"{name}.json.sig", b"junk")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_resigned, "is refused: it is signed by nobody whom"),
        (_better, "its signature is not one of this content by alice@example.com"),
        (_elsewhere, "its signature is not one of this content by alice@example.com"),
        (_junk, "is refused: it is signed by nobody whom"),
    ],
)
@pytest.mark.parametrize("required", [True, False])
def test_a_wrong_signature_is_refused(
    change: Callable[[Registry, str, Path], None], words: str, *, required: bool,
    registry: Registry, keys: Path,
) -> None:  # fmt: skip
    name = publish(TABLE, registry, keys / "alice").manifest.content
    change(registry, name, keys)

    found = _only(registry, Trust(keys / "allowed", required))

    assert words in found.problem
    with pytest.raises(StoreError, match="is refused"):
        _opened(found)


def test_an_unsigned_table_is_refused_where_signatures_are_required(
    registry: Registry, keys: Path
) -> None:
    publish(TABLE, registry)

    assert "is not signed" in _only(registry, Trust(keys / "allowed", required=True)).problem
    assert _only(registry, Trust(keys / "allowed")).problem == ""


def test_a_key_that_cannot_sign(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot sign"):
        publish(TABLE, registry, tmp_path / "none")

    with pytest.raises(StoreMissing):
        registry.names()


def test_a_missing_file_of_signers(registry: Registry, keys: Path, tmp_path: Path) -> None:
    publish(TABLE, registry, keys / "alice")

    with pytest.raises(UsageError, match="there is no file"):
        list(found_in(registry, _all, Trust(tmp_path / "none")))


def test_without_ssh_keygen(
    registry: Registry, keys: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("ssh-keygen") is None

    with pytest.raises(NsaTuneError, match="need ssh-keygen"):
        publish(TABLE, registry, keys / "alice")


# --- places


def test_a_bucket_needs_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)

    with pytest.raises(ExtraMissing, match=r"\.\[registry\]"):
        registry_of("memory://tables")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("https://tables.example", "set NSA_TUNE_DB to the address of a service"),
        ("nothing://tables", "no place that fsspec can open"),
    ],
)
def test_what_is_no_registry(place: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        registry_of(place)


def test_a_bucket_whose_package_is_missing_names_it() -> None:
    pytest.importorskip("fsspec")
    if __import__("importlib.util").util.find_spec("s3fs"):
        pytest.skip("s3fs is installed")

    with pytest.raises(ExtraMissing, match="s3fs"):
        registry_of("s3://bucket/tables")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreReadOnly, match="cannot be written"):
        registry_of(str(tmp_path / "file" / "tables")).write(f"{'ab' * 16}.tsv", b"")


def test_other_files_in_a_folder_are_left_alone(tmp_path: Path) -> None:
    publish(TABLE, registry_of(str(tmp_path)))
    (tmp_path / "README.json").write_text("{}")
    (tmp_path / "passwd.tsv").symlink_to("/etc/passwd")

    assert len(list(found_in(registry_of(str(tmp_path)), _all))) == 1


def test_a_manifest_is_the_same_for_the_same_table() -> None:
    data = b"text"
    one, other = (Manifest.of(TABLE, "ab" * 16, data) for _ in range(2))

    assert one.as_bytes() == other.as_bytes()
    assert Manifest.parse(one.as_bytes(), "it") == one
    assert places.registry_of("tables").shown == "tables"
