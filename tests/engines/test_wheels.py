"""What is said of a symbol that a release no longer has."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.engines.wheels import Wheel


@pytest.mark.parametrize(
    ("file", "path"), [("a.py", "C.gone"), ("a.py", "D.f"), ("a.py", "C.f.g"), ("b.py", "C.f")]
)
def test_a_missing_definition_is_named(tmp_path: Path, file: str, path: str) -> None:
    with ZipFile(tmp_path / "wheel.whl", "w") as archive:
        archive.writestr("a.py", "class C:\n    def f(self): ...\n")
    wheel = Wheel("1.2.3.post4", tmp_path / "wheel.whl")

    assert wheel.number == (1, 2, 3)
    assert wheel.definition("a.py", "C.f").name == "f"
    assert not wheel.has(file, path)
    with pytest.raises(LookupError, match=f"^1.2.3.post4 has no {path} in {file}$"):
        wheel.definition(file, path)
