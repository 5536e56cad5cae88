"""SGLang's own selection of keys out of its wheels, with torch for its kernels."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from nsa_tune.backend.kernels.sampled_topk import sampled_topk_reference
from nsa_tune.engines.plugin import wrapped
from nsa_tune.engines.sglang.kernels.topk import around_topk
from tests.engines.sglang.wheels import Wheel

_FOLDER = "sglang/srt/layers/attention/dsa"
BACKEND, METADATA = f"{_FOLDER}/dsa_topk_backend.py", f"{_FOLDER}/dsa_indexer_metadata.py"
INDEXER = f"{_FOLDER}/dsa_indexer.py"
_PRECOMPUTED = f"{_FOLDER}/dsa_backend_mtp_precompute.py"
_V2 = "sglang.kernels.ops.attention.dsv4.topk"
TOPK, PAGE = 16, 8


def _paged(
    *,
    score: torch.Tensor,
    lengths: torch.Tensor,
    page_table_size_1: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor,
) -> torch.Tensor:
    """sgl_kernel's fast_topk_transform_fused, as its docstring and source have it."""
    places = sampled_topk_reference(score, lengths, topk, row_starts)
    counts = cu_seqlens_q.diff().long()
    sequence = torch.arange(len(counts)).repeat_interleave(counts)
    slots = page_table_size_1[sequence].gather(1, places.clamp_min(0).long())
    return torch.where(places < 0, -1, slots)


def _ragged(
    *,
    score: torch.Tensor,
    lengths: torch.Tensor,
    topk_indices_offset: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor,
) -> torch.Tensor:
    """sgl_kernel's fast_topk_transform_ragged_fused."""
    places = sampled_topk_reference(score, lengths, topk, row_starts)
    return torch.where(places < 0, -1, places + topk_indices_offset[:, None])


def _ragged_v2(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    *,
    out_offsets: torch.Tensor,
    out_indices: torch.Tensor,
    row_starts: torch.Tensor,
) -> None:
    """0.5.23's topk_transform_ragged_v2."""
    chosen = _ragged(
        score=logits, lengths=lengths, topk_indices_offset=out_offsets,
        topk=out_indices.shape[1], row_starts=row_starts,
    )  # fmt: skip
    out_indices.copy_(chosen)


class Engine:
    """One release's classes; `kind` is its DSATopKBackend with the plug-in's hook."""

    def __init__(self, wheel: Wheel, monkeypatch: Any) -> None:
        kernels = ModuleType("sgl_kernel")
        vars(kernels).update(
            fast_topk_transform_fused=_paged, fast_topk_transform_ragged_fused=_ragged
        )
        v2 = ModuleType(_V2)
        vars(v2).update(topk_transform_ragged_v2=_ragged_v2)
        for module in (kernels, v2):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        yes = SimpleNamespace(get=lambda: True)
        names: dict[str, Any] = {
            # Where a dataclass looks for what its annotations mean.
            "__name__": __name__,
            "torch": torch, "Enum": enum.Enum, "IntEnum": enum.IntEnum, "auto": enum.auto,
            "envs": SimpleNamespace(SGLANG_DSA_FUSE_TOPK=yes, SGLANG_OPT_USE_TOPK_V2=yes),
            "_is_hip": False, "dataclass": dataclass, "BaseIndexerMetadata": object,
        }  # fmt: skip
        for name in ("TopkTransformMethod", "_topk_transform_v2_ragged", "DSATopKBackend"):
            if wheel.has(BACKEND, name):
                names[name] = wheel.compiled(BACKEND, name, names)
        names["compute_cu_seqlens"] = wheel.compiled(_PRECOMPUTED, "compute_cu_seqlens", names)
        self.methods = names["TopkTransformMethod"]
        self.kind = names["DSATopKBackend"]
        self.backend = self.kind.SGL_KERNEL
        self._metadata = wheel.compiled(METADATA, "DSAIndexerMetadata", names)
        self.kind.topk_transform = wrapped(self.kind.topk_transform, around_topk)

    def metadata(self, prefill: Prefill, method: str) -> Any:
        """What the indexer asks in a prefill."""
        return self._metadata(
            attn_metadata=prefill.metadata(), topk_transform_method=self.methods[method]
        )


class Metadata(SimpleNamespace):
    """DSAMetadata: unlike its base it can be referred to weakly."""


class Prefill:
    """A prefill as SGLang's attention backend prepares it: (prefix, new tokens) a sequence."""

    def __init__(self, lens: Sequence[tuple[int, int]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def whole(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        kv_lens = [prefix + new for prefix, new in lens]
        firsts = [sum(kv_lens[:i]) for i in range(len(lens))]
        rows = [(i, prefix + j + 1) for i, (prefix, new) in enumerate(lens) for j in range(new)]
        self.new = whole([new for _, new in lens])
        self.sequences = whole([i for i, _ in rows])
        self.lengths = whole([length for _, length in rows])
        self.starts = whole([firsts[i] for i, _ in rows])
        self.max_kv = max(kv_lens)
        columns = sum(kv_lens)
        # Whole numbers, none twice in a row, so that there is one right answer; any beyond a row.
        scores = torch.rand(len(rows), columns + 3, generator=generator).argsort(1).float()
        self.logits = scores[:, :columns]
        width = -(-self.max_kv // PAGE)
        pages = torch.randperm(len(lens) * width, generator=generator).int().view(len(lens), -1)
        slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int()
        self.slots, self.pages = slots[:, : self.max_kv], pages

    def metadata(self) -> Any:
        """DSAMetadata, as far as the selection reads it."""
        ends = torch.nn.functional.pad(self.new.cumsum(0, dtype=torch.int32), (1, 0))
        return Metadata(
            max_seq_len_k=self.max_kv,
            page_size=PAGE,
            page_table_1=self.slots,
            real_page_table=self.pages,
            token_to_batch_idx=self.sequences,
            cu_seqlens_q=ends,
            topk_indices_offset=self.starts,
            dsa_seqlens_expanded=self.lengths,
        )

    def whole(self) -> dict[str, Any]:
        """What `Indexer._get_topk_ragged` passes for all rows at once."""
        return {"logits": self.logits, "topk": TOPK, "ks": self.starts}

    def chunk(self, start: int, end: int, *, ragged: bool) -> dict[str, Any]:
        """What it passes for some rows, where the logits of all take too much memory."""
        rows = slice(start, end)
        ones = torch.ones(len(self.logits), dtype=torch.int32)
        return {
            "logits": self.logits[rows],
            "topk": TOPK,
            "ks": self.starts[rows],
            "cu_seqlens_q": None if ragged else ones[rows],
            "ke_offset": self.lengths[rows],
            "batch_idx_list": None if ragged else self.sequences[rows],
            "topk_indices_offset_override": self.starts[rows] if ragged else None,
        }
