"""What goes into a pack: wheels of one release, and what of them a run on Hopper never uses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["FA3", "SGLANG", "Recipe", "kept_models", "starting"]

FA3 = (
    r"prepare_scheduler|combine|"
    r"hdim(192_128|256|64_512|diff)_bf16(_paged)?(_split)?(_packgqa)?_sm90"
)
"""Of FlashAttention-3, in bf16: dense attention (V3.2: 192/128, GLM-5: 256) and absorbed decode
(64/512)."""
_MODELS = frozenset({
    "__init__", "registry", "deepseek_v2", "deepseek_nextn", "deepseek", "glm4_moe", "utils",
    "transformers",
})  # fmt: skip


def _nothing(_: Path) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Recipe:
    """What goes into a pack."""

    wheels: str
    """Their names and versions, without their dependencies."""
    dropped: str
    """A regular expression: beginnings of names of files that a run never uses."""
    libraries: str
    """A regular expression: the libraries of which only one architecture's code stays."""
    stand_ins: Path
    """A folder whose modules take the place of packages that are not packed."""
    keep: Mapping[str, str] = field(default_factory=dict)
    """By the beginning of a library's file name, the sources of which device code stays."""
    prune: Callable[[Path], None] = _nothing
    """Takes away what is left out besides, of the folder in which all wheels lie."""
    preset: int = 9
    """Of xz: a pack of gigabytes takes an hour at 9."""


def starting(*names: str) -> str:
    """A regular expression for what begins with one of `names`."""
    return "|".join(map(re.escape, names))


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
        named = {name for stem in found for name in _imports(inside[stem])}
        named |= {name for stem in found for name in re.findall(r"(?m)^from \.(\w+)", inside[stem])}
        found = (named & inside.keys()) - kept
    return kept


def _imports(text: str) -> Iterator[str]:
    return (found[1] for found in re.finditer(r"\bmodels(?:\.| import )(\w+)\b", text))


# Wheels without their dependencies: the host has PyTorch's, and stand_ins/ takes the place of some.
_SERVER = (
    "apache-tvm-ffi==0.1.11 cuda-tile==1.7.0 loguru==0.7.3 dill==0.4.1 gguf==0.19.0 "
    "fastapi==0.121.3 starlette==0.49.3 annotated-doc==0.0.7 uvicorn==0.54.0 "
    "python-multipart==0.0.34 pydantic==2.12.5 pydantic-core==2.41.5 annotated-types==0.8.0 "
    "typing-inspection==0.4.5 msgspec==0.22.0 orjson==3.13.0 partial-json-parser==0.2.1.1.post7 "
    "pybase64==1.5.1 pyzmq==27.3.0 setproctitle==1.3.8 distro==1.9.0 jiter==0.19.0 sniffio==1.3.1 "
)
_DROPPED = starting(
    "sglang/multimodal_gen/", "sglang/test/", "sglang/benchmark/", "sglang/eval/", "sglang/cli/",
    "sglang/srt/server/_core", "sglang/srt/grpc/_core", "sglang/srt/multimodal/_core",
    "sgl_kernel/sm100/", "sgl_kernel/infllm_ops", "sgl_kernel/testing/",
    "flashinfer/data/cutlass/test/", "flashinfer/data/cutlass/examples/",
    "flashinfer/data/cutlass/tools/profiler/",
)  # fmt: skip
_DROPPED_WITH_TORCH = "|".join((
    _DROPPED,
    r"torch/(include|share|bin/(?!torch_shm_manager$))|torch/.*\.(a|cmake|h|hpp|pyi)$",
    r"torch/testing/_internal/(common_methods|generated/|opinfo/definitions/)",
    # ptxas is the host's (benchmarks/engine/host.py).
    r"triton/(instrumentation|plugins|profiler)/|triton/backends/amd/(lib|include)",
    r"triton/_C/(libproton|.*\.a$)|triton/backends/nvidia/(bin/|lib/cupti|lib/.*\.a$)",
    r"triton/FileCheck|torchvision\.libs/|torchvision/image\.so|nvidia/nccl/include/",
    r"sglang/srt/rust_extensions/_(server|bench|grpc|multimodal)",
    r"flashinfer/data/(cutlass/(python|tools/library)|cccl/python)/",
    r"flashinfer/data/csrc/(alphamoe|blackwell_|cake_|experimental/|fmha_v2/|gdn/|kda/)",
    # These three are V3's router.
    r"flashinfer/data/csrc/fused_moe/(?!noAuxTc|moeTopKFuncs|cake_deepseek_fused_routing)",
    r"flashinfer/(fused_moe/backends/cudnn_frost/artifacts|moe_ep/kernel_src|experimental/.*/csrc)/",
    r"transformers/(cli/|models/.*/(modular|convert)_)|.*\.dist-info/(RECORD|licenses/|sboms/)",
))  # fmt: skip
_STAND_INS = Path(__file__).with_name("stand_ins")

SGLANG = {
    "0.5.17": Recipe(
        "sglang==0.5.17 sglang-kernel==0.4.5 sgl-deep-gemm==0.1.5.post1 transformers==5.12.1 "
        "flashinfer-python==0.6.15.post1 tokenizers==0.22.2 compressed-tensors==0.20.0 "
        "openai==2.6.1 " + _SERVER,
        _DROPPED, r"sgl_kernel/.*\.so", _STAND_INS, {"flash_ops": FA3}, _prune_models,
    ),
    "0.5.23": Recipe(
        "torch==2.14.1 triton==3.8.0 torchvision==0.29.1 nvidia-nccl-cu13==2.30.7 "
        "sglang==0.5.23 sglang-kernel==0.4.10 sgl-flash-mla==1.0.0 sgl-deep-gemm==0.2.3.post2 "
        "flashinfer-python==0.7.2 transformers==5.19.0 huggingface-hub==1.33.0 tokenizers==0.23.2 "
        "compressed-tensors==0.18.0 openai==2.8.0 jsonschema==4.26.0 referencing==0.37.0 "
        "jsonschema-specifications==2025.9.1 rpds-py==2026.9.1 " + _SERVER,
        _DROPPED_WITH_TORCH,
        r"(torch/lib|torchvision|triton/_C|nvidia/nccl/lib|sgl_kernel|flash_mla|deep_gemm)/.*"
        r"\.so(\.\d+)*",
        _STAND_INS,
        # Without PyTorch's own FlashAttention-2 and the backward passes of attention.
        {"flash_ops": FA3, "libtorch_cuda.so": r"^(?!flash_(fwd|bwd)_|cutlassB)"},
        _prune_models, preset=6,
    ),
}  # fmt: skip
"""By release. Each next one between them pins PyTorch 2.13 (up to 0.5.21) or 2.14.1."""
