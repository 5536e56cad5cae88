"""SGLang's attention backend with the bodies of its own decisions and nothing else.

The methods are the wheel's; what they read is made of plain attributes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from nsa_tune.engines.plugin import wrapped
from tests.engines.sglang.wheels import BACKEND, MODES, Wheel

_CLASS = "DeepseekSparseAttnBackend"
_GRAPHS = "sglang.srt.model_executor.runner_backend_utils"
_TOPK = "sglang/srt/layers/attention/dsa/dsa_topk_backend.py"
DECISIONS = (
    "set_dsa_prefill_impl", "get_topk_transform_method", "_build_paged_mqa_schedule_2d_ctx_lens",
)  # fmt: skip


@dataclass
class State:
    """What the stubs answer."""

    sm: int = 90
    in_breakable: bool = False
    in_piecewise: bool = False
    context_parallel: bool = False
    dense_threshold: int = 2048
    chunk_capacity: int = 131072
    attn_cp_size: int = 1
    attn_dp_size: int = 1


@dataclass
class Engine:
    """One release's backend class, its modes, and the state of its stubs."""

    backend_class: type
    modes: Any
    transforms: Any
    state: State = field(default_factory=State)

    @classmethod
    def of(cls, wheel: Wheel, monkeypatch: Any) -> Engine:
        """The engine of `wheel`; its lazy imports are answered through sys.modules."""
        state = State()
        modes = wheel.compiled(MODES, "ForwardMode", {"IntEnum": enum.IntEnum, "auto": enum.auto})
        transforms = wheel.compiled(
            _TOPK, "TopkTransformMethod",
            {name: getattr(enum, name) for name in ("Enum", "IntEnum", "auto")},
        )  # fmt: skip
        names = _names(state, modes, transforms)
        names["_to_2d_context_lens"] = wheel.compiled(BACKEND, "_to_2d_context_lens", names)
        methods = {name: wheel.compiled(BACKEND, f"{_CLASS}.{name}", names) for name in DECISIONS}
        for name, module in _modules(state).items():
            monkeypatch.setitem(_sys_modules(), name, module)
        methods["forward_extend"] = lambda backend, *tensors, **named: tensors
        methods["_forward_fa3"] = lambda backend, **tensors: tensors
        methods["_forward_flashmla_sparse"] = lambda backend, **tensors: tensors
        return cls(type(_CLASS, (), methods), modes, transforms, state)

    def hooked(self, hooks: dict[str, Callable[..., Any]]) -> type:
        """The class with `hooks` around its methods, as the plug-in puts them there."""
        return self.hooked_class(self.backend_class, hooks)

    def hooked_class(self, base: type, hooks: dict[str, Callable[..., Any]]) -> type:
        """The same for another class."""
        methods = {name: wrapped(getattr(base, name), hook) for name, hook in hooks.items()}
        return type(_CLASS, (base,), methods)

    def backend(self, kind: type | None = None, **changes: Any) -> Any:
        """A backend with the attributes that its decisions read, for DeepSeek-V3.2 with fp8 KV."""
        backend: Any = object.__new__(kind or self.backend_class)
        fp8 = changes.pop("fp8", True)
        attributes: dict[str, Any] = {
            "use_mha": False,
            "dsa_prefill_impl": "flashmla_kv" if fp8 else "flashmla_sparse",
            "dsa_kv_cache_store_fp8": fp8,
            "kv_cache_dim": 656 if fp8 else 576,
            "token_to_kv_pool": SimpleNamespace(
                dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16
            ),
            "hisparse_coordinator": None,
            "supports_mha_one_shot": True,
            "num_q_heads": 128,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "dsa_index_topk": 2048,
            "num_splits": 0,
            "speculative_num_draft_tokens": None,
            "_is_in_breakable_cuda_graph": lambda: self.state.in_breakable,
            "_is_in_tc_piecewise_cuda_graph": lambda: self.state.in_piecewise,
            "_get_device_sm": lambda: self.state.sm,
            "_is_blackwell": lambda: self.state.sm >= 100,
            **changes,
        }
        for name, value in attributes.items():
            setattr(backend, name, value)
        auto = backend.dsa_prefill_impl == "flashmla_auto"
        backend.enable_auto_select_prefill_impl = auto
        return backend

    def batch(
        self, prefix_lens: Sequence[int], extend_lens: Sequence[int], mode: str = "EXTEND"
    ) -> Any:
        """A forward batch as the scheduler makes one: lists and a CPU tensor."""
        lens = [prefix + new for prefix, new in zip(prefix_lens, extend_lens, strict=True)]
        return SimpleNamespace(
            forward_mode=self.modes[mode],
            seq_lens_cpu=torch.tensor(lens, dtype=torch.int64),
            seq_lens_sum=sum(lens),
            extend_num_tokens=sum(extend_lens),
            extend_prefix_lens_cpu=list(prefix_lens),
            extend_seq_lens_cpu=list(extend_lens),
            tbo_children=None,
            tbo_parent_token_range=None,
            get_max_chunk_capacity=lambda: self.state.chunk_capacity,
        )

    def decided(self, backend: Any, batch: Any) -> tuple[bool, str, Any]:
        """Run the decision as `init_forward_metadata` does: (use_mha, impl, transform)."""
        backend.set_dsa_prefill_impl(batch)
        transform = backend.get_topk_transform_method(batch.forward_mode)
        return bool(backend.use_mha), backend.dsa_prefill_impl, transform


def model_runner(**arguments: Any) -> Any:
    """A model runner as far as the plug-in reads it."""
    return SimpleNamespace(
        tp_group=SimpleNamespace(rank_in_group=0, world_size=1),
        server_args=SimpleNamespace(
            **{"chunked_prefill_size": 8192, "dsa_paged_mqa_logits_backend": "auto", **arguments}
        ),
        layer_info=SimpleNamespace(num_effective_layers=61),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(index_n_heads=64),
            v_head_dim=128,
            index_head_dim=128,
        ),
    )


def _sys_modules() -> dict[str, ModuleType]:
    import sys

    return sys.modules


def _names(state: State, modes: Any, transforms: Any) -> dict[str, Any]:
    """The globals of the engine's methods."""
    threshold = SimpleNamespace(get=lambda: state.dense_threshold)
    return {
        "torch": torch,
        "ForwardMode": modes,
        "TopkTransformMethod": transforms,
        "envs": SimpleNamespace(
            SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD=threshold,
            SGLANG_FP8_PAGED_MQA_LOGITS_TORCH=SimpleNamespace(get=lambda: False),
        ),
        "is_dsa_enable_prefill_cp": lambda: state.context_parallel,
        "is_sm100_supported": lambda: 100 <= state.sm < 110,
        "get_platform": lambda: SimpleNamespace(is_sm100=100 <= state.sm < 110),
        "_IS_GFX95": False,
    }


def _modules(state: State) -> dict[str, ModuleType]:
    """What the methods import when they run, and what the plug-in does."""

    def module(name: str, **names: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(names)
        return made

    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.utils": {
            "get_device_sm": lambda: state.sm,
            "is_blackwell": lambda: state.sm >= 100,
        },
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: SimpleNamespace(
                attn_cp_size=state.attn_cp_size, attn_dp_size=state.attn_dp_size
            )
        },
        "sglang.srt.model_executor": {},
        _GRAPHS: {},
        f"{_GRAPHS}.breakable_cuda_graph": {},
        f"{_GRAPHS}.breakable_cuda_graph.context": {
            "is_in_breakable_cuda_graph": lambda: state.in_breakable
        },
        f"{_GRAPHS}.tc_piecewise_cuda_graph": {
            "is_in_tc_piecewise_cuda_graph": lambda: state.in_piecewise
        },
    }
    return {name: module(name, **names) for name, names in contents.items()}
