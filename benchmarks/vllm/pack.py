"""Gather vLLM and what it needs for a Hopper host that has PyTorch but no network.

    python -m benchmarks.vllm.pack PACK [--parts N]

It downloads wheels (367 MB), leaves out what a run never uses, and writes PACK/pack.json and
PACK/parts/1, 2, ...: 46 MiB in all. Choose a PACK that git ignores. nsa-tune itself is not in it: a
run takes it from the checkout.

vLLM 0.33.0 asks for PyTorch 2.14; its libraries keep to PyTorch's stable interface and load with
2.11 as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.engine.pack import Pack
from benchmarks.engine.recipes import Recipe, starting

__all__ = ["RECIPE", "main"]

_WHEELS = (
    "vllm==0.33.0 transformers==5.20.2 tokenizers==0.23.3 huggingface-hub==2.4.0 "
    "safetensors==0.8.0 compressed-tensors==0.17.0 depyf==0.20.0 astor==0.8.1 dill==0.4.1 "
    "loguru==0.7.3 gguf==0.19.0 fastapi==0.165.0 starlette==1.10.0 annotated-doc==0.0.7 "
    "pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 "
    "typing-extensions==4.16.0 openai==3.54.0 distro==1.9.0 jiter==0.19.0 sniffio==1.3.1 "
    "anyio==4.16.0 httpx==0.28.1 httpx2==2.16.2 httpcore==1.0.9 httpcore2==2.16.2 h11==0.16.0 "
    "truststore==0.10.5 idna==3.20 certifi==2026.10.18 requests==2.34.2 urllib3==2.8.0 "
    "charset-normalizer==3.5.2 msgspec==0.22.0 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 "
    "pyzmq==27.3.0 setproctitle==1.3.8 blake3==1.0.11 cachetools==8.0.1 cbor2==6.2.1 "
    "cloudpickle==3.1.2 diskcache==5.6.3 einops==0.8.2 filelock==4.2.11 fsspec==2026.9.0 "
    "ijson==3.6.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 "
    "rpds-py==2026.9.1 attrs==26.1.0 lark==1.3.1 packaging==26.3 prometheus-client==0.26.0 "
    "psutil==7.2.2 py-cpuinfo==9.0.0 python-json-logger==4.2.0 pyyaml==6.0.3 regex==2026.11.15 "
    "tqdm==4.70.1 click==8.5.1"
)
_DROPPED = starting(
    "vllm/vllm-rs", "vllm/_flashkda_C", "vllm/_qutlass_C", "vllm/vllm_flash_attn/_vllm_fa2_C",
    "vllm/third_party/fmha_sm100/", "vllm/third_party/tml_fa4/", "vllm/benchmarks/",
    "vllm/entrypoints/serve/instrumentator/static/",
    "vllm/model_executor/layers/fused_moe/configs/",
    "vllm/model_executor/layers/quantization/utils/configs/",
)  # fmt: skip
_LIBRARIES = r"vllm/(vllm_flash_attn/)?_\w+_(C|libtorch)\.abi3\.so"
_FA3 = r"prepare_scheduler|combine|hdim(192_128|64_512)_bf16(_paged)?(_split)?(_packgqa)?_sm90"
"""Of FlashAttention-3: dense attention (192/128) and absorbed decode (64/512), both in bf16."""

RECIPE = Recipe(
    wheels=_WHEELS, dropped=_DROPPED, libraries=_LIBRARIES,
    stand_ins=Path(__file__).with_name("stand_ins"), keep={"_vllm_fa3_C": _FA3},
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Build a pack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", type=int, help="how many; parts of 57 MiB where not given")
    options = parser.parse_args(arguments)
    Pack(options.folder.resolve(), RECIPE).build(parts=options.parts)


if __name__ == "__main__":
    main()
