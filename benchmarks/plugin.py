"""What the SGLang plug-in adds to a forward pass, beside what SGLang's own decision takes.

    python -m benchmarks.plugin [--db TABLE] [--version 0.5.23] [--json]

Run it in the repository's root. SGLang's methods are taken out of its wheel, which is downloaded
once. Every figure is microseconds a pass; each round times all variants one after the other, and
the medians of the rounds are shown. "new" batches were never seen before, "seen" ones were.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from nsa_tune import Dispatcher
from nsa_tune.backend.decision_log import DecisionLog
from nsa_tune.backend.integrations.sglang.facts import facts_of
from nsa_tune.backend.integrations.sglang.indexer import Indexer, around_context_lens
from nsa_tune.backend.integrations.sglang.once import charged
from nsa_tune.backend.integrations.sglang.prefill import Answers, Prefill, around_prefill
from tests.integrations.sglang.engine import Engine, model_runner
from tests.integrations.sglang.wheels import VERSIONS, wheel_of

SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 7
PASSES = 400
_LAYERS = 61
_IMPLS = frozenset({"flashmla_kv", "flashmla_sparse"})
_PREFILL, _INDEXER = "set_dsa_prefill_impl", "_build_paged_mqa_schedule_2d_ctx_lens"

Pass = Callable[[Any], None]


class _Idle:
    """A backend whose own decision costs nothing: what is left is the hook."""

    use_mha = False

    def set_dsa_prefill_impl(self, forward_batch: Any = None) -> None:
        """Decide nothing."""


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
    return found


def _microseconds(backend: Any, batches: Sequence[Any]) -> float:
    decide = backend.set_dsa_prefill_impl
    start = time.perf_counter()
    for batch in batches:
        decide(batch)
    return (time.perf_counter() - start) / len(batches) * 1e6


def _steered(engine: Engine, base: type, dispatcher: Dispatcher, log: Path | None) -> Any:
    """A backend of class `base` under the hook, which has seen no batch yet."""
    backend = engine.backend(engine.hooked_class(base, {_PREFILL: around_prefill}))
    answers = Answers(charged(dispatcher, _LAYERS), facts_of(backend, model_runner()), _IMPLS)
    Prefill.attach(backend, answers, None if log is None else DecisionLog(log))
    return backend


def prefill(engine: Engine, opened: Callable[[], Dispatcher]) -> list[dict[str, float]]:
    """One row a number of sequences."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.jsonl"
        return [_row(engine, sequences, opened, log) for sequences in SEQUENCES]


def _row(
    engine: Engine, sequences: int, opened: Callable[[], Dispatcher], log: Path
) -> dict[str, float]:
    # Each has a dispatcher of its own: one that has seen a batch would answer for the others.
    variants = {
        "engine": engine.backend(),
        "hooked": _steered(engine, engine.backend_class, opened(), None),
        "idle": engine.backend(_Idle),
        "hook": _steered(engine, _Idle, opened(), None),
        "logging": _steered(engine, _Idle, opened(), log),
    }
    random = Random(sequences)
    new: dict[str, list[float]] = {name: [] for name in variants}
    seen: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        batches = _batches(engine, sequences, PASSES, random)
        for times in (new, seen):
            for name, backend in variants.items():
                times[name].append(_microseconds(backend, batches))
    fresh, again = ({name: median(t) for name, t in times.items()} for times in (new, seen))
    return {
        "sequences": sequences,
        "engine_us": fresh["engine"],
        "hooked_us": fresh["hooked"],
        "added_new_us": fresh["hook"] - fresh["idle"],
        "added_seen_us": again["hook"] - again["idle"],
        "added_seen_logging_us": again["logging"] - again["idle"],
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
        differences = [_each(call, hooked) - _each(call, plain) for _ in range(ROUNDS)]
        found[name] = median(differences)
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


def _each(call: Pass, backend: Any) -> float:
    start = time.perf_counter()
    for _ in range(PASSES * 5):
        call(backend)
    return (time.perf_counter() - start) / (PASSES * 5) * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--db", type=Path, help="table; the shipped one otherwise")
    parser.add_argument("--version", choices=VERSIONS, default=VERSIONS[-1])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    opened = partial(
        Dispatcher.open, arguments.db, "NVIDIA H100 80GB HBM3", model="deepseek-v3.2", heads=128,
        kv_dtype="fp8", strict=True,
    )  # fmt: skip
    dispatcher = opened()
    engine = Engine.of(wheel_of(arguments.version), _Modules())
    found = {
        "schema": "nsa-tune/benchmark-plugin/1",
        "sglang": arguments.version,
        "python": sys.version.split()[0],
        "table": dispatcher.source,
        "prefill": prefill(engine, opened),
        "others": others(engine, dispatcher),
        "ragged_us": {sequences: ragged(sequences) for sequences in SEQUENCES},
    }
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"SGLang {found['sglang']}, Python {found['python']}, {found['table']}")
    print("sequences   SGLang  hooked   added: new  seen  seen, logging   (us a pass)")
    for row in found["prefill"]:
        print(
            f"{row['sequences']:9d} {row['engine_us']:8.1f} {row['hooked_us']:7.1f} "
            f"{row['added_new_us']:12.1f} {row['added_seen_us']:5.1f} "
            f"{row['added_seen_logging_us']:14.1f}"
        )
    for name, value in found["others"].items():
        print(f"{name.removesuffix('_us')}: {value:.1f} us added")
    costs = ", ".join(f"{us:.0f} at {n}" for n, us in found["ragged_us"].items())
    print(f"SGLang's own work once a pass for flashmla_sparse, us by sequences: {costs}")


if __name__ == "__main__":
    main()
