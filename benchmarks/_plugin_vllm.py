"""What the vLLM plug-in adds to a step, beside what vLLM's own builder takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from nsa_tune import Dispatcher
from nsa_tune.backend.baselines import VLLM_0_33_0
from nsa_tune.engines.plugin import wrapped
from nsa_tune.engines.vllm.facts import facts_of
from nsa_tune.engines.vllm.lengths import prefills_of
from nsa_tune.engines.vllm.prefill import Prefill, around_build, steer
from nsa_tune.engines.vllm.priced import priced
from tests.engines.vllm.engine import (
    LAYERS,
    Engine,
    builder_of,
    config,
    stand_in_modules,
    step_of,
)
from tests.engines.vllm.wheels import VERSIONS, wheel_of

__all__ = ["steps"]

_HEADS, _LAYERS = 16, 61


class _Idle:
    """A builder whose own decision costs nothing: what is left is the hook."""

    require_uniform_decodes = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Decide nothing."""
        del common_prefix_len, common_attn_metadata, fast_build
        return self

    prefill = None


class _Lengths:
    """A builder that does a part of the hook's work: it reads the lengths, and sums them."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:
        """Find the prefills."""
        del common_prefix_len
        batch = common_attn_metadata
        starts, lens = batch.query_start_loc_cpu, batch.seq_lens_cpu_upper_bound
        return prefills_of(starts, lens, 1)


class _Read:
    """A builder that does the least: it takes the lengths out of their tensors."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:
        """Read them as the hook does."""
        del common_prefix_len
        batch = common_attn_metadata
        starts, lens = batch.query_start_loc_cpu, batch.seq_lens_cpu_upper_bound
        return starts.tolist(), lens.tolist()


def steps(
    dispatcher: Dispatcher, sequences: Sequence[int], rounds: int, passes: int
) -> list[dict[str, float]]:
    """One row a number of sequences; microseconds a step, the best of all rounds.

    `dispatcher` is any of the table's GPU; the one of 16 local heads answers.
    """
    sys.modules.update(stand_in_modules())
    engine = Engine(wheel_of(VERSIONS[-1]))
    setting = dispatcher.setting
    table = Dispatcher.open(
        gpu=setting.device.name, model=setting.profile.name, heads=_HEADS, kv_dtype="fp8",
        strict=True, baseline=VLLM_0_33_0, layers=_LAYERS,
    )  # fmt: skip
    return [_row(engine, table, count, rounds, passes) for count in sequences]


def _row(
    engine: Engine, table: Dispatcher, sequences: int, rounds: int, passes: int
) -> dict[str, float]:
    given = config(heads=_HEADS)
    idle = type("Idle", (_Idle,), {"build": wrapped(_Idle.build, around_build)})
    variants = {
        "engine": builder_of(engine.flashmla(hooked=False), given),
        "hooked": _steered(engine.flashmla(hooked=True), given, table),
        "idle": builder_of(_Idle, given, fp8_use_mixed_batch=True),
        "hook": _steered(idle, given, table),
        "lengths": _Lengths(),
        "read": _Read(),
    }
    random = Random(sequences)
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for kind in ("prefills", "mixed", "decodes"):
            batches = [step_of(_lens(kind, sequences, i, random)) for i in range(passes)]
            for name, builder in variants.items():
                times.setdefault((name, kind), []).append(_microseconds(builder, batches))
    best = {key: min(some) for key, some in times.items()}
    return {
        "sequences": sequences,
        "engine_us": best["engine", "prefills"],
        "hooked_us": best["hooked", "prefills"],
        "lengths_us": best["lengths", "prefills"],
        "read_us": best["read", "prefills"],
        **{
            f"added_{kind}_us": best["hook", kind] - best["idle", kind]
            for kind in ("prefills", "mixed", "decodes")
        },
    }


def _steered(kind: type, given: Any, table: Dispatcher) -> Any:
    builder = builder_of(kind, given, fp8_use_mixed_batch=True)
    facts = facts_of(builder, LAYERS)
    table = priced(table, facts.layers, facts.workspace_tokens)
    steer(builder, Prefill(builder, table, facts, None))
    return builder


def _lens(kind: str, sequences: int, i: int, random: Random) -> list[tuple[int, int]]:
    """All prefills, all but one decodes, or decodes alone; half in MHA's regime."""
    most = 1900 if i % 2 else 16384
    extends = {"prefills": sequences, "mixed": 1, "decodes": 0}[kind]
    decodes = [(random.randrange(1, 60000), 1) for _ in range(sequences - extends)]
    return decodes + [(random.randrange(most), random.randrange(2, 128)) for _ in range(extends)]


def _microseconds(builder: Any, batches: Sequence[Any]) -> float:
    build = builder.build
    start = time.perf_counter()
    for batch in batches:
        build(0, batch)
    return (time.perf_counter() - start) / len(batches) * 1e6
