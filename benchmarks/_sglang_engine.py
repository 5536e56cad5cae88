"""SGLang 0.5.15's real attention backend, imported from its wheel without the rest of SGLang.

`pack` puts what is needed into a folder: SGLang's sources and, of the 615 MB of sglang-kernel,
FlashMLA. `install` makes `import sglang...` find modules there, except for those in `_STUBS`,
which would bring the scheduler, the model code and their dependencies along.
"""

from __future__ import annotations

import ctypes
import enum
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

__all__ = [
    "BACKEND",
    "VERSION",
    "dense",
    "install",
    "pack",
    "torch_kernels",
    "unpack",
    "without_triton",
]

VERSION = "0.5.15"
BACKEND = "sglang.srt.layers.attention.dsa_backend"
_KERNELS = "sglang-kernel==0.4.4"
_SOURCES = (
    "sglang/srt/environ.py", "sglang/srt/plugins/", "sglang/srt/layers/attention/",
    "sglang/srt/model_executor/forward_batch_info.py", "sglang/jit_kernel/",
)  # fmt: skip
_FLASHMLA = ("sgl_kernel/flash_mla.py", "sgl_kernel/flashmla_ops.abi3.so")
_ENTRY = "[sglang.srt.plugins]\nnsa_tune = nsa_tune.engines.sglang:register\n"
_CAPTURE = "sglang.srt.model_executor.runner_backend_utils"


def pack(folder: Path) -> None:
    """Fill `folder` from the package index."""
    with TemporaryDirectory() as wheels:
        for requirement in (f"sglang=={VERSION}", _KERNELS):
            command = [
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                "--only-binary=:all:", "--implementation=cp", "--abi=cp311", "--abi=abi3",
                "--python-version=3.11", "--platform=manylinux_2_34_x86_64",
                "--platform=manylinux2014_x86_64", f"--dest={wheels}", requirement,
            ]  # fmt: skip
            subprocess.run(command, check=True)
        unpack(Path(wheels).glob("*.whl"), folder)


def unpack(wheels: Iterable[Path], folder: Path) -> None:
    """Fill `folder` from wheels, and make it a place that nsa-tune seems to be installed in."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                source = name.startswith(_SOURCES) and name.endswith(".py")
                if source or name in _FLASHMLA or name.endswith("dist-info/METADATA"):
                    archive.extract(name, folder)
    plugin = folder / "nsa_tune-0.1.0.dist-info"
    plugin.mkdir(exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: nsa-tune\nVersion: 0.1.0\n")
    (plugin / "entry_points.txt").write_text(_ENTRY)


def install(folder: Path, sm: int, stand_ins: dict[str, dict[str, Any]]) -> None:
    """Make the packed SGLang importable, as if on a GPU of compute capability `sm`."""
    # The indexer's part of the top-k is done by the caller.
    os.environ["SGLANG_OPT_USE_TOPK_V2"] = "0"
    sys.path.insert(0, str(folder))
    if not stand_ins:
        _load_nvrtc()
    names = {**_stubs(folder, sm), **stand_ins}
    sys.meta_path.insert(0, _Finder(folder, names))


def _load_nvrtc() -> None:
    """FlashMLA is linked to nvrtc, which PyTorch's wheels have in a folder of their own."""
    for place in Path(torch.__file__).parents[1].glob("nvidia/**/libnvrtc.so.1[2-9]"):
        ctypes.CDLL(str(place), mode=ctypes.RTLD_GLOBAL)


class _Finder(MetaPathFinder):
    """Stubs and packages by name; modules of the folder are found as usual."""

    def __init__(self, folder: Path, stubs: dict[str, dict[str, Any]]) -> None:
        self._folder = folder
        self._stubs = stubs

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A stub, or a package whose own __init__ is not run."""
        inside = self._folder.joinpath(*fullname.split("."))
        package = inside.is_dir() or any(one.startswith(f"{fullname}.") for one in self._stubs)
        real = fullname == "sglang.srt.plugins" or not fullname.startswith("sgl")
        if fullname not in self._stubs and (real or not package):
            return None
        spec = ModuleSpec(fullname, _Stub(self._stubs.get(fullname, {})), is_package=True)
        spec.submodule_search_locations = [str(inside)]
        return spec


class _Stub(Loader):
    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual kind."""

    def exec_module(self, module: ModuleType) -> None:
        """Give it its names."""
        vars(module).update(self._names)


def _class(name: str) -> type:
    return type(name, (), {})


def _no(*_: Any, **__: Any) -> bool:
    return False


def _modes(folder: Path) -> Any:
    """The engine's own ForwardMode, out of a module that imports half of the engine."""
    import ast

    path = folder / "sglang/srt/model_executor/forward_batch_info.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "ForwardMode":
            space: dict[str, Any] = {"IntEnum": enum.IntEnum, "auto": enum.auto, "__name__": "m"}
            exec(compile(ast.Module([node], []), str(path), "exec"), space)
            return space["ForwardMode"]
    raise LookupError(f"{path} has no ForwardMode")


def _stubs(folder: Path, sm: int) -> dict[str, dict[str, Any]]:
    parallel = SimpleNamespace(attn_tp_size=1, attn_cp_size=1)
    arguments = SimpleNamespace(enable_dsa_prefill_context_parallel=False)
    utils: dict[str, Any] = {
        "is_cuda": lambda: True,
        "is_hip": _no,
        "is_npu": _no,
        "is_gfx95_supported": _no,
        "is_blackwell": lambda: sm >= 100,
        "is_sm100_supported": lambda: 100 <= sm < 110,
        "get_device_sm": lambda: sm,
        "get_bool_env_var": lambda name, default="false": default == "true",
        "ceil_align": lambda x, y: -(-x // y) * y,
        "ceil_div": lambda x, y: -(-x // y),
    }
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    return {
        "sglang.srt.utils": utils,
        "sglang.srt.utils.common": utils,
        "sglang.srt.debug_utils.cuda_coredump": {},
        "sglang.kernel_api_logging": {"debug_kernel_api": lambda function: function},
        "sglang.srt.configs.model_config": {
            "is_deepseek_dsa": lambda config: True,
            "get_dsa_index_topk": lambda config: config.index_topk,
        },
        "sglang.srt.runtime_context": {"get_parallel": lambda: parallel},
        "sglang.srt.server_args": {"get_global_server_args": lambda: arguments},
        "sglang.srt.layers.dp_attention": {"DpPaddingMode": _class("DpPaddingMode")},
        "sglang.srt.layers.attention.dsa.dsa_indexer": {
            "BaseIndexerMetadata": _class("BaseIndexerMetadata")
        },
        "sglang.srt.layers.utils.cp_utils": {
            "cp_all_gather_rerange_output": nothing,
            "cp_split_and_rebuild_position": nothing,
        },
        "sglang.srt.model_executor.forward_batch_info": {
            "ForwardMode": _modes(folder),
            "ForwardBatch": _class("ForwardBatch"),
        },
        f"{_CAPTURE}.breakable_cuda_graph": {"is_in_breakable_cuda_graph": _no},
        f"{_CAPTURE}.breakable_cuda_graph.context": {"is_in_breakable_cuda_graph": _no},
        f"{_CAPTURE}.tc_piecewise_cuda_graph": {"is_in_tc_piecewise_cuda_graph": _no},
        "sglang.jit_kernel.utils": {"is_arch_support_pdl": _no},
        "sglang.jit_kernel.concat_mla": {
            "concat_mla_absorb_q": lambda nope, rope: torch.cat((nope, rope), dim=-1)
        },
        # Hopper's FlashAttention-3 is 578 MB of sglang-kernel: torch computes MHA here.
        "sglang.jit_kernel.flash_attention": {
            "flash_attn_varlen_func": dense,
            "flash_attn_with_kvcache": nothing,
        },
        "sgl_kernel": {},
    }


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    **_: Any,
) -> torch.Tensor:
    """Causal attention of each sequence's last queries over all of its keys, in torch."""
    parts = []
    q_at, k_at = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(q_at) - 1):
        queries, keys = q[q_at[i] : q_at[i + 1]], k[k_at[i] : k_at[i + 1]]
        values = v[k_at[i] : k_at[i + 1]]
        scores = torch.einsum("qhd,khd->hqk", queries.float(), keys.float()) * softmax_scale
        last = torch.arange(len(queries), device=q.device) + len(keys) - len(queries)
        later = torch.arange(len(keys), device=q.device)[None] > last[:, None]
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, values.float()).to(q.dtype))
    return torch.cat(parts)


def _dequantized(packed: torch.Tensor) -> torch.Tensor:
    """Rows [tokens, 576] of FlashMLA's packed fp8 rows, in torch."""
    rows = packed.view(torch.uint8).reshape(-1, 656)
    values = rows[:, :512].view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    latent = (values * scales[..., None]).reshape(-1, 512).to(torch.bfloat16)
    return torch.cat((latent, rows[:, 528:].contiguous().view(torch.bfloat16)), dim=-1)


def _sparse(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    keys = kv[indices.clamp_min(0)].float()
    scores = torch.einsum("thd,tkd->thk", q.float(), keys) * scale
    weights = scores.masked_fill((indices < 0)[:, None], -torch.inf).softmax(-1)
    return torch.einsum("thk,tkc->thc", weights, keys[..., :512]).to(q.dtype)


def _expanded(
    extend_lens: torch.Tensor, seq_lens: torch.Tensor, total: int, most: int
) -> torch.Tensor:
    """How many keys each new token sees."""
    pairs = zip(extend_lens.tolist(), seq_lens.tolist(), strict=True)
    rows = [torch.arange(kv - new + 1, kv + 1, dtype=torch.int32) for new, kv in pairs]
    return torch.cat(rows)


def without_triton() -> None:
    """SGLang's own references in place of two kernels that a CPU interprets slowly or not."""
    quantizing = import_module("sglang.srt.layers.attention.dsa.quant_k_cache")
    quantizing.quantize_k_cache = quantizing._quantize_k_cache_ref  # type: ignore[attr-defined]
    import_module(BACKEND).seqlens_expand_triton = _expanded  # type: ignore[attr-defined]


def torch_kernels() -> dict[str, dict[str, Any]]:
    """Torch in place of the CUDA kernels, for a rehearsal on a CPU."""

    def sparse_forward(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int
    ) -> tuple[torch.Tensor, None, None]:
        assert d_v == 512
        assert q.shape[1] % 64 == 0
        return _sparse(q, kv[:, 0], indices[:, 0], sm_scale), None, None

    def with_kvcache(
        q: torch.Tensor, k_cache: torch.Tensor, indices: torch.Tensor, softmax_scale: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        kv = _dequantized(k_cache)
        return _sparse(q[:, 0], kv, indices[:, 0], softmax_scale)[:, None], None

    def paged_logits(
        q: torch.Tensor, kv: torch.Tensor, weights: torch.Tensor, lens: torch.Tensor,
        block_table: torch.Tensor, schedule: torch.Tensor, longest: int, clean_logits: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert lens.shape == q.shape[:2]
        # A page holds its 64 keys, then their scales, which are 1 here.
        pages = kv.reshape(len(kv), -1)[:, : 64 * 128].contiguous().view(torch.float8_e4m3fn)
        chosen = pages.float().view(-1, 64, 128)[block_table.long()].flatten(1, 2)
        scores = torch.einsum("bnhd,bkd->bnhk", q.float(), chosen).relu()
        return torch.einsum("bnhk,bnh->bnk", scores, weights.view(*q.shape[:3])).flatten(0, 1)

    return {
        "sgl_kernel.flash_mla": {
            "flash_mla_sparse_fwd": sparse_forward,
            "flash_mla_with_kvcache": with_kvcache,
            "get_mla_metadata": lambda **_: (torch.zeros(1), torch.zeros(1)),
        },
        "deep_gemm": {
            "get_num_sms": lambda: 132,
            "get_paged_mqa_logits_metadata": lambda lens, block, sms: torch.zeros(1),
            "fp8_paged_mqa_logits": paged_logits,
        },
    }
