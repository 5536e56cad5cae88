"""Unpack SGLang on the GPU host, which needs no network; save what it compiled there.

    python3 -m benchmarks.engine.host unpack PACK     # then: . /tmp/sgl/env.sh
    python3 -m benchmarks.engine.host save-caches FOLDER

PACK is what `benchmarks.engine.pack` made. Where its parts come one at a time, call it with each:
it says what is missing. The host's Python (3.12) must have PyTorch 2.11 with CUDA 13. A pack with a
PyTorch of its own still takes the CUDA libraries and ptxas from the host.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engine.slim import SUFFIX, restore

__all__ = ["HOME", "cuda_libraries", "exports", "main", "save_caches", "unpack"]

HOME = Path("/tmp/sgl")
CACHES = ("jit", "deep_gemm", "triton", "inductor", "flashinfer")
"""What is compiled on first use, below `HOME`."""
_CUDA = ("cu13", "cudnn", "nvshmem", "cusparselt")
"""Packages of CUDA libraries that PyTorch finds beside itself."""
_TOOLS = {"ptxas": "ptxas-blackwell", "ptxas-blackwell": "ptxas-blackwell"}
"""Triton 3.8's programs, and the same files of the host's Triton 3.6."""


def unpack(pack: Path, home: Path) -> list[str]:
    """Take over the parts in `pack`; once all are there, unpack. The names of missing parts.
    ValueError when the parts do not belong together."""
    wanted = json.loads((pack / "pack.json").read_text())
    if _ready(home) == wanted["sha256"]:
        return []
    parts = home / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    for part in pack.glob("parts/*/pack.*"):
        (parts / part.name).write_bytes(part.read_bytes())
    every = [parts / f"pack.{i + 1}" for i in range(wanted["parts"])]
    missing = [part.name for part in every if not part.exists()]
    if missing:
        return missing
    data = b"".join(part.read_bytes() for part in every)
    if hashlib.sha256(data).hexdigest() != wanted["sha256"]:
        raise ValueError(f"the parts in {parts} do not belong together: remove them and start anew")
    _extract(data, home)
    (home / "ready").write_text(wanted["sha256"])
    return []


def _ready(home: Path) -> str:
    path = home / "ready"
    return path.read_text() if path.exists() else ""


def _filter(name: str) -> dict[str, Any]:
    """The argument that says how far an archive is trusted; Python knows it since 3.11.4."""
    return {"filter": name} if hasattr(tarfile, "data_filter") else {}


def _extract(data: bytes, home: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as archive:
        # The checksum says that it is what was packed.
        archive.extractall(home, **_filter("fully_trusted"))
    rest = home / "sparse"
    for path in sorted(rest.rglob(f"*{SUFFIX}")):
        target = home / "site" / path.relative_to(rest).with_suffix("")
        target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as file:
            restore(file, target)
        path.unlink()


def link_cuda(site: Path) -> None:
    """Put the host's CUDA libraries and ptxas where a packed PyTorch and Triton look for them."""
    for name in _CUDA:
        for root in import_module("nvidia").__path__:
            if (Path(root) / name).is_dir():
                _link(site / "nvidia" / name, Path(root) / name)
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the host has no Triton, whose ptxas the pack's Triton needs")
    programs = Path(spec.origin).parent / "backends/nvidia/bin"
    for name, host_name in _TOOLS.items():
        _link(site / "triton/backends/nvidia/bin" / name, programs / host_name)


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def environment(home: Path, libraries: str) -> str:
    """The script that a shell reads before it runs an engine."""
    own = {}
    if (home / "site/torch").exists():
        libraries = f"{home}/site/torch/lib:{home}/site/nvidia/nccl/lib:{libraries}"
        # The host's cuDNN is older than PyTorch asks for; no model here calls it.
        own = {"PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    variables = {
        **own,
        "PYTHONPATH": f"{home}/site",
        "PYTHONUNBUFFERED": "1",
        "LD_LIBRARY_PATH": f"{libraries}:${{LD_LIBRARY_PATH:-}}",
        "TVM_FFI_CACHE_DIR": f"{home}/jit",
        "SGLANG_JIT_CACHE_DIR": f"{home}/jit",
        "SGLANG_DG_CACHE_DIR": f"{home}/deep_gemm",
        "DG_JIT_CACHE_DIR": f"{home}/deep_gemm",
        "TRITON_CACHE_DIR": f"{home}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor",
        "FLASHINFER_WORKSPACE_BASE": f"{home}/flashinfer",
        "SGLANG_CACHE_DIR": f"{home}/sglang-cache",
        # Kernels are compiled when they are needed: all sizes ahead would take many minutes.
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CUDA_HOME": "${CUDA_HOME:-/usr/local/cuda}",
        "TORCH_CUDA_ARCH_LIST": "9.0a",
    }
    return exports(variables)


def exports(variables: Mapping[str, str]) -> str:
    """The lines of a shell script that set `variables`."""
    return "".join(f"export {name}={value}\n" for name, value in variables.items())


def cuda_libraries() -> str:
    """The folders of the CUDA libraries that came with PyTorch."""
    folders: set[str] = set()
    for root in import_module("nvidia").__path__:
        folders |= {str(path.parent) for path in Path(root).rglob("lib*.so*")}
    return ":".join(sorted(folder for folder in folders if "stubs" not in folder))


def add_caches(folder: Path, home: Path) -> Iterator[str]:
    """Unpack the caches that `save_caches` wrote into `folder`; their names."""
    for path in sorted(folder.glob("cache-*.tar.xz")):
        with tarfile.open(path, "r:xz") as archive:
            archive.extractall(home, **_filter("data"))
        yield path.name


def save_caches(folder: Path, home: Path) -> Iterator[Path]:
    """Write what was compiled below `home` into `folder`, a file a cache; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in CACHES:
        if (home / name).is_dir():
            path = folder / f"cache-{name}.tar.xz"
            with tarfile.open(path, "w:xz") as archive:
                archive.add(home / name, name, filter=_compiled)
            yield path


def _compiled(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith((".o", ".lock")) else member


def main(arguments: list[str] | None = None) -> None:
    """Do what is asked, and say what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("unpack", "save-caches"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--home", type=Path, default=HOME)
    options = parser.parse_args(arguments)
    if options.command == "save-caches":
        for path in save_caches(options.folder, options.home):
            print(f"{path}: {path.stat().st_size // 1024} KiB")
        return
    missing = unpack(options.folder, options.home)
    if missing:
        print("still missing:", *missing)
        return
    if (options.home / "site/torch").exists():
        link_cuda(options.home / "site")
    script = options.home / "env.sh"
    script.write_text(environment(options.home, cuda_libraries()))
    caches = list(add_caches(options.folder / "caches", options.home))
    print(f"ready: . {script}", *([f"(with {', '.join(caches)})"] if caches else []))


if __name__ == "__main__":
    os.umask(0o022)
    main()
