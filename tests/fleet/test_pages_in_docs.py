"""The pages on fleets and security: their first block works as typed, and their tests exist."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from itertools import takewhile
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def _first_block(page: str) -> list[str]:
    lines = (DOCS / page).read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("    "))
    return [line[4:] for line in takewhile(lambda line: line.startswith("    "), lines[begin:])]


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="it would measure the GPU")
@pytest.mark.parametrize(("page", "port"), [("fleet.md", "8401"), ("sharing.md", "8402")])
def test_the_first_block_of_a_page_works_as_typed(page: str, port: str, tmp_path: Path) -> None:
    free = str(_free_port())
    # A second of measuring has the rows that the last command needs.
    text = "\n".join(_first_block(page)).replace(port, free).replace("--budget 20", "--budget 1")
    text = text.replace("serve --db tables.db", f"serve --db tables.db --port {free}")
    script = f"trap 'kill %1' EXIT\n{text.replace('kill %1', ':')}\n"
    done = subprocess.run(
        ["bash", "-e"], input=script, text=True, capture_output=True, timeout=300, check=False,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT),
             "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "prefill_path = " in done.stdout


def test_every_test_that_proves_a_promise_is_there() -> None:
    page = (DOCS / "security.md").read_text()
    tests = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    names = {str(path.relative_to(ROOT / "tests")) for path in tests}
    for name in re.findall(r"`([\w/]+\.py)`", page):
        assert any(path == name or path.endswith(f"/{name}") for path in names), name
    functions = set(re.findall(r"def (test_\w+)", "".join(tests.values())))
    for name in re.findall(r"`(?:[\w/]+::)?(test_\w+)(?:\.\.\.)?`", page):
        assert any(function.startswith(name) for function in functions), name
    for folder in re.findall(r"`([\w/]+/)`", page):
        assert (ROOT / "tests" / folder).is_dir() or folder == "tests/", folder
