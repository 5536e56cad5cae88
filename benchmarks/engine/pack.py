"""Gather SGLang and what it needs for a Hopper host that has PyTorch but no network.

    python -m benchmarks.engine.pack PACK [--sglang 0.5.17] [--parts N] [--jit FILE] [--all-fa3]

It downloads wheels, leaves out what a run never uses, and writes PACK/pack.json and PACK/parts/1,
2, .... Most of the time is xz. Choose a PACK that git ignores. nsa-tune itself is not in it: a run
takes it from the checkout.

SGLang 0.5.17 runs on the host's PyTorch 2.11: 55 MiB, ten minutes, 6 GB of disk. 0.5.23 needs
PyTorch 2.14.1, so its pack has that too, and NCCL 2.30.7, which PyTorch then asks for.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.engine.recipes import SGLANG, Recipe
from benchmarks.engine.slim import SUFFIX, shrink

__all__ = ["Pack", "main", "write_parts"]

_PLATFORMS = [
    "any", "manylinux1_x86_64", "manylinux2014_x86_64",
    *(f"manylinux_2_{n}_x86_64" for n in (5, 12, *range(17, 36))),
]  # fmt: skip
_TAGS = [
    "--only-binary=:all:", "--no-deps", "--python-version=3.12", "--implementation=cp",
    "--abi=cp312", "--abi=abi3", "--abi=none", *(f"--platform={name}" for name in _PLATFORMS),
]  # fmt: skip
_PART_BYTES = 57 * 2**20
_DICT_BYTES = 256 * 2**20
_ARCH = 90


class Pack:
    """A pack under construction in one folder."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._folder = folder
        self._recipe = recipe
        self._wheels = folder / ".cache" / "wheels"
        self._libraries = folder / ".cache" / "libraries"
        self._stage = folder / ".stage"

    def build(self, *, parts: int | None, jit: Path | None = None) -> None:
        """All steps."""
        self.stage(self._download())
        if jit is not None:
            with tarfile.open(jit) as archive:
                archive.extractall(self._stage, filter="data")
        data = self._compressed()
        write_parts(data, self._folder, parts)

    def _download(self) -> list[Path]:
        self._wheels.mkdir(parents=True, exist_ok=True)
        for wanted in self._recipe.wheels.split():
            name, _, version = wanted.replace("-", "_").partition("==")
            if not (version and any(self._wheels.glob(f"{name}-{version}-*.whl"))):
                pip = [sys.executable, "-m", "pip", "download", "-q", *_TAGS]
                subprocess.run([*pip, "-d", str(self._wheels), wanted], check=True)
        return sorted(self._wheels.glob("*.whl"))

    def stage(self, wheels: Iterable[Path]) -> None:
        """Lay out what goes into the pack: `site`, and the rest of each library in `sparse`."""
        shutil.rmtree(self._stage, ignore_errors=True)
        site = self._stage / "site"
        for wheel in wheels:
            self._unzip(wheel, site)
        _copy_stand_ins(self._recipe.stand_ins, site)
        for library in sorted(self._libraries.rglob("*.so*")):
            name = library.relative_to(self._libraries)
            target = self._stage / "sparse" / name.with_name(name.name + SUFFIX)
            target.parent.mkdir(parents=True, exist_ok=True)
            dropped = shrink(library, target, _ARCH, self._sources(library.name))
            print(f"{name}: {dropped / 2**20:.0f} MiB left out", file=sys.stderr)
        self._recipe.prune(site)

    def _sources(self, library: str) -> str | None:
        named = self._recipe.keep.items()
        return next((keep for start, keep in named if library.startswith(start)), None)

    def _unzip(self, wheel: Path, site: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                name = info.filename
                if name.endswith("/") or re.match(self._recipe.dropped, name):
                    continue
                library = re.fullmatch(self._recipe.libraries, name)
                path = Path(archive.extract(info, self._libraries if library else site))
                if info.external_attr >> 16 & 0o100:
                    path.chmod(0o755)

    def _compressed(self) -> bytes:
        archive_path = self._stage / "pack.tar.xz"
        xz = {"id": lzma.FILTER_LZMA2, "preset": self._recipe.preset, "dict_size": _DICT_BYTES}
        with (
            lzma.open(archive_path, "wb", filters=[xz]) as file,
            tarfile.open(fileobj=file, mode="w") as archive,
        ):
            for name in ("site", "sparse", "jit"):
                if (self._stage / name).exists():
                    archive.add(self._stage / name, name, filter=_no_bytecode)
        return archive_path.read_bytes()


def _no_bytecode(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member


def _copy_stand_ins(folder: Path, site: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(folder, site, ignore=ignored, dirs_exist_ok=True)
    # What makes them a package here would be a module in the way there.
    (site / "__init__.py").unlink(missing_ok=True)


def write_parts(data: bytes, folder: Path, count: int | None = None) -> None:
    """Write a pack's bytes below `folder`, in as few parts as may be, or in `count`."""
    parts = folder / "parts"
    shutil.rmtree(parts, ignore_errors=True)
    count = count or -(-len(data) // _PART_BYTES)
    size = -(-len(data) // count)
    for i in range(count):
        place = parts / str(i + 1)
        place.mkdir(parents=True)
        (place / f"pack.{i + 1}").write_bytes(data[i * size : (i + 1) * size])
    head = {"parts": count, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (folder / "pack.json").write_text(json.dumps(head) + "\n")
    print(f"{len(data) / 2**20:.1f} MiB in {count} parts", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Build a pack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sglang", default="0.5.17", choices=sorted(SGLANG), help="its release")
    parser.add_argument("--parts", type=int, help="how many; parts of 57 MiB where not given")
    parser.add_argument("--jit", type=Path, help="tar file with jit/: modules compiled ahead")
    parser.add_argument("--all-fa3", action="store_true", help="every FlashAttention-3 kernel")
    options = parser.parse_args(arguments)
    recipe = SGLANG[options.sglang]
    if options.all_fa3:
        keep = {name: sources for name, sources in recipe.keep.items() if name != "flash_ops"}
        recipe = dataclasses.replace(recipe, keep=keep)
    Pack(options.folder.resolve(), recipe).build(parts=options.parts, jit=options.jit)


if __name__ == "__main__":
    main()
