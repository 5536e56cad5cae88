"""docs/extending.md: its code is pasted into a copy of the package, and its commands run there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import nsa_tune
from benchmarks.same_plans import batch_of
from nsa_tune import Dispatcher
from nsa_tune.backend.dispatch.plan import DECIDED
from nsa_tune.backend.points import POINTS
from nsa_tune.db.reader import read_database
from tests.engines.sglang.wheels import VERSIONS, wheel_of
from tests.engines.wheels import Unreachable

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = {part.splitlines()[0]: part for part in PAGE.split("\n## ")[1:]}
H100 = "NVIDIA H100 80GB HBM3"
BATCHES = 400
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# --- the page


class Block(NamedTuple):
    """A piece of the page, without the line that says where it goes."""

    language: str
    place: str
    code: str


def blocks(section: str) -> list[Block]:
    """The code of a section; what is for a shell or to be run has a place of that name."""
    found = []
    for language, text in _BLOCK.findall(SECTIONS[section]):
        first, _, rest = text.partition("\n")
        code = text if language == "sh" else rest
        found.append(Block(language, "sh" if language == "sh" else first.removeprefix("# "), code))
    return found


def paste(block: Block, root: Path) -> None:
    """Put the code where its first line says."""
    file, _, where = block.place.partition(", ")
    path = root / file
    if where == "a new file":
        path.parent.mkdir(exist_ok=True)
        with path.open("x", encoding="utf-8") as new:
            new.write(block.code)
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    code = f"\n\n{block.code}" if where == "at the end" else block.code
    lines.insert(_line(lines, where), code)
    path.write_text("".join(lines), encoding="utf-8")


def _line(lines: list[str], where: str) -> int:
    """The number of the line that the code comes before."""
    if where == "at the end":
        return len(lines)
    word, _, text = where.rpartition(" `")
    text = text.removesuffix("`")
    start = f"{text} = (" if word == "at the end of" else text
    (found,) = (i for i, line in enumerate(lines) if line.strip().startswith(start))
    if word == "above":
        return found
    assert word == "at the end of", where
    return next(i for i in range(found, len(lines)) if lines[i].startswith(")"))


# --- a copy


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all that the page adds."""
    root = tmp_path_factory.mktemp("copy")
    source = Path(nsa_tune.__file__).parent
    shutil.copytree(source, root / "nsa_tune", ignore=shutil.ignore_patterns("__pycache__"))
    for section in SECTIONS:
        for block in blocks(section):
            if block.place not in ("sh", "run"):
                paste(block, root)
    return root


def python(copy: Path, *arguments: str) -> str:
    """What Python prints, with the copy as its nsa_tune."""
    # One thread: on a busy machine several take longer for small tensors.
    own = {"PYTHONPATH": os.pathsep.join([str(copy), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env={**os.environ, **own},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(copy: Path, section: str) -> list[Any]:
    """What the section's commands print, all of them JSON."""
    (block,) = (one for one in blocks(section) if one.place == "sh")
    words = [shlex.split(line) for line in block.code.splitlines()]
    assert all(line[0] == "nsa-tune" for line in words)
    return [json.loads(python(copy, "-m", "nsa_tune.cli", *line[1:])) for line in words]


def run(copy: Path, section: str) -> str:
    """What the Python of a section prints that is to be run."""
    (block,) = (one for one in blocks(section) if one.place == "run")
    return python(copy, "-c", block.code)


def answers() -> list[dict[str, Any]]:
    """The decisions of two tables that ship, and what these say that they lack."""
    found: list[dict[str, Any]] = []
    for model in ("deepseek-v3.2", "deepseek-v4"):
        d = Dispatcher.open(gpu=H100, model=model, heads=128, kv_dtype="fp8", strict=False)
        batches = [batch_of(model, number) for number in range(BATCHES)]
        plans = map(d.plan, batches)
        found.append(
            {
                "plans": [{name: getattr(plan, name) for name in DECIDED} for plan in plans],
                "unmeasured": d.unmeasured,
                "explained": d.explain(batches[0]),
                "rows": 0 if d.table is None else len(d.table.measurements),
            }
        )
    return found


# --- the checklists


def test_each_block_says_where_it_goes_and_each_step_has_its_number() -> None:
    for section, text in SECTIONS.items():
        assert blocks(section)
        steps = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
        assert steps == list(range(1, len(steps) + 1))
        for file in re.findall(r"`((?:nsa_tune|tests)/[\w/.]+)`", text):
            assert (ROOT / file).exists() or f"# {file}, a new file" in text, file


def references(point: str) -> set[str]:
    return {arm.name for arm in POINTS[point].arms if arm.reference and not arm.loss}


def test_an_arm_is_swept_explained_and_reported(copy: Path) -> None:
    ran, explained, report = commands(copy, "An arm")

    assert ran["measured"] > 0
    assert ran["failures"] == []
    (table,) = (t for t in read_database(copy / "new.db") if t.key.model == "tiny")
    swept = {row.arm for row in table.measurements if row.point == "prefill"}
    assert swept == {*references("prefill"), "mla/row_by_row"}
    reasons = explained["reasons"]["sparse_prefill"]
    kernels = {name.removeprefix("mla/") for name in swept if name.startswith("mla/")}
    # A sweep may leave an arm with too few measurements for an estimate.
    assert reasons["estimates_us"].keys() <= kernels
    assert explained["plan"]["sparse_prefill"] in reasons["estimates_us"]
    assert "row_by_row" in json.dumps(report)


def test_a_point_is_swept_planned_explained_and_reported(copy: Path) -> None:
    ran, explained, report = commands(copy, "A decision point")

    assert ran["measured"] > 0
    assert ran["failures"] == []
    reason = explained["reasons"]["value_projection"]
    assert reason["estimates_us"].keys() == {"batched", "by_head"}
    assert explained["plan"]["value_projection"] in ("batched", "by_head")
    assert "value_projection" in json.dumps(report)


def test_the_tables_that_ship_stay_valid_and_say_what_they_lack(copy: Path) -> None:
    code = "import json; from tests.test_extending import answers; print(json.dumps(answers()))"
    before = answers()

    after = json.loads(python(copy, "-c", code))
    for old, new in zip(before, after, strict=True):
        assert new["rows"] == old["rows"] > 0
        for one, other in zip(old["plans"], new["plans"], strict=True):
            assert {name: other[name] for name in one} == one
    v32, v4 = after
    lacking = {name: list(arms) for name, arms in before[0]["unmeasured"].items()}
    assert v32["unmeasured"] == {
        **lacking,
        "prefill": [*lacking.get("prefill", []), "mla/row_by_row"],
        "value_projection": ["batched", "by_head"],
    }
    assert "value_projection: batched, by_head" in v32["explained"]
    assert "value_projection" not in before[0]["explained"]
    assert v4["unmeasured"] == {n: list(arms) for n, arms in before[1]["unmeasured"].items()}


def test_an_arm_must_say_what_is_copied_for_its_kernel(copy: Path) -> None:
    """Left out, nothing can be imported."""
    arms = copy / "nsa_tune/backend/points/prefill/arms.py"
    whole = arms.read_text(encoding="utf-8")
    assert ", copied={},\n    ),\n)" in whole
    try:
        arms.write_text(whole.replace(", copied={},\n    ),\n)", ",\n    ),\n)"))
        with pytest.raises(AssertionError, match="required keyword-only argument: 'copied'"):
            python(copy, "-c", "import nsa_tune.backend.points")
    finally:
        arms.write_text(whole)


def test_a_version_of_sglang_and_its_baseline_are_known(copy: Path) -> None:
    versions, default = run(copy, "An engine version").splitlines()

    assert versions == "0.5.17 to 0.5.24 True"
    assert default == "mha"


_CONTRACT = """
from inspect import signature
from nsa_tune.engines.sglang.hook_table import HOOKS
from tests.engines.sglang import test_contract
from tests.engines.sglang.kernels import test_copies, test_topk_contract
from tests.engines.sglang.pass_mode import test_contract as pass_mode
from tests.engines.sglang.wheels import VERSIONS, Wheel, wheel_of

wheel = Wheel("0.5.24", wheel_of(VERSIONS[-1]).path)
assert {symbol.name for symbol in wheel.release.symbols} == HOOKS.keys()
count = 0
for module in (test_contract, pass_mode, test_topk_contract, test_copies):
    for name, test in vars(module).items():
        if name.startswith("test_") and [*signature(test).parameters] == ["wheel"]:
            test(wheel)
            count += 1
assert count > 50, count
(k_only,) = (symbol for symbol in wheel.release.symbols if symbol.name == "k_only")
print(*k_only.arguments)
"""


def test_a_version_of_sglang_has_all_hooks_and_passes_the_contract(copy: Path) -> None:
    """Its wheel is made up: the newest one's, under the version of the page's example."""
    try:
        wheel_of(VERSIONS[-1])
    except Unreachable as reason:
        pytest.skip(f"the wheel of SGLang {VERSIONS[-1]} cannot be had: {reason}")

    assert python(copy, "-c", _CONTRACT) == "self x\n"


def test_a_gpu_gets_plans_from_its_architecture_s_table_with_limits_of_its_own(copy: Path) -> None:
    first, source = run(copy, "A GPU").splitlines()

    assert first == "architecture 96 mla"
    assert re.search(r"measured on NVIDIA H\w+.*, another GPU of sm90", source)
    assert asdict(Dispatcher.open(
        gpu="NVIDIA H30", model="deepseek-v3.2", heads=128, kv_dtype="fp8"
    ).setting.device)["sms"] == 0  # fmt: skip
