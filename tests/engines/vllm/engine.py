"""vLLM's metadata builders with the bodies of their own decisions and nothing else.

The methods and functions are the wheel's; what they read is made of plain attributes, and kernels
are stand-ins.
"""

from __future__ import annotations
import __future__

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from nsa_tune.engines.plugin import wrapped
from nsa_tune.engines.vllm.backend import around_init
from nsa_tune.engines.vllm.prefill import around_build, around_capture
from tests.engines.wheels import Wheel

FLASHMLA = "vllm/v1/attention/backends/mla/flashmla_sparse.py"
FA3 = "vllm/v1/attention/backends/mla/flashattn_mla_sparse.py"
COMMON = "vllm/model_executor/layers/attention/sparse_mla_attention.py"
UTILS = "vllm/v1/attention/backends/utils.py"
BACKEND = "vllm/v1/attention/backend.py"
DENSE = "vllm/model_executor/layers/attention/mla_attention.py"
FLASHATTN = "vllm/v1/attention/backends/mla/flashattn_mla.py"

LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(61)]

Lens = list[tuple[int, int]]
"""(prefix, new) of each request, in the order of the batch."""


class _Torch:
    """torch, without what a CPU does not have."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*shape: Any, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
        del pin_memory
        return torch.zeros(*shape, **rest)


class _Groups:
    """Puts a base's generic form away: `Base[T]` is `Base`."""

    def __class_getitem__(cls, item: Any) -> type:
        del item
        return cls


@dataclass
class _Common:
    """A step's metadata as far as builders read it."""

    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    max_logits_per_req: int | None = None
    is_prefilling: Any = None
    dcp_local_seq_lens: Any = None
    req_idx: Any = None
    mm_req_doc_ranges: Any = None

    @property
    def query_start_loc(self) -> torch.Tensor:
        return self.query_start_loc_cpu

    @property
    def seq_lens(self) -> torch.Tensor:
        assert self.seq_lens_cpu_upper_bound is not None
        return self.seq_lens_cpu_upper_bound


class Engine:
    """One release's builder classes, plain or with the plug-in's hooks; each call makes them anew,
    for the hooks are put in place."""

    def __init__(self, wheel: Wheel) -> None:
        self.wheel = wheel
        self.names = _names()
        for file, paths in _DEFINITIONS.items():
            for path in paths:
                self._define(file, path)

    def flashmla(self, *, hooked: bool) -> type:
        """The builder of FlashMLA's backend."""
        methods = ["build", "_build_fp8_mixed_decode_prefill", "_build_fp8_separate_prefill_decode"]
        base = self._common(hooked)
        kind = self._class(FLASHMLA, "FlashMLASparseMetadataBuilder", methods, base)
        kind.metadata_cls = self.names["FlashMLASparseMetadata"]  # type: ignore[attr-defined]
        return _with_hooks(kind, {"build": around_build} if hooked else {})

    def fa3(self, *, hooked: bool) -> type:
        """The builder of FlashAttention-3's backend, which has no `build` of its own."""
        base = self._common(hooked)
        kind = self._class(FA3, "FlashAttnMLASparseMetadataBuilder", ["build"], base)
        kind.metadata_cls = self.names["SparseMLACommonMetadata"]  # type: ignore[attr-defined]
        return kind

    def dense(self, *, hooked: bool) -> type:
        """The builder of dense MLA with FlashAttention, with its own constructors."""
        base = self._class(BACKEND, "AttentionMetadataBuilder", _BASE, _Groups)
        common = self._class(DENSE, "MLACommonMetadataBuilder", _DENSE, base)
        _with_hooks(common, {"build": around_build} if hooked else {})
        own = ["__init__", "_build_decode", "_schedule_decode"]
        kind: Any = self._class(FLASHATTN, "FlashAttnMLAMetadataBuilder", own, common)
        kind.query_len_support = _VARLEN.VARLEN
        return _with_hooks(kind, {"__init__": around_init} if hooked else {})

    def _builder(self, hooked: bool) -> type:
        methods = ["build_for_cudagraph_capture", "build_for_drafting"]
        kind = self._class(BACKEND, "AttentionMetadataBuilder", methods, _Groups)
        return _with_hooks(kind, {"build_for_cudagraph_capture": around_capture} if hooked else {})

    def _common(self, hooked: bool) -> type:
        methods = ["build", "_build_prefill_fields"]
        base = self._builder(hooked)
        kind: Any = self._class(COMMON, "SparseMLACommonMetadataBuilder", methods, base)
        kind._build_req_id_per_token = lambda builder, batch: batch.query_start_loc_cpu
        kind._build_chunked_context_fields = lambda builder, *_: None
        return _with_hooks(kind, {"build": around_build} if hooked else {})

    def _define(self, file: str, path: str) -> None:
        self.names[path] = _executed([self.wheel.definition(file, path)], self.names)[path]

    def _class(self, file: str, name: str, methods: Iterable[str], base: type) -> type:
        """A class of that name with the wheel's methods and plain class attributes."""
        whole = self.wheel.definition(file, name)
        assert isinstance(whole, ast.ClassDef)
        body: list[ast.stmt] = [
            node
            for node in whole.body
            if (isinstance(node, ast.FunctionDef) and node.name in methods)
            or (isinstance(node, ast.AnnAssign) and _simple(node))
        ]
        made = ast.ClassDef(
            name=name, bases=[ast.Name("_Base", ast.Load())], keywords=[],
            body=body or [ast.Pass()], decorator_list=[],
        )  # fmt: skip
        found = _executed([made], {**self.names, "_Base": base})[name]
        assert isinstance(found, type)
        return found


def _with_hooks(kind: type, hooks: dict[str, Callable[..., Any]]) -> type:
    """`kind` with hooks in place, as the plug-in puts them there."""
    for name, hook in hooks.items():
        setattr(kind, name, wrapped(getattr(kind, name), hook))
    return kind


def _simple(node: ast.AnnAssign) -> bool:
    return isinstance(node.value, ast.Constant)


def _executed(nodes: list[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    module = ast.fix_missing_locations(ast.Module(nodes, []))
    flags = __future__.annotations.compiler_flag
    # One dictionary for all: methods find each other's classes in it.
    exec(compile(module, "wheel", "exec", flags, dont_inherit=True), names)
    return names


_DEFINITIONS = {
    UTILS: ("split_decodes_and_prefills", "split_prefill_chunks"),
    COMMON: ("_use_dense_mha_prefill", "SparseMLAPrefillMetadata", "SparseMLACommonMetadata"),
    FLASHMLA: ("get_prefill_workspace_size", "FlashMLASparseMetadata"),
}
_BASE = ["__init__", "_init_reorder_batch_threshold", "build_for_drafting"]
_DENSE = [
    "__init__", "build", "build_for_cudagraph_capture", "_validate_dspark_dcp_support",
    "determine_chunked_prefill_workspace_size", "determine_prefill_query_data_type",
]  # fmt: skip
_VARLEN = SimpleNamespace(VARLEN="varlen", SINGLE_ONLY="single", UNIFORM="uniform")
_D = TypeVar("_D")


@dataclass
class _PrefillMetadata:
    block_table: Any = None
    query_start_loc: Any = None
    max_query_len: int = 0
    chunked_context: Any = None
    q_data_type: Any = None
    output_dtype: Any = None
    prefill_backend: Any = None
    query_lens_cpu: Any = None
    use_dense_mha: bool = False
    topk_mask_workspace: Any = None


@dataclass
class _Metadata(Generic[_D]):
    num_reqs: int = 0
    max_query_len: int = 0
    max_seq_len: int = 0
    num_actual_tokens: int = 0
    query_start_loc: Any = None
    slot_mapping: Any = None


def _names() -> dict[str, Any]:
    """The globals of the wheel's functions."""
    return {
        "__name__": "dataclasses", "torch": _Torch(), "np": np, "dataclass": dataclass,
        "ClassVar": ClassVar, "MLACommonPrefillMetadata": _PrefillMetadata,
        "MLACommonMetadata": _Metadata, "MLACommonDecodeMetadata": object,
        "get_mla_metadata": lambda: ("schedule", None), "PIN_MEMORY": False,
        "QueryLenSupport": _VARLEN, "get_dcp_group": lambda: SimpleNamespace(world_size=1),
        "current_platform": SimpleNamespace(is_cuda=lambda: True), "MLADims": SimpleNamespace,
        "get_num_attention_heads_from_layers": lambda *_: None,
        "is_quantized_kv_cache": lambda dtype: False,
        "align_mla_chunked_context_workspace_size": lambda _, size: size,
        "build_mla_chunked_context_metadata": lambda **given: None,
        "get_flash_attn_version": lambda: 3, "get_scheduler_metadata": lambda **given: None,
        "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False), "abstractmethod": lambda one: one,
        "FlashAttnMLAMetadata": SimpleNamespace, "FlashAttnMLADecodeMetadata": SimpleNamespace,
    }  # fmt: skip


def config(**changes: Any) -> Any:
    """A configuration as far as it is read: V3.2 at TP 8 with an fp8 pool."""
    heads = changes.pop("heads", 16)
    text = SimpleNamespace(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        index_n_heads=64, index_head_dim=128, index_topk=2048, num_hidden_layers=61,
    )  # fmt: skip
    attributes: dict[str, Any] = {
        "model_config": SimpleNamespace(
            hf_text_config=changes.pop("text", text), max_model_len=163840, dtype=torch.bfloat16,
            get_num_attention_heads=lambda _: heads,
        ),
        "cache_config": SimpleNamespace(cache_dtype=changes.pop("cache_dtype", "fp8_ds_mla")),
        "parallel_config": SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
            pipeline_parallel_size=1, use_ubatching=False, tensor_parallel_size=8,
        ),
        "attention_config": SimpleNamespace(
            hisparse_config=None, sparse_mla_force_mqa=False, indexer_tp_shard_min_rows=65536,
            sparse_mla_prefill_workspace_factor=5,
        ),
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=16384, max_num_seqs=256),
        "speculative_config": None,
    }  # fmt: skip
    for name, value in changes.items():
        holder, _, field = name.partition("__")
        if field:
            setattr(attributes[holder], field, value)
        else:
            attributes[holder] = value
    return SimpleNamespace(**attributes)


def builder_of(kind: type, given: Any, **changes: Any) -> Any:
    """A builder with the attributes that its decisions read, as its constructor leaves them."""
    builder: Any = object.__new__(kind)
    heads = given.model_config.get_num_attention_heads(None)
    packed = given.cache_config.cache_dtype == "fp8_ds_mla"
    attributes: dict[str, Any] = {
        "vllm_config": given,
        "model_config": given.model_config,
        "device": torch.device("cpu"),
        "topk_tokens": 2048,
        "reorder_batch_threshold": {16: 128, 32: 128, 64: 256, 128: 256}.get(heads, 256),
        "use_pcp": False,
        "dcp_world_size": 1,
        "cp_kv_cache_interleave_size": 1,
        "pcp_dcp_kv_gather": False,
        "use_fp8_kv_cache": packed,
        "num_heads": heads,
        "kv_cache_spec": SimpleNamespace(block_size=64),
        "chunked_prefill_workspace_size": 65536,
        "topk_mask_workspace": None,
        "max_model_len_tensor": torch.full((256,), 163840, dtype=torch.int32),
        "dummy_block_table": torch.zeros((256, 1), dtype=torch.int32),
        "_prefill_backend": SimpleNamespace(prepare_metadata=lambda prefill: None),
        **changes,
    }
    if kind.__name__ == "FlashMLASparseMetadataBuilder":
        attributes.setdefault("fp8_use_mixed_batch", heads < 32)
    for name, value in attributes.items():
        setattr(builder, name, value)
    return builder


def step_of(lens: Sequence[tuple[int, int]], **changes: Any) -> Any:
    """A step's common metadata."""
    news = torch.tensor([new for _, new in lens], dtype=torch.int32)
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    starts[1:] = torch.cumsum(news, 0)
    kv = torch.tensor([prefix + new for prefix, new in lens], dtype=torch.int32)
    attributes: dict[str, Any] = {
        "query_start_loc_cpu": starts,
        "seq_lens_cpu_upper_bound": kv,
        "num_reqs": len(lens),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": int(news.max()),
        "max_seq_len": int(kv.max()),
        "block_table_tensor": torch.zeros((len(lens), 1), dtype=torch.int32),
        "slot_mapping": torch.zeros(int(starts[-1]), dtype=torch.int64),
        **changes,
    }
    return _Common(**attributes)


def random_lens(random: Random, *, decode: int = 1) -> Lens:
    """A step as the scheduler sorts one: decodes first, then extends by their new tokens."""
    decoding = random.choice((0, 0, 1, 3, 40))
    decodes = [(random.randrange(1, 60000), decode) for _ in range(decoding)]
    most_prefix = random.choice((1, 1500, 60000))
    most_new = random.choice((4, 100, 300, 4000))
    many = most_new <= 300 and random.random() < 0.1
    if random.random() < 0.3:
        news = [random.randint(1, most_new)] * (60 if many else random.randint(1, 12))
    else:
        count = 60 if many else random.randint(0, 12)
        news = sorted(random.randint(1, most_new) for _ in range(count))
    extends = [(random.randrange(most_prefix), new) for new in news]
    return decodes + extends or [(7, 1)]


def compared(metadata: Any) -> dict[str, Any]:
    """All that a step's metadata says, as plain values."""
    return {name: _plain(value) for name, value in vars(metadata).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value if isinstance(value, int | float | str | slice) else type(value).__name__


def fp8_kind(metadata: Any) -> str:
    """What the layers make of the prefills that take no MHA: "mixed" or "separate"."""
    separate = type(metadata.fp8_extra_metadata).__name__ == "FP8SeparatePrefillDecode"
    assert metadata.fp8_use_mixed_batch is not separate
    return "separate" if separate else "mixed"


def stand_in_modules(**names: Any) -> dict[str, ModuleType]:
    """The modules that the plug-in asks at run time."""
    backend, envs = ModuleType("vllm.v1.attention.backend"), ModuleType("vllm.envs")
    parallel = ModuleType("vllm.distributed.parallel_state")
    vars(backend).update(max_decode_query_len=lambda _: names.get("decode_tokens", 1))
    vars(envs).update(VLLM_BATCH_INVARIANT=names.get("invariant", False))
    group = names.get("group", SimpleNamespace(world_size=1))
    vars(parallel).update(get_tp_group=lambda: group)
    parents = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.distributed")
    made = {name: ModuleType(name) for name in parents}
    return {**made, **{one.__name__: one for one in (backend, envs, parallel)}}
