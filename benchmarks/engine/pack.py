"""Gather SGLang and what it needs for a Hopper host that has PyTorch but no network.

    python -m benchmarks.engine.pack PACK [--parts N] [--jit FILE] [--all-fa3]

It downloads wheels (429 MB), leaves out what a run never uses, and writes PACK/pack.json and
PACK/parts/1, 2, ...: 55 MiB in all. That takes about ten minutes, most of it xz, and 6 GB of disk.
Choose a PACK that git ignores. nsa-tune itself is not in it: a run takes it from the checkout.

SGLang 0.5.17 is the newest release that pins PyTorch 2.11. 0.5.23 needs PyTorch 2.14; its kernels
do not load on 2.11.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine.slim import SUFFIX, shrink

__all__ = ["Pack", "Recipe", "kept_models", "main", "write_parts"]

WHEELS = (
    "sglang==0.5.17 sglang-kernel==0.4.5 sgl-deep-gemm==0.1.5.post1 "
    "flashinfer-python==0.6.15.post1 apache-tvm-ffi==0.1.11 cuda-tile==1.7.0 "
    "transformers==5.12.1 tokenizers==0.22.2 compressed-tensors==0.20.0 "
    "loguru==0.7.3 dill==0.4.1 gguf==0.19.0 "
    "fastapi==0.121.3 starlette==0.49.3 annotated-doc uvicorn==0.54.0 python-multipart==0.0.34 "
    "pydantic==2.12.5 pydantic-core==2.41.5 annotated-types==0.8.0 typing-inspection==0.4.5 "
    "msgspec==0.22.0 orjson==3.13.0 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 "
    "pyzmq==27.3.0 setproctitle==1.3.8 openai==2.6.1 distro==1.9.0 jiter==0.19.0 sniffio==1.3.1"
)
"""Without their dependencies: the host has PyTorch's, and stand_ins/ takes the place of some."""

_PLATFORMS = [
    "any", "manylinux1_x86_64", "manylinux2014_x86_64",
    *(f"manylinux_2_{n}_x86_64" for n in (12, 17, 24, 26, 27, 28, 31, 34, 35)),
]  # fmt: skip
_TAGS = [
    "--only-binary=:all:", "--no-deps", "--python-version=3.12", "--implementation=cp",
    "--abi=cp312", "--abi=abi3", "--abi=none", *(f"--platform={name}" for name in _PLATFORMS),
]  # fmt: skip
_DROPPED = (
    "sglang/multimodal_gen/", "sglang/test/", "sglang/benchmark/", "sglang/eval/", "sglang/cli/",
    "sglang/srt/server/_core", "sglang/srt/grpc/_core", "sglang/srt/multimodal/_core",
    "sgl_kernel/sm100/", "sgl_kernel/infllm_ops", "sgl_kernel/testing/",
    "flashinfer/data/cutlass/test/", "flashinfer/data/cutlass/examples/",
    "flashinfer/data/cutlass/tools/profiler/",
)  # fmt: skip
_FA3 = (
    r"prepare_scheduler|combine|"
    r"hdim(192_128|256|64_512|diff)_bf16(_paged)?(_split)?(_packgqa)?_sm90"
)
"""Of FlashAttention-3, in bf16: dense attention (V3.2: 192/128, GLM-5: 256) and absorbed decode
(64/512)."""
_ARCH = 90
_MODELS = frozenset({
    "__init__", "registry", "deepseek_v2", "deepseek_nextn", "deepseek", "glm4_moe", "utils",
    "transformers",
})  # fmt: skip
_STAND_INS = Path(__file__).with_name("stand_ins")
_PART_BYTES = 57 * 2**20
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 256 * 2**20}]


def _nothing(_: Path) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Recipe:
    """What goes into a pack."""

    wheels: str
    """Their names and versions, without their dependencies."""
    dropped: tuple[str, ...]
    """Beginnings of names of files that a run never uses."""
    libraries: str
    """A regular expression: the libraries of which only one architecture's code stays."""
    stand_ins: Path
    """A folder whose modules take the place of packages that are not packed."""
    keep: Mapping[str, str] = field(default_factory=dict)
    """By the beginning of a library's file name, the sources of which device code stays."""
    prune: Callable[[Path], None] = _nothing
    """Takes away what is left out besides, of the folder in which all wheels lie."""


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
        for library in sorted(self._libraries.rglob("*.so")):
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
                if name.endswith("/") or name.startswith(self._recipe.dropped):
                    continue
                library = re.fullmatch(self._recipe.libraries, name)
                archive.extract(info, self._libraries if library else site)

    def _compressed(self) -> bytes:
        archive_path = self._stage / "pack.tar.xz"
        with (
            lzma.open(archive_path, "wb", filters=_XZ) as file,
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


def _prune_models(site: Path) -> None:
    """SGLang imports every model that it has: leave those of one family and what they import."""
    folder = site / "sglang/srt/models"
    if not folder.exists():
        return
    inside = {path.stem: path.read_text(errors="ignore") for path in folder.glob("*.py")}
    outside = (
        path.read_text(errors="ignore")
        for path in folder.parents[1].rglob("*.py")
        if path.parent != folder
    )
    kept = kept_models(inside, outside)
    for stem in inside.keys() - kept:
        (folder / f"{stem}.py").unlink()
    print(f"{len(inside) - len(kept)} of {len(inside)} model files left out", file=sys.stderr)


def kept_models(inside: dict[str, str], outside: Iterable[str]) -> set[str]:
    """The models to keep, by file name: the family's, and what kept or other code imports.

    `inside` are the sources of the models, `outside` those of everything else.
    """
    kept: set[str] = set()
    found = {name for name in _MODELS if name in inside}
    for text in outside:
        found |= set(_imports(text)) & inside.keys()
    while found:
        kept |= found
        named = {name for one in found for name in _imports(inside[one])}
        found = (named & inside.keys()) - kept
    return kept


def _imports(text: str) -> Iterator[str]:
    return (found[1] for found in re.finditer(r"\bmodels\.(\w+)\b", text))


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
    parser.add_argument("--parts", type=int, help="how many; parts of 57 MiB where not given")
    parser.add_argument("--jit", type=Path, help="tar file with jit/: modules compiled ahead")
    parser.add_argument("--all-fa3", action="store_true", help="every FlashAttention-3 kernel")
    options = parser.parse_args(arguments)
    keep = {} if options.all_fa3 else {"flash_ops": _FA3}
    recipe = Recipe(WHEELS, _DROPPED, r"sgl_kernel/.*\.so", _STAND_INS, keep, _prune_models)
    Pack(options.folder.resolve(), recipe).build(parts=options.parts, jit=options.jit)


if __name__ == "__main__":
    main()
