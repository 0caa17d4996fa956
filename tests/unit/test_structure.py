"""The rooms of the code: imports point down only, and torch's private modules have one importer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS = (
    ("verifier", "torch_internals.expanding"),
    ("torch_internals",),
    (
        "core",
        "torch_internals.amending",
        "torch_internals.claims",
        "torch_internals.redistributing",
        "torch_internals.rule_code",
    ),
    ("processes", "programs", "torch_internals.amending.sharding"),
    ("placements",),
    ("oracle", "records"),
    ("events", "execution", "findings.script", "redistribution", "rules"),
    ("meshes", "planning", "report.paths", "runs"),
    ("gate", "meshes.torchrun", "report", "testing"),
    ("findings",),
    ("calls", "campaign", "rules.campaign"),
    ("deriving.learning", "mutation"),
    ("deriving.writing",),
    ("deriving",),
    ("cli", "modules"),
    ("__main__", "pytest_plugin"),
)
"""The rooms of ``verifier``, and the modules at its top, from bottom to top. A room imports from lower floors only."""

MOST_AT_THE_TOP = 8
MOST_IN_A_ROOM = 14


def python_files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def imported(source: str, package: str = "") -> Iterator[str]:
    """Yield the dotted path of everything that ``source`` imports, wherever in the file: modules and names of modules.

    ``package`` resolves relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*parents, *([module] if module else [])])
                yield from (f"{base}.{alias.name}" for alias in names)
            case ast.Call(func=called, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(called).rpartition(".")[2] in ("import_module", "__import__"):
                    yield name


def imports_of(path: Path) -> list[str]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return list(imported(path.read_text(encoding="utf-8"), package))


def is_private_torch(name: str) -> bool:
    """Return whether ``name`` is a private module of torch, or something that is private in a public one."""
    first, *rest = name.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def room_of(module: str) -> str:
    """Return the room of a module: its package without ``verifier.``, or the name of a module at the top."""
    if (ROOT / module.replace(".", "/") / "__init__.py").exists():
        return module.removeprefix("verifier.")
    package, _, name = module.rpartition(".")
    return name if package == "verifier" else package.removeprefix("verifier.")


def modules_of_the_verifier() -> dict[str, Path]:
    """Return the files of ``verifier`` by the dotted name of their module."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in python_files("verifier")}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def imports_between_modules() -> dict[str, set[str]]:
    """Return which of the verifier's modules each of them imports when it is loaded."""
    modules = modules_of_the_verifier()
    return {name: _imports_at_load(path) & modules.keys() - {name} for name, path in modules.items()}


def _imports_at_load(path: Path) -> set[str]:
    """Return what a file imports at its top level; what it imports for type checkers only does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for name in _names(node)}
    packages = {name.rpartition(".")[0] for name in names}
    return names | packages


def _names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    yield from imported(ast.unparse(node))


def upward_imports(imports: dict[str, set[str]], floors: tuple[tuple[str, ...], ...]) -> list[str]:
    """Return the imports between rooms that do not point to a lower floor, each as ``importer -> imported``."""
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms}
    return [
        f"{name} -> {other}"
        for name, others in sorted(imports.items())
        for other in sorted(others)
        if room_of(name) != room_of(other) and floor[room_of(name)] <= floor[room_of(other)]
    ]


def test_every_room_stands_on_one_floor() -> None:
    assert sorted(room for rooms in FLOORS for room in rooms) == sorted({room_of(m) for m in modules_of_the_verifier()})


def test_imports_point_down_only() -> None:
    imports = imports_between_modules()
    assert sum(map(len, imports.values())) > 500
    assert upward_imports(imports, FLOORS) == []


def test_an_upward_import_is_seen() -> None:
    imports = {"verifier.core.case": {"verifier.oracle.verdicts"}, "verifier.oracle.verdicts": {"verifier.core.case"}}
    assert upward_imports(imports, FLOORS) == ["verifier.core.case -> verifier.oracle.verdicts"]


def test_no_modules_import_each_other() -> None:
    graph, done = imports_between_modules(), set[str]()
    while graph.keys() - done:
        ready = {name for name in graph.keys() - done if graph[name] - {name} <= done}
        assert ready, f"import each other: {sorted(graph.keys() - done)}"
        done |= ready


def test_rooms_are_small() -> None:
    folders = {path.parent for path in python_files("verifier", "strategies")}
    sizes = {folder: len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) for folder in folders}
    most = {ROOT / "verifier": MOST_AT_THE_TOP}
    assert {str(f): size for f, size in sizes.items() if size > most.get(f, MOST_IN_A_ROOM)} == {}


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports a test file by its base name, and refuses a second file of that name."""
    names = [path.name for path in python_files("tests") if path.name.startswith("test_")]
    assert len(names) > 100
    assert sorted(name for name in {*names} if names.count(name) > 1) == []


def test_verifier_imports_neither_families_nor_tests() -> None:
    names = [(path, name) for path in python_files("verifier") for name in imports_of(path)]
    assert len(names) > 1000
    assert [found for found in names if found[1].split(".")[0] in ("strategies", "tests")] == []


def test_strategies_import_no_tests() -> None:
    names = [(path, name) for path in python_files("strategies") for name in imports_of(path)]
    assert [found for found in names if found[1].split(".")[0] == "tests"] == []


def test_private_modules_of_torch_have_one_importer() -> None:
    files = python_files("verifier", "strategies")
    private = {path for path in files if any(map(is_private_torch, imports_of(path)))}
    room = ROOT / "verifier" / "torch_internals"
    assert {path.parent for path in private} == {
        room, room / "amending", room / "amending" / "sharding", room / "claims", room / "expanding",
        room / "redistributing", room / "rule_code",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._dynamo", ["torch._dynamo"]),
        ("def f():\n    from torch.utils import _pytree as p", ["torch.utils._pytree"]),
        ("from torch.testing._internal import common_utils", ["torch.testing._internal.common_utils"]),
        ("import importlib\nimportlib.import_module('torch._C')", ["torch._C"]),
        ("from torch import __version__", []),
        ("from torch.distributed.tensor import Shard", []),
        ("# import torch._dynamo\ntext = 'import torch._inductor'", []),
    ],
)
def test_private_imports_are_seen(source: str, expected: list[str]) -> None:
    assert [name for name in imported(source) if is_private_torch(name)] == expected


def test_relative_imports_are_resolved() -> None:
    assert list(imported("from ..strategies import embedding", "verifier.report")) == ["verifier.strategies.embedding"]
    assert list(imported("from .words import x", "verifier.report")) == ["verifier.report.words.x"]


def ends_beside_a_process_group(source: str) -> bool:
    """Return whether what makes a process group neither destroys it nor leaves without Python's own end.

    Python would end beside a thread of gloo's that may hold a tensor, which aborts: pytorch/pytorch#190489.
    """
    return "init_process_group(" in source and "destroy_process_group()" not in source and "os._exit(" not in source


SOURCES = [
    *python_files("verifier", "strategies", "tests", "benchmarks"),
    ROOT / "README.md",
    *(ROOT / "docs").rglob("*.md"),
]


def test_who_makes_a_process_group_does_not_leave_it_to_the_end_of_python() -> None:
    made = {path: path.read_text(encoding="utf-8") for path in SOURCES if path != Path(__file__)}
    assert [path for path, text in made.items() if ends_beside_a_process_group(text)] == []
    assert sum("init_process_group(" in text for text in made.values()) > 5
    assert ends_beside_a_process_group('import torch.distributed as dist\ndist.init_process_group("gloo")\n')
