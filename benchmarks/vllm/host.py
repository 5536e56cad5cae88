"""Unpack vLLM on the GPU host, which needs no network.

    python3 -m benchmarks.vllm.host PACK     # then: . /tmp/vllm-pack/env.sh

PACK is what `benchmarks.vllm.pack` made. Where its parts come one at a time, call it with each: it
says what is missing. Run it in the checkout's root: the plug-in is taken from there.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.engine.host import cuda_libraries, exports, unpack

__all__ = ["HOME", "add_entry_point", "environment", "main"]

HOME = Path("/tmp/vllm-pack")
_GROUP, _ENTRY = "vllm.general_plugins", "nsa_tune = nsa_tune.engines.vllm:register"


def add_entry_point(site: Path) -> None:
    """Let vLLM find the plug-in of a checkout that is not installed."""
    folder = site / "nsa_tune-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: nsa-tune\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[{_GROUP}]\n{_ENTRY}\n")


def environment(home: Path, checkout: Path, libraries: str) -> str:
    """The script that a shell reads before a run."""
    return exports({
        "PYTHONPATH": f"{checkout}:{home}/site",
        "PYTHONUNBUFFERED": "1",
        "LD_LIBRARY_PATH": f"{libraries}:${{LD_LIBRARY_PATH:-}}",
        "VLLM_CACHE_ROOT": f"{home}/cache",
        "VLLM_PLUGINS": "nsa_tune",
        "DG_JIT_CACHE_DIR": f"{home}/deep_gemm",
        "TRITON_CACHE_DIR": f"{home}/triton",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CUDA_HOME": "${CUDA_HOME:-/usr/local/cuda}",
        "TORCH_CUDA_ARCH_LIST": "9.0a",
    })  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Unpack, and say what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--home", type=Path, default=HOME)
    options = parser.parse_args(arguments)
    missing = unpack(options.folder, options.home)
    if missing:
        print("still missing:", *missing)
        return
    add_entry_point(options.home / "site")
    script = options.home / "env.sh"
    script.write_text(environment(options.home, Path.cwd(), cuda_libraries()))
    print(f"ready: . {script}")


if __name__ == "__main__":
    os.umask(0o022)
    main()
