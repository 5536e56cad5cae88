"""SGLang's model runner as far as steering passes needs it: plain attributes on the CPU."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from nsa_tune.backend.types.batch import Batch
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.engines.sglang.pass_mode.whole_pass.dense_graphs import most_sequences, padding
from nsa_tune.engines.sglang.pass_mode.whole_pass.unbroken import Kind

TOPK = 2048


class Mode(enum.IntEnum):
    """As SGLang's ForwardMode."""

    EXTEND = enum.auto()
    DECODE = enum.auto()
    MIXED = enum.auto()
    TARGET_VERIFY = enum.auto()


class Hidden(enum.IntEnum):
    """As SGLang's CaptureHiddenMode."""

    NULL = 0
    LAST = 1
    FULL = 2

    def need_capture(self) -> bool:
        return self is not Hidden.NULL

    def is_full(self) -> bool:
        return self is Hidden.FULL


class Speculation(enum.Enum):
    """As SGLang's SpeculativeAlgorithm."""

    EAGLE = enum.auto()
    NGRAM = enum.auto()
    NONE = enum.auto()

    def is_none(self) -> bool:
        return self is Speculation.NONE

    def is_eagle(self) -> bool:
        return self is Speculation.EAGLE


class Alone:
    """The ranks of an engine with one rank."""

    rank, count = 0, 1

    def from_first(self, value: Any) -> Any:
        return value

    def longest(self, value: float) -> float:
        return value

    def agree(self, question: str, answer: str | None) -> bool:
        return bool(question and answer)


class Dense:
    """Dense graphs that are there."""

    def __init__(self, sizes: Iterable[int], kind: Kind = Kind.MHA) -> None:
        self.sizes = sorted(sizes)
        self.kind = kind

    def wanted(self) -> list[int]:
        return self.sizes

    def fits(self, size: int, batch: Batch) -> bool:
        short = batch.max_kv <= TOPK and batch.batch_size <= room(size)
        return short and size in self.sizes and (self.kind is Kind.MLA or not batch.prefix_tokens)


class Sparse:
    """Sparse graphs that are there."""

    kind = Kind.SPARSE

    def __init__(self, sizes: Iterable[int], most_keys: int = 2**17) -> None:
        self.sizes = sorted(sizes)
        self.most_keys = most_keys

    def fits(self, size: int, batch: Batch) -> bool:
        return size in self.sizes and batch.kv_tokens <= self.most_keys


def room(size: int) -> int:
    """The most sequences of a batch that a dense graph of `size` tokens runs."""
    most = min(size, TOPK)
    return most_sequences(size, most) - len(padding(size, most))


def batch(prefix_lens: Sequence[int], extend_lens: Sequence[int], **changes: Any) -> Any:
    """An extend batch as the scheduler makes it; request i has row i + 1 of the page tables."""
    kv_lens = [prefix + new for prefix, new in zip(prefix_lens, extend_lens, strict=True)]
    total = sum(extend_lens)
    positions = [torch.arange(prefix, kv) for prefix, kv in zip(prefix_lens, kv_lens, strict=True)]
    fields: dict[str, Any] = {
        "forward_mode": Mode.EXTEND,
        "global_forward_mode": Mode.EXTEND,
        "batch_size": len(extend_lens),
        "input_ids": torch.arange(total) + 100,
        "positions": torch.cat(positions),
        "out_cache_loc": torch.arange(total) + 1000,
        "req_pool_indices": torch.arange(1, len(extend_lens) + 1),
        "seq_lens": torch.tensor(kv_lens),
        "seq_lens_cpu": torch.tensor(kv_lens),
        "seq_lens_sum": sum(kv_lens),
        "orig_seq_lens": torch.tensor(kv_lens, dtype=torch.int32),
        "extend_num_tokens": total,
        "extend_seq_lens": torch.tensor(extend_lens),
        "extend_prefix_lens": torch.tensor(prefix_lens),
        "extend_start_loc": torch.tensor(extend_lens).cumsum(0) - torch.tensor(extend_lens),
        "extend_prefix_lens_cpu": list(prefix_lens),
        "extend_seq_lens_cpu": list(extend_lens),
        "extend_logprob_start_lens_cpu": list(extend_lens),
        "extend_input_logprob_token_ids_gpu": None,
        "next_token_logits_buffer": None,
        "capture_hidden_mode": Hidden.NULL,
        "return_logprob": False,
        "return_pooled_hidden_states": False,
        "input_embeds": None,
        "replace_embeds": None,
        "mm_inputs": None,
        "spec_info": None,
        "global_num_tokens_cpu": None,
        "tbo_children": None,
        "tbo_parent_token_range": None,
    }
    unknown = changes.keys() - fields.keys() - {"multi_item_delimiter_indices", "rids_int"}
    assert not unknown
    return SimpleNamespace(**{**fields, **changes})


def runner(
    sizes: Sequence[int] = (128, 512, 2048), rows: Sequence[int] = (8, 64, 256), **changes: Any
) -> Any:
    """A model runner that has captured graphs of these sizes."""
    fields: dict[str, Any] = {
        "attn_backend": SimpleNamespace(dsa_index_topk=TOPK),
        "token_to_kv_pool": SimpleNamespace(),
        "prefill_cuda_graph_runner": SimpleNamespace(
            capture_num_tokens=list(sizes), backend=SimpleNamespace()
        ),
        "decode_cuda_graph_runner": SimpleNamespace(capture_bs=list(rows)),
        "spec_algorithm": Speculation.NONE,
    }
    return SimpleNamespace(**{**fields, **changes})


def states_of(forward_batch: Any, width: int = 3) -> torch.Tensor:
    """A hidden state for each row, which names its token and its position."""
    names: torch.Tensor = forward_batch.input_ids + 10_000 * forward_batch.positions
    return names[:, None].expand(-1, width).double()


def original(seen: list[Any], width: int = 4) -> Any:
    """SGLang's own `_forward_raw`: keeps each batch, and returns logits that name their rows.

    An extend pass returns a row a sequence, a decode or verify pass a row a row, and writes them
    where the last such pass had them, as a graph does. So does it with hidden states.
    """
    logits_buffer, states_buffer = torch.zeros(4096, width), torch.zeros(4096, 3).double()

    def forward(runner: Any, forward_batch: Any, *rest: Any) -> Any:
        seen.append(forward_batch)
        rows, states = len(forward_batch.input_ids), states_of(forward_batch)
        if forward_batch.forward_mode in (Mode.DECODE, Mode.TARGET_VERIFY):
            logits = logits_buffer[:rows]
            logits.copy_(forward_batch.input_ids[:, None].expand(-1, width))
            states = states_buffer[:rows].copy_(states)
        else:
            ends = torch.tensor(forward_batch.extend_seq_lens_cpu).cumsum(0) - 1
            logits = forward_batch.input_ids[ends][:, None].expand(-1, width).float()
        full = forward_batch.capture_hidden_mode.is_full()
        output = SimpleNamespace(next_token_logits=logits, hidden_states=states if full else None)
        return SimpleNamespace(logits_output=output)

    return forward


def times(**pass_us: dict[tuple[int, int], float]) -> PassTimes:
    """Times by mode: {(new tokens, context): microseconds}; the same where keys are selected."""
    return PassTimes(
        {"gpu": "made up"},
        [
            PassTime(PassMode(mode), q_tokens, context, took, selects)
            for mode, points in pass_us.items()
            for (q_tokens, context), took in points.items()
            for selects in (False, True)
        ],
    )
