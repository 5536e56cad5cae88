"""A directory that looks like an environment with SGLang and nsa-tune in it.

The wheel's own `plugins` package and environment variables are real; the attention backends are
modules of two dozen lines with the same names.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import indent

from tests.backend.engines.sglang.wheels import Wheel

__all__ = ["REPOSITORY", "Site"]

REPOSITORY = Path(__file__).parents[4]

_BACKEND = """
class DeepseekSparseAttnBackend:
    def __init__(self, model_runner, skip_prefill=False):
        self.runner = model_runner

    def set_dsa_prefill_impl(self, forward_batch=None):
        self.use_mha = False

    def _build_paged_mqa_schedule_2d_ctx_lens(
        self, forward_mode, cache_seqlens_int32, seqlens_expanded, batch_size
    ):
        return seqlens_expanded

    def forward_extend(
        self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None
    ):
        return q
"""
_INDEXER = """
class Indexer:
    def _forward_cuda_k_only(self, x, positions, forward_batch, layer_id, return_indices=True):
        return None
"""
_V4_BACKEND = """
class DeepseekV4AttnBackend:
    def __init__(self, model_runner, skip_prefill=False):
        self.runner = model_runner

    def _use_sparse_prefill(self, forward_batch, *, num_qo_tokens):
        return True
"""
_RUNNER = """
class ModelRunner:
    def init_cuda_graphs(self, capture_decode_cuda_graph=True):
        pass

    def _forward_raw(
        self, forward_batch, pp_proxy_tensors, reinit_attn_backend=False, split_forward_count=1
    ):
        return forward_batch
"""
_PREFILL_GRAPHS = """
class PrefillCudaGraphRunner:
    def can_run_graph(self, forward_batch):
        return True

    def _capture_one_stream(self):
        pass

    def _prepare_forward_metadata_for_replay(
        self, forward_batch, static_forward_batch, num_tokens
    ):
        pass
"""
_BREAKABLE = """
class BreakableCudaGraphBackend:
    def replay(self, shape_key, static_forward_batch, **kwargs):
        return shape_key
"""
_EXECUTOR = "sglang/srt/model_executor"
_REAL = (
    "sglang/srt/environ.py", "sglang/srt/debug_utils/cuda_coredump.py", "sglang/srt/plugins/",
)  # fmt: skip
_GROUP = "sglang.srt.plugins"
_PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_POINTS: dict[str, str] = _PROJECT["entry-points"][_GROUP]
_ENTRY = "\n".join([f"[{_GROUP}]", *(f"{name} = {where}" for name, where in _POINTS.items()), ""])


class Site:
    """The directory, and programs run with it."""

    def __init__(self, folder: Path, wheel: Wheel, *, version: str | None = None) -> None:
        self.folder = folder
        for name in wheel.names():
            if name.startswith(_REAL) and name.endswith(".py"):
                self.write(name, wheel.text(name))
        self.backend(_BACKEND)
        self.v4_backend(_V4_BACKEND)
        self.write("sglang/srt/layers/attention/dsa/dsa_indexer.py", _INDEXER)
        self.write(f"{_EXECUTOR}/model_runner.py", _RUNNER)
        self.write(f"{_EXECUTOR}/runner/prefill_cuda_graph_runner.py", _PREFILL_GRAPHS)
        self.write(f"{_EXECUTOR}/runner_backend/breakable_cuda_graph_backend.py", _BREAKABLE)
        for inside in {path.parent for path in self.folder.rglob("*.py")}:
            for package in (inside, *inside.parents):
                if package.is_relative_to(self.folder / "sglang"):
                    (package / "__init__.py").touch()
        version = version or wheel.version
        self._distribution("sglang", version, "")
        self._distribution("nsa-tune", "0.1.0", _ENTRY)

    def write(self, name: str, text: str) -> None:
        """Write one file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def backend(self, text: str) -> None:
        """Make `text` the module of the attention backend."""
        self.write("sglang/srt/layers/attention/dsa_backend.py", text)

    def v4_backend(self, text: str) -> None:
        """Make `text` the module of V4's attention backend."""
        self.write("sglang/srt/layers/attention/deepseek_v4_backend.py", text)

    def plugin(self, name: str, code: str) -> None:
        """Add a plug-in of somebody else's, whose entry point runs `code`."""
        self.write(f"{name}.py", f"def register():\n{indent(code.strip(), '    ')}\n")
        self._distribution(name, "1.0", f"[{_GROUP}]\n{name} = {name}:register\n")

    def without_entry_point(self) -> None:
        """As if nsa-tune were not installed."""
        (self.folder / "nsa_tune-0.1.0.dist-info/entry_points.txt").write_text("")

    def _distribution(self, name: str, version: str, entry_points: str) -> None:
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        self.write(f"{folder}/METADATA", metadata)
        self.write(f"{folder}/entry_points.txt", entry_points)

    def environment(self, **variables: str) -> dict[str, str]:
        """The environment of a program that finds this site first, then the repository."""
        paths = os.pathsep.join((str(self.folder), str(REPOSITORY)))
        # Nothing that is remembered of the machine's own engines.
        data = {"XDG_DATA_HOME": str(self.folder / "data")}
        return {**os.environ, **data, "PYTHONPATH": paths, **variables}

    def run(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `code` in a process of its own."""
        return subprocess.run(
            [sys.executable, "-c", code],
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            check=False,
        )
