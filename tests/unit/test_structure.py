"""Imports point one way, and torch's private modules have one importer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRIVATE_IMPORTER = ROOT / "verifier" / "torch_internals.py"


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


@pytest.mark.parametrize("path", python_files("verifier"), ids=lambda path: str(path.relative_to(ROOT)))
def test_verifier_imports_neither_families_nor_tests(path: Path) -> None:
    assert [name for name in imports_of(path) if name.split(".")[0] in ("strategies", "tests")] == []


@pytest.mark.parametrize("path", python_files("strategies"), ids=lambda path: str(path.relative_to(ROOT)))
def test_strategies_import_no_tests(path: Path) -> None:
    assert [name for name in imports_of(path) if name.split(".")[0] == "tests"] == []


@pytest.mark.parametrize("path", python_files("verifier", "strategies"), ids=lambda path: str(path.relative_to(ROOT)))
def test_private_modules_of_torch_have_one_importer(path: Path) -> None:
    private = [name for name in imports_of(path) if is_private_torch(name)]
    if path == PRIVATE_IMPORTER:
        assert private
    else:
        assert private == []


def test_import_graph_has_no_cycle() -> None:
    """Among the verifier's own modules; imports for type checkers only are none at run time."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in python_files("verifier")}
    graph = {name: _run_time_imports(path) & set(modules) - {name} for name, path in modules.items()}
    done: set[str] = set()
    while graph.keys() - done:
        ready = {name for name in graph.keys() - done if graph[name] <= done}
        assert ready, f"import each other: {sorted(graph.keys() - done)}"
        done |= ready


def _run_time_imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kept = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    names = set(imported(ast.unparse(ast.Module(kept, []))))
    return names | {name.rpartition(".")[0] for name in names}


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
    *(ROOT / "docs").glob("*.md"),
]


def test_who_makes_a_process_group_does_not_leave_it_to_the_end_of_python() -> None:
    made = {path: path.read_text(encoding="utf-8") for path in SOURCES if path != Path(__file__)}
    assert [path for path, text in made.items() if ends_beside_a_process_group(text)] == []
    assert sum("init_process_group(" in text for text in made.values()) > 5
    assert ends_beside_a_process_group('import torch.distributed as dist\ndist.init_process_group("gloo")\n')
