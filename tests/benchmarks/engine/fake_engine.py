"""An engine without a GPU: it schedules as SGLang does in short, and really runs the probe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine.configurations import Configuration
from benchmarks.engine.probe import Probe, Settings

if TYPE_CHECKING:
    import pytest


class Mode(Enum):
    """SGLang's forward modes, as far as they occur."""

    EXTEND = 1
    DECODE = 2


class _Clock:
    """The time on the device."""

    def __init__(self) -> None:
        self.ms = 0.0


def fake_events(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """Replace CUDA's events and memory statistics; time passes only as the engine says."""
    clock = _Clock()

    class Event:
        def __init__(self, **_: Any) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock.ms

        def query(self) -> bool:
            # What has just been launched is never finished.
            return self.at < clock.ms

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 4 << 20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 6 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 9 << 20))
    return clock


class Backend:
    """As much of SGLang's attention backend as the probe touches."""

    def __init__(self) -> None:
        self.use_mha = False
        self.dsa_prefill_impl, self.dsa_triton_union = "flashmla_kv", 0

    def set_dsa_prefill_impl(self, forward_batch: Any = None) -> None:
        self.use_mha = forward_batch is not None and max(forward_batch.seq_lens) <= 256


class FakeEngine:
    """Answers after one prefill pass and a decode pass a token; keeps whole prompts cached."""

    def __init__(
        self, settings: Settings, clock: _Clock, gpu_ms: Callable[[Configuration, Any], float]
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.closed = False
        self._probe = Probe(settings)
        self._clock = clock
        self._gpu_ms = gpu_ms
        self._cached: list[list[int]] = []
        model: Any = torch.nn.Module()
        model.indexer = torch.nn.ModuleDict({"k_norm": torch.nn.LayerNorm(128)})
        self._runner = SimpleNamespace(attn_backend=Backend(), gpu_id=0, model=model)
        self.by_content: list[bool] = []
        """Of each pass: whether keys were selected wherever they stood."""
        self.error: Callable[[Configuration], float] = lambda _: 0.0
        """How far prefill's outputs of a configuration differ, as a share."""
        self.said: Callable[[Configuration, list[int]], int] = lambda _, ids: sum(ids) % 1000

    def generate(
        self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]], **_: Any
    ) -> list[dict[str, Any]]:
        """All prompts in one pass."""
        prefix = [self._hit(ids) for ids in input_ids]
        new = [ids[hit:] for ids, hit in zip(input_ids, prefix, strict=True)]
        self._forward(Mode.EXTEND, prefix, new)
        self._cached += input_ids
        count = sampling_params[0]["max_new_tokens"]
        for step in range(1, count):
            self._forward(Mode.DECODE, [len(ids) + step for ids in input_ids], None)
        answered = self._probe.switch.apply()
        return [
            {
                "output_ids": [self.said(answered, ids)] * count,
                "meta_info": {"cached_tokens": hit, "output_top_logprobs": [_NEARLY_EQUAL]},
            }
            for ids, hit in zip(input_ids, prefix, strict=True)
        ]

    async def async_generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], stream: bool = False
    ) -> Any:
        """One prompt; with `stream` the answers come one after the other."""
        found = self.generate([input_ids], [sampling_params])
        if not stream:
            return found[0]

        async def answers() -> AsyncIterator[dict[str, Any]]:
            for one in found:
                yield one

        return answers()

    def flush_cache(self) -> None:
        """Forget every prompt."""
        self._cached.clear()

    def shutdown(self) -> None:
        """End."""
        self.closed = True
        self.loop.close()

    def _hit(self, ids: list[int]) -> int:
        best = 0
        for known in self._cached:
            shared = 0
            for a, b in zip(ids[:-1], known, strict=False):
                if a != b:
                    break
                shared += 1
            best = max(best, shared // 64 * 64)
        return best

    def _forward(self, mode: Mode, prefix: list[int], new: list[list[int]] | None) -> None:
        lens = None if new is None else [len(ids) for ids in new]
        seq_lens = prefix if lens is None else [a + b for a, b in zip(prefix, lens, strict=True)]
        batch = SimpleNamespace(
            forward_mode=mode, batch_size=len(prefix), extend_prefix_lens_cpu=prefix,
            extend_seq_lens_cpu=lens, seq_lens_sum=sum(seq_lens), seq_lens=seq_lens,
            input_ids=torch.tensor([one for ids in new or () for one in ids]),
        )  # fmt: skip
        self._probe.around(self._run, self._runner, batch)

    def _run(self, runner: Any, batch: Any) -> Any:
        runner.attn_backend.set_dsa_prefill_impl(
            batch if batch.forward_mode is Mode.EXTEND else None
        )
        configuration = self._probe.switch.apply()
        weights = runner.model.indexer.k_norm.weight.tolist()
        self.by_content.append(weights == [0.0] * 64 + [1.0] * 64)
        took = self._gpu_ms(configuration, batch)
        self._clock.ms += took
        return SimpleNamespace(
            can_run_graph=configuration.prefill_graph,
            logits_output=self._outputs(configuration, batch),
        )

    def _outputs(self, configuration: Configuration, batch: Any) -> Any:
        """As with speculative decoding: hidden states of all new tokens."""
        if batch.forward_mode is not Mode.EXTEND:
            return None
        states = batch.input_ids[:, None] * torch.tensor([1.0, 2.0])
        ends = torch.tensor(batch.extend_seq_lens_cpu).cumsum(0) - 1
        states = states * (1 + self.error(configuration))
        return SimpleNamespace(hidden_states=states, next_token_logits=states[ends])


_NEARLY_EQUAL = ((-1.0, 5, None), (-1.001, 6, None))
