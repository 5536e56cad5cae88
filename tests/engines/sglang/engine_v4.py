"""SGLang's V4 attention backend with the body of its own switch and nothing else.

The method and the modes are the wheel's; what they read is made of plain attributes.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from nsa_tune.engines.hooking import wrapped
from tests.engines.sglang.wheels import MODES, V4_BACKEND, Wheel

_CLASS = "DeepseekV4AttnBackend"
_UTILS = "sglang.srt.layers.attention.dsv4.sparse_prefill_utils"


@dataclass
class V4State:
    """What the stubs answer."""

    sparse: bool = True
    context_parallel: bool = False
    sm120: bool = False
    attn_tp_size: int = 1
    attn_cp_size: int = 1
    attn_dcp_size: int = 1
    prefill_graphs: str = "disabled"


class ForwardBatch(SimpleNamespace):
    """Any attributes, and weak references, as the engine's has them."""


@dataclass
class V4Engine:
    """The last release's V4 backend class, its modes, and the state of its stubs."""

    backend_class: type
    modes: Any
    state: V4State = field(default_factory=V4State)

    @classmethod
    def of(cls, wheel: Wheel, monkeypatch: Any) -> V4Engine:
        """The engine of `wheel`; what the plug-in imports of it is put into sys.modules."""
        state = V4State()
        modes = wheel.compiled(MODES, "ForwardMode", {"IntEnum": enum.IntEnum, "auto": enum.auto})
        names = {
            "is_cp_active": lambda forward_batch: state.context_parallel,
            "get_platform": lambda: SimpleNamespace(is_sm120=state.sm120),
            "envs": SimpleNamespace(
                SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=SimpleNamespace(get=lambda: state.sparse)
            ),
            "_LARGE_INDEXER_QUERY_THRESHOLD": 11673,
        }
        method = wheel.compiled(V4_BACKEND, f"{_CLASS}._use_sparse_prefill", names)
        for name, module in _modules(wheel, state).items():
            monkeypatch.setitem(sys.modules, name, module)
        return cls(type(_CLASS, (), {"_use_sparse_prefill": method}), modes, state)

    def hooked(self, hooks: dict[str, Callable[..., Any]], base: type | None = None) -> type:
        """The class, or one that inherits from it, with `hooks` around its methods."""
        kind = base or self.backend_class
        methods = {name: wrapped(getattr(kind, name), hook) for name, hook in hooks.items()}
        return type(_CLASS, (kind,), methods)

    def backend(self, kind: type | None = None, **changes: Any) -> Any:
        """A backend as the constructor leaves it, for DeepSeek V4 on Hopper."""
        backend: Any = object.__new__(kind or self.backend_class)
        attributes = {
            "trtllm_attn": False,
            "mega_attn": False,
            "is_dsv41": False,
            "low_ratios": (),
            "present_ratios": (4, 128),
            "is_draft_runner": False,
            "hisparse_coordinator": None,
            "enable_decoder_swa_bounded_replay": False,
            "dsv4_prefill_backend": "auto",
            "index_topk": 1024,
            "page_size": 256,
            "token_to_kv_pool": pool(),
            "forward_metadata": SimpleNamespace(late_layer_tail=None),
            **changes,
        }
        vars(backend).update(attributes)
        return backend

    def batch(
        self, prefix_lens: Sequence[int], extend_lens: Sequence[int], mode: str = "EXTEND"
    ) -> Any:
        """A forward batch as the scheduler makes one."""
        return ForwardBatch(
            forward_mode=self.modes[mode],
            extend_prefix_lens_cpu=list(prefix_lens),
            extend_seq_lens_cpu=list(extend_lens),
            tbo_children=None,
            tbo_parent_token_range=None,
        )

    def asked(self, backend: Any, batch: Any) -> set[bool]:
        """All answers that one pass hears: before the first layer, in each, and without rows."""
        rows = sum(batch.extend_seq_lens_cpu)
        return {
            backend._use_sparse_prefill(batch, num_qo_tokens=count)
            for count in (rows, *[rows] * 5, 0, rows + 64)
        }


def pool(ratios: Sequence[int] = (128, 4) * 30, layout: str = "v4", compressed: str = "v4") -> Any:
    """A KV pool as far as the plug-in reads it; the last layer is the draft's."""
    return SimpleNamespace(
        compression_ratios=[*ratios, 0],
        request_window=None,
        get_swa_key_layout=lambda: SimpleNamespace(value=layout),
        compressed_kv_layout=lambda ratio: SimpleNamespace(value=compressed),
    )


def v4_model_runner(layers: tuple[int, int] = (0, 60), **arguments: Any) -> Any:
    """A model runner as far as the plug-in reads it, for DeepSeek V4."""
    return SimpleNamespace(
        server_args=SimpleNamespace(
            **{"chunked_prefill_size": 8192, "enable_deterministic_inference": False, **arguments}
        ),
        layer_info=SimpleNamespace(start_layer=layers[0], end_layer=layers[1]),
        model_config=SimpleNamespace(
            num_attention_heads=128,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            v_head_dim=512,
            index_head_dim=128,
            window_size=128,
            hf_text_config=SimpleNamespace(index_n_heads=64),
        ),
    )


def _modules(wheel: Wheel, state: V4State) -> dict[str, ModuleType]:
    def module(name: str, **names: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(names)
        return made

    import os

    file = _UTILS.replace(".", "/") + ".py"
    q8 = wheel.compiled(
        file, "use_dsv4_q8kv8_sparse_prefill",
        {"os": os, "DSV4_Q8KV8_PREFILL_ENV": "SGLANG_DSV4_Q8KV8_PREFILL"},
    )  # fmt: skip

    def execution() -> Any:
        prefill = SimpleNamespace(backend=state.prefill_graphs)
        return SimpleNamespace(
            graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=prefill))
        )

    packages = ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention")
    found = {name: module(name) for name in (*packages, "sglang.srt.layers.attention.dsv4")}
    found["sglang.srt.runtime_context"] = module(
        "sglang.srt.runtime_context", get_parallel=lambda: state, get_exec=execution
    )
    found[_UTILS] = module(_UTILS, use_dsv4_q8kv8_sparse_prefill=q8)
    return found
