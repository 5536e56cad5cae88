"""House baselines: small modules, arrows that go one way, errors that are not swallowed."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Container, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import nsa_tune

ROOT = Path(nsa_tune.__file__).parent
ROOMS = {
    room: frozenset(re.findall(r"`([^`]+)`", imports))
    for room, imports in re.findall(
        r"^\| `([\w/]+)` \|[^|]*\|([^|]*)\|$",
        (ROOT.parent / "docs" / "structure.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
}
"""The table of docs/structure.md: which rooms a room imports, also inside of its functions."""
MAY_CATCH_ALL = ("autotune/bench/measure.py", "engines/")
"""One arm's measurement, and the hooks that must never raise into an engine."""
MAY_LOAD_TORCH = (
    "backend/kernels/",
    "backend/points/attention_case.py",
    "backend/points/checked_rows.py",
    "backend/points/paging.py",
    "backend/points/selections.py",
)
"""What the arms import when they are built, and nothing else imports when it is loaded."""

_FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
_RUNTIME = {
    name: path
    for name, path in _FILES.items()
    if name in ("__init__.py", "_errors.py")
    or name.startswith("remote/")
    or (
        name.startswith(("backend/", "engines/"))
        and not name.startswith(MAY_LOAD_TORCH)
        and not name.endswith("/case.py")
    )
}
_CAREFUL = {name: p for name, p in _FILES.items() if not name.startswith(MAY_CATCH_ALL)}


def _imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Every module that the code under `tree` imports, whole names."""
    package = ["nsa_tune", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _imported_when_loaded(tree: ast.Module, path: Path) -> Iterator[str]:
    """As `_imports`, without what functions and TYPE_CHECKING import."""
    for node in tree.body:
        later = isinstance(node, ast.FunctionDef | ast.ClassDef)
        typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not later and not typing:
            yield from _imports(node, path)


def _within(package: str, names: set[str]) -> set[str]:
    return {name for name in names if name == package or name.startswith(f"{package}.")}


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_a_module_says_what_it_is() -> None:
    for name, path in _FILES.items():
        assert ast.get_docstring(_parsed(path)), name


def _room(name: str) -> str | None:
    """The room of a module; None for the package itself."""
    parts = name.split(".")[1:]
    rooms = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((room for room in rooms if room in ROOMS), None)


def test_a_module_imports_only_what_its_room_may() -> None:
    for name, path in _FILES.items():
        own = _room(_module(path))
        imported = {_room(one) for one in _imports(_parsed(path), path)}

        in_room = own is not None or path.parent == ROOT or path.name == "__init__.py"
        assert in_room, f"{name} is in no room"
        assert imported - {own, None} <= ROOMS.get(own or "", ROOMS.keys()), name


def test_the_table_of_rooms_holds_no_arrow_too_many() -> None:
    used: dict[str, set[str | None]] = {room: set() for room in ROOMS}
    for path in _FILES.values():
        own = _room(_module(path))
        if own is not None:
            used[own] |= {_room(name) for name in _imports(_parsed(path), path)} - {own, None}

    assert used == ROOMS


def test_rooms_import_in_no_circle() -> None:
    list(TopologicalSorter(ROOMS).static_order())  # Raises CycleError for a circle.


def test_modules_import_in_no_circle() -> None:
    """What functions and TYPE_CHECKING import counts too."""
    modules = {_module(path): path for path in _FILES.values()}
    graph = {
        name: {
            found
            for imported in _imports(_parsed(path), path)
            if (found := _longest(imported, modules)) not in (None, name)
        }
        for name, path in modules.items()
        if path.name != "__init__.py"
    }

    list(TopologicalSorter(graph).static_order())


def _module(path: Path) -> str:
    return ".".join(["nsa_tune", *path.relative_to(ROOT).with_suffix("").parts])


def _longest(name: str, modules: Container[str]) -> str | None:
    """The module that an imported name is, or is in."""
    parts = name.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((module for module in names if module in modules), None)


GROUND = (
    "backend/types", "backend/points", "backend/costmodel", "db", "backend/dispatch", "engines",
    "autotune", "reports", "fleet", "_cli",
)  # fmt: skip
"""From the ground to the roof."""


def test_rooms_import_only_what_stands_below_them() -> None:
    levels = {room: level for level, room in enumerate(GROUND)}
    for room, rooms in ROOMS.items():
        for imported in rooms:
            above, below = _top(room), _top(imported)
            if above in levels and below in levels and above != below:
                assert levels[above] > levels[below], (room, imported)


def _top(room: str) -> str:
    return room if room.startswith("backend/") else room.partition("/")[0]


def test_no_code_is_made_of_text() -> None:
    for name, path in _FILES.items():
        assert _called(path).isdisjoint({"exec", "eval", "compile", "__import__"}), name
        assert "linecache" not in path.read_text(encoding="utf-8"), name


@cache
def _called(path: Path) -> frozenset[str]:
    """Names that are called; methods do not count."""
    calls = [node.func for node in ast.walk(_parsed(path)) if isinstance(node, ast.Call)]
    return frozenset(call.id for call in calls if isinstance(call, ast.Name))


def test_only_commands_import_the_fleet() -> None:
    importers = {room for room, rooms in ROOMS.items() if any(r.startswith("fleet") for r in rooms)}

    assert all(room.startswith(("fleet", "_cli")) for room in importers)


def test_parts_of_steering_import_only_what_stands_below_them() -> None:
    """In the table of docs/structure.md."""
    text = (ROOT.parent / "docs" / "structure.md").read_text(encoding="utf-8")
    section = text.partition("## How a prefill pass is steered in SGLang")[2].partition("\n## ")[0]
    parts = re.findall(r"^\| `(\w+)(?:\.py)?` \|", section, re.MULTILINE)
    package = "nsa_tune.engines.sglang.pass_mode"
    folder = ROOT.parent / package.replace(".", "/")

    assert set(parts) == {path.stem for path in folder.iterdir()} - {"__init__", "__pycache__"}
    for path in folder.rglob("*.py"):
        own = path.relative_to(folder).parts[0].removesuffix(".py")
        names = _within(package, set(_imports(_parsed(path), path))) - {package}
        imported = {name.removeprefix(f"{package}.").partition(".")[0] for name in names}
        assert imported <= set(parts[parts.index(own) :] if own in parts else parts), path.name


def test_the_runtime_path_loads_the_standard_library_only() -> None:
    for name, path in _RUNTIME.items():
        imported = set(_imported_when_loaded(_parsed(path), path))

        tops = {module.partition(".")[0] for module in imported}
        assert tops - sys.stdlib_module_names <= {"nsa_tune"}, name
        assert not _within("nsa_tune.backend.kernels", imported), name


def test_only_the_command_line_prints() -> None:
    assert [name for name, path in _FILES.items() if "print" in _called(path)] == ["cli.py"]


def test_only_two_places_catch_everything() -> None:
    for name, path in _CAREFUL.items():
        nodes = ast.walk(_parsed(path))
        for handler in (node for node in nodes if isinstance(node, ast.ExceptHandler)):
            assert handler.type is not None, f"{name}:{handler.lineno}"
            caught = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
            assert not caught & {"Exception", "BaseException"}, f"{name}:{handler.lineno}"


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))

    assert project["project"]["version"] == nsa_tune.__version__


def test_what_tests_import_is_installed_for_them() -> None:
    """By its own name: what another package brings along goes when that one does."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    main, groups = project["project"], project["dependency-groups"]
    needed = [*main["dependencies"], *main["optional-dependencies"]["tune"], *groups["test"]]
    given = {re.split(r"[<>=;]", text)[0].replace("-", "_") for text in needed}
    own = {"nsa_tune", "tests", "benchmarks"}
    for path in Path(__file__).parent.rglob("*.py"):
        tops = {name.partition(".")[0] for name in _imports(_parsed(path), ROOT / path.name)}
        assert tops - sys.stdlib_module_names - own <= given, path
