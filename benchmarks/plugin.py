"""What the plug-ins add to a forward pass, beside what the engines' own decisions take.

    python -m benchmarks.plugin [--db TABLE] [--version 0.5.23] [--json]

Run it in the repository's root. The methods of SGLang (--version) and of the newest vLLM are taken
out of their wheels, which are read once. Every figure is microseconds a pass; each round times all
variants one after the other, and of the rounds the best is taken, since a shared machine makes
single ones slow. Every batch is new. An empty call is timed with them: by it, figures of two
machines, or of one machine at two times, can be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from benchmarks._plugin_vllm import steps
from nsa_tune import Dispatcher
from nsa_tune.backend.hardware import detect
from nsa_tune.engines.decision_log import DecisionLog
from nsa_tune.engines.sglang.costs import with_pass_overhead
from nsa_tune.engines.sglang.facts import facts_of
from nsa_tune.engines.sglang.indexer import Indexer, around_context_lens
from nsa_tune.engines.sglang.prefill import Answers, Prefill, around_prefill
from tests.engines.sglang.engine import Engine, model_runner
from tests.engines.sglang.wheels import VERSIONS, wheel_of
from tests.engines.vllm.wheels import VERSIONS as VLLM_VERSIONS

SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 40
PASSES = 100
_LAYERS = 61
_IMPLS = frozenset({"flashmla_kv", "flashmla_sparse"})
_PREFILL, _INDEXER = "set_dsa_prefill_impl", "_build_paged_mqa_schedule_2d_ctx_lens"

Pass = Callable[[Any], None]


class _Idle:
    """A backend whose own decision costs nothing: what is left is the hook."""

    use_mha = False

    def set_dsa_prefill_impl(self, forward_batch: Any = None) -> None:
        """MHA in its regime, as SGLang would."""
        self.use_mha = forward_batch.within_topk


class _Modules:
    """Puts stub modules into sys.modules, as the tests' monkeypatch does."""

    def setitem(self, modules: dict[str, Any], name: str, module: Any) -> None:
        """Set one."""
        modules[name] = module


def _batches(engine: Engine, sequences: int, count: int, random: Random) -> list[Any]:
    """Extend batches, half of them in MHA's regime."""
    found = []
    for i in range(count):
        most = 1900 if i % 2 else 16384
        prefixes = [random.randrange(most) for _ in range(sequences)]
        news = [random.randrange(1, 128) for _ in range(sequences)]
        found.append(engine.batch(prefixes, news))
        found[-1].within_topk = most < 2048
    return found


def _microseconds(backend: Any, batches: Sequence[Any]) -> float:
    decide = backend.set_dsa_prefill_impl
    start = time.perf_counter()
    for batch in batches:
        decide(batch)
    return (time.perf_counter() - start) / len(batches) * 1e6


def _steered(engine: Engine, base: type, dispatcher: Dispatcher, log: Path | None) -> Any:
    """A backend of class `base` under the hook."""
    backend = engine.backend(engine.hooked_class(base, {_PREFILL: around_prefill}))
    facts = facts_of(backend, model_runner())
    answers = Answers(with_pass_overhead(dispatcher, _LAYERS), facts, _IMPLS)
    Prefill.attach(backend, answers, None if log is None else DecisionLog(log))
    return backend


def prefill(engine: Engine, dispatcher: Dispatcher) -> list[dict[str, float]]:
    """One row a number of sequences."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.jsonl"
        return [_row(engine, sequences, dispatcher, log) for sequences in SEQUENCES]


def _row(engine: Engine, sequences: int, dispatcher: Dispatcher, log: Path) -> dict[str, float]:
    variants = {
        "engine": engine.backend(),
        "hooked": _steered(engine, engine.backend_class, dispatcher, None),
        "idle": engine.backend(_Idle),
        "hook": _steered(engine, _Idle, dispatcher, None),
        "logging": _steered(engine, _Idle, dispatcher, log),
    }
    random = Random(sequences)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        batches = _batches(engine, sequences, PASSES, random)
        for name, backend in variants.items():
            times[name].append(_microseconds(backend, batches))
    best = {name: min(some) for name, some in times.items()}
    return {
        "sequences": sequences,
        "engine_us": best["engine"],
        "hooked_us": best["hooked"],
        "added_us": best["hook"] - best["idle"],
        "added_logging_us": best["logging"] - best["idle"],
    }


def others(engine: Engine, dispatcher: Dispatcher) -> dict[str, float]:
    """What the other hooked calls take: a decode graph's, and the indexer's rows."""
    kind = engine.hooked({_PREFILL: around_prefill, _INDEXER: around_context_lens})
    plain = engine.backend(speculative_num_draft_tokens=2)
    hooked = engine.backend(kind, speculative_num_draft_tokens=2)
    answers = Answers(dispatcher, facts_of(hooked, model_runner()), _IMPLS)
    Prefill.attach(hooked, answers, None)
    Indexer.attach(hooked, dispatcher)
    mode, lens = engine.modes.TARGET_VERIFY, torch.arange(3000, 3064, dtype=torch.int32)
    expanded = torch.stack((lens - 1, lens), 1).flatten()

    def decode(backend: Any) -> None:
        backend.set_dsa_prefill_impl(forward_batch=None)

    def rows(backend: Any) -> None:
        getattr(backend, _INDEXER)(mode, lens, expanded, 64)

    found = {}
    for name, call in (("decode_us", decode), ("indexer_us", rows)):
        call(hooked)
        with_it, without = zip(
            *((_each(call, hooked), _each(call, plain)) for _ in range(ROUNDS)), strict=True
        )
        found[name] = min(with_it) - min(without)
    return found


def ragged(sequences: int) -> float:
    """Host microseconds that SGLang adds a pass for flashmla_sparse over packed fp8: a slice a
    sequence of the page table, and a sum over a tensor; on a GPU also the wait for a length."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lens = torch.randint(1000, 3000, (sequences,))
    table = torch.zeros(sequences, 3000, dtype=torch.int32, device=device)
    news = torch.full((sequences,), 64, device=device)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        flat = torch.cat([table[i, :length] for i, length in enumerate(lens.tolist())])
        assert flat.shape[0] == sum(lens)
        torch.repeat_interleave(news, news)
        times.append((time.perf_counter() - start) * 1e6)
    return median(times)


def empty_call() -> float:
    """Microseconds of a method that does nothing."""

    class Nothing:
        def call(self, batch: Any) -> None:
            """Do nothing."""

    nothing = Nothing()
    return min(_each(nothing.call, nothing) for _ in range(ROUNDS))


def _each(call: Pass, backend: Any) -> float:
    start = time.perf_counter()
    for _ in range(PASSES):
        call(backend)
    return (time.perf_counter() - start) / (PASSES) * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--db", type=Path, help="table; the shipped one otherwise")
    parser.add_argument("--version", choices=VERSIONS, default=VERSIONS[-1])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dispatcher = Dispatcher.open(
        arguments.db, "NVIDIA H100 80GB HBM3", model="deepseek-v3.2", heads=128, kv_dtype="fp8",
        strict=True,
    )  # fmt: skip
    engine = Engine.of(wheel_of(arguments.version), _Modules())
    found = {
        "schema": "nsa-tune/benchmark-plugin/5",
        "sglang": arguments.version,
        "cpu": detect.cpu_name(),
        "python": sys.version.split()[0],
        "table": dispatcher.source,
        "empty_call_us": empty_call(),
        "prefill": prefill(engine, dispatcher),
        "others": others(engine, dispatcher),
        "ragged_us": {sequences: ragged(sequences) for sequences in SEQUENCES},
        "vllm": VLLM_VERSIONS[-1],
        "vllm_steps": steps(dispatcher, (*SEQUENCES, 256), ROUNDS, PASSES),
    }
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"SGLang {found['sglang']}, {found['cpu']}, Python {found['python']}, {found['table']}")
    print(f"an empty call: {found['empty_call_us']:.3f} us")
    print("sequences   SGLang  hooked   added  added, logging   (us a pass)")
    for row in found["prefill"]:
        print(
            f"{row['sequences']:9d} {row['engine_us']:8.1f} {row['hooked_us']:7.1f} "
            f"{row['added_us']:7.1f} {row['added_logging_us']:15.1f}"
        )
    for name, value in found["others"].items():
        print(f"{name.removesuffix('_us')}: {value:.1f} us added")
    costs = ", ".join(f"{us:.0f} at {n}" for n, us in found["ragged_us"].items())
    print(f"SGLang's own work once a pass for flashmla_sparse, us by sequences: {costs}")
    print(f"\nvLLM {found['vllm']}, 16 local heads; us a step")
    print("sequences     vLLM  hooked   added: prefills (its lengths, read), one prefill, decodes")
    for row in found["vllm_steps"]:
        print(
            f"{row['sequences']:9d} {row['engine_us']:8.1f} {row['hooked_us']:7.1f} "
            f"{row['added_prefills_us']:17.1f} {row['lengths_us']:12.1f} {row['read_us']:6.1f} "
            f"{row['added_mixed_us']:11.1f} "
            f"{row['added_decodes_us']:8.1f}"
        )


if __name__ == "__main__":
    main()
