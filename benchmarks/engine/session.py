"""One running engine with its probe: ask it, switch it, read what its passes took."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from benchmarks.engine.configurations import DEFAULT, Configuration
from benchmarks.engine.control import Control
from benchmarks.engine.probe import VARIABLE, Settings

__all__ = ["Pass", "Session", "installed_probe", "sampling_of", "way"]

Pass = dict[str, Any]
VOCABULARY = 129280
_LEAST_TOKEN = 100
"""Smaller ids are special tokens."""
_SETTLE_S = 0.05
_MOST_FLUSHES = 250
_ROOT = Path(__file__).resolve().parents[2]
_PROBE = "nsa_tune_engine_probe-0"


@contextmanager
def installed_probe(settings: Settings, folder: Path) -> Iterator[None]:
    """Let SGLang's processes find the probe: an entry point in `folder`, on the Python path."""
    metadata = folder / f"{_PROBE}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    name, _, version = _PROBE.rpartition("-")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(_entry_points())
    added = [str(folder), str(_ROOT)]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *([before] if before else [])])
    os.environ[VARIABLE] = settings.to_environment()
    sys.path[:0] = added
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is None:
            os.environ.pop("PYTHONPATH")
        else:
            os.environ["PYTHONPATH"] = before
        for one in added:
            sys.path.remove(one)


def _entry_points() -> str:
    lines = ["[sglang.srt.plugins]", "engine_probe = benchmarks.engine.probe:register"]
    if not entry_points(group="sglang.srt.plugins", name="nsa_tune"):
        # The package is not installed here: its sources beside this file are what is measured.
        lines.append("nsa_tune = nsa_tune.engines.sglang:register")
    return "\n".join(lines) + "\n"


class Session:
    """An engine, its configurations, and the passes that its probe wrote down."""

    def __init__(
        self,
        engine: Any,
        settings: Settings,
        control: Control,
        *,
        deadline: float,
        capacity: int,
        gpus: int = 1,
        data_parallel: int = 1,
    ) -> None:
        """`data_parallel`: ranks with batches of their own, to each of which all prompts go."""
        self.engine = engine
        self.configurations = settings.configurations
        self.capacity = capacity
        """Tokens in the KV pool."""
        self._control = control
        self._passes = settings.passes
        self._outputs = settings.outputs
        self._offset = 0
        self._tag = 0
        self._pushing: set[int] = set()
        self._deadline = self._until = deadline
        self._gpus = gpus
        self._settle_s = _SETTLE_S if gpus > 1 else 0.0
        self._data_parallel = data_parallel
        self._random = random.Random(1)
        self.measured: set[object] = set()
        """Batches that a test of prefills has measured."""

    @property
    def late(self) -> bool:
        """Whether the time is up: no new case should start."""
        return time.monotonic() > self._until

    def limit(self, share: float) -> None:
        """Let the next test have this share of the time that is left."""
        left_s = self._deadline - time.monotonic()
        self._until = self._deadline - (1 - share) * max(left_s, 0.0)

    @property
    def default(self) -> Configuration:
        """SGLang by itself; the first configuration where none is called so."""
        found = (one for one in self.configurations if one.name == DEFAULT)
        return next(found, self.configurations[0])

    def named(self, names: str) -> tuple[Configuration, ...]:
        """Configurations by names separated by commas; all for an empty text; ValueError for a
        name that this engine does not have."""
        wanted = [name for name in names.split(",") if name]
        unknown = set(wanted) - {one.name for one in self.configurations}
        if unknown:
            raise ValueError(f"this engine has no configuration {', '.join(sorted(unknown))}")
        return tuple(one for one in self.configurations if not wanted or one.name in wanted)

    def use(self, configuration: Configuration) -> None:
        """Run the passes from now on in `configuration`."""
        # With several ranks one may still be in its last pass; all must change between the same.
        time.sleep(self._settle_s)
        self._control.write(configuration=self.configurations.index(configuration))

    def tokens(self, count: int, seed: object = None, repeats: float | None = None) -> list[int]:
        """Random token ids, the same for the same `seed`; a share repeats the one before."""
        chosen = self._random if seed is None else random.Random(str(seed))
        ids = [chosen.randrange(_LEAST_TOKEN, VOCABULARY) for _ in range(count)]
        for i in range(1, count) if repeats else ():
            if chosen.random() < (repeats or 0.0):
                ids[i] = ids[i - 1]
        return ids

    def select(self, repeats: float | None) -> None:
        """Let indexers select by content where a share of tokens that repeat is given."""
        if (repeats is not None) != self._control.read().by_content:
            self.flush()
            self._control.write(by_content=repeats is not None)

    def tag(self, *, memory: bool = False, keeps: bool = False, profiles: int = 0) -> int:
        """A new number that the passes from now on bear.

        `memory`: the first of them also notes what memory is in use, and its peak since the last
        reading. `keeps`: prefills write their outputs to files, which `kept` reads. `profiles`: as
        in `Wanted`.
        """
        self._tag += 1
        self._control.write(tag=self._tag, readings=int(memory), keeps=keeps, profiles=profiles)
        return self._tag

    def kept(self, tag: int) -> list[dict[str, Any]]:
        """What the prefills of a tag have kept, in their order; the files are removed."""
        import torch

        # Of several ranks, which all have the same outputs, one counts.
        paths = sorted(self._outputs.glob(f"{tag}-*.pt"), key=lambda path: path.stat().st_mtime_ns)
        first = [path for path in paths if path.stem.split("-")[1] == paths[0].stem.split("-")[1]]
        found = [torch.load(path) for path in first]
        for path in paths:
            path.unlink()
        return found

    def ask(
        self, prompts: Sequence[list[int]], new: int = 1, **named: Any
    ) -> tuple[float, list[dict[str, Any]]]:
        """Send all prompts at once and wait; wall time in milliseconds, and the answers."""
        named |= {"input_ids": list(prompts), "sampling_params": [sampling_of(new)] * len(prompts)}
        begin = time.perf_counter()
        if self._data_parallel == 1:
            found = self.engine.generate(**named)
        else:
            found = self.wait_for(self._everywhere(named))
        return (time.perf_counter() - begin) * 1e3, found

    async def _everywhere(self, named: dict[str, Any]) -> list[dict[str, Any]]:
        """The first rank's answers. An idle rank would have all run without graphs."""
        ranks = range(self._data_parallel)
        calls = (self.engine.async_generate(routed_dp_rank=rank, **named) for rank in ranks)
        answers: list[list[dict[str, Any]]] = await asyncio.gather(*calls)
        return answers[0]

    def flush(self) -> None:
        """Forget all cached prefixes; RuntimeError when the engine never comes to rest."""
        for _ in range(_MOST_FLUSHES):
            # It refuses while a pass is under way, and answers are sent before that ends.
            if getattr(self.engine.flush_cache(), "success", True):
                return
            time.sleep(0.02)
        raise RuntimeError("the engine does not flush its cache: requests are still running")

    def wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine in the engine's event loop."""
        return self.engine.loop.run_until_complete(work)

    def collect(self, *, all_ranks: bool = False) -> list[Pass]:
        """The passes since the last call, of the first GPU or of all.

        Small requests push the last events out.
        """
        time.sleep(self._settle_s)
        last = self._tag
        found: list[Pass] = []
        for _ in range(10):
            self._pushing.add(self.tag())
            self.ask([self.tokens(3)])
            time.sleep(0.02)
            found += self._new()
            if all(
                any(one["tag"] > last for one in found if one["gpu"] == gpu)
                for gpu in range(self._gpus)
            ):
                break
        else:
            raise RuntimeError(
                "the probe writes no passes: look in the engine's log for why its plug-in failed"
            )
        # A rank may write one that pushed before the others do.
        found = [one for one in found if one["tag"] <= last and one["tag"] not in self._pushing]
        return [one for one in found if all_ranks or one["gpu"] == 0]

    def memory(self) -> Pass:
        """The memory that the engine has in use; `peak_mib` is that since the last reading."""
        tag = self.tag(memory=True)
        self.ask([self.tokens(3)])
        return next(one for one in self.collect() if one["tag"] == tag and "peak_mib" in one)

    def _new(self) -> list[Pass]:
        if not self._passes.exists():
            return []
        with self._passes.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        return list(map(json.loads, text.splitlines()))


def way(one: Pass) -> str:
    """The way that the plug-in chose for a pass; the engine's own where it chose none."""
    return str(one.get("pass_mode", "engine"))


def sampling_of(new: int) -> dict[str, Any]:
    """Greedy, exactly `new` tokens."""
    return {"max_new_tokens": new, "ignore_eos": True, "temperature": 0}
