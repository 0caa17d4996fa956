"""What an installation relies on: the version, the entry points, the files beside the code, the pins and tox.ini."""

from __future__ import annotations

import configparser
import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterable
from importlib import import_module, metadata, resources
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_structure import imports_of, python_files

import verifier
from verifier.cli.options import DRAWN_UNASKED
from verifier.planning.families import ENTRY_POINT_GROUP, Family, installed_families, select_ops

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def tox_ini() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    return parser


def requirements() -> list[Requirement]:
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in [*PROJECT["dependencies"], *extras]]


def third_party() -> dict[str, Path]:
    """Return the top-level modules of others that our packages import, each with a file that does."""
    own = {"verifier", "strategies", *sys.stdlib_module_names}
    found: dict[str, Path] = {}
    for path in python_files("verifier", "strategies"):
        found |= {name.partition(".")[0]: path for name in imports_of(path) if name.partition(".")[0] not in own}
    return found


def undeclared(modules: Iterable[str], names: Collection[str]) -> list[str]:
    """Return those of ``modules`` that no distribution in ``names`` brings."""
    # torchrec asks for kernels that would take the place of the extra's, and so comes by itself; see pyproject.toml
    brought = {**metadata.packages_distributions(), "torchrec": ["torchrec"], "fbgemm_gpu": ["fbgemm-gpu-cpu"]}
    admitted = {canonicalize_name(name) for name in (*names, "torchrec")}
    return [one for one in modules if admitted.isdisjoint(map(canonicalize_name, brought.get(one, [one])))]


def test_what_is_imported_is_declared() -> None:
    names = [requirement.name for requirement in requirements()]
    assert undeclared(third_party(), names) == []
    assert undeclared(["markupsafe"], [name for name in names if name != "markupsafe"]) == ["markupsafe"]
    assert {"torch", "markupsafe", "tomli_w"} <= third_party().keys()


def test_the_table_of_dependencies_is_what_is_declared() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("| dependency | why |")[2].partition("\n\n")[0]
    rows = [name for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) for name in row.split(", ")]
    declared = [Requirement(line).name for line in PROJECT["dependencies"]]
    assert sorted(set(rows) - {"---"}) == sorted(declared)


def test_one_version() -> None:
    assert PROJECT["version"] == verifier.__version__


@pytest.mark.parametrize(("name", "path"), sorted(PROJECT["scripts"].items()))
def test_scripts_can_be_called(name: str, path: str) -> None:
    module, _, function = path.partition(":")
    assert callable(getattr(import_module(module), function)), name


@pytest.mark.parametrize("path", PROJECT["entry-points"]["pytest11"].values())
def test_plugin_has_the_fixture_verify(path: str) -> None:
    assert hasattr(import_module(path), "verify")


@pytest.mark.parametrize(("name", "path"), sorted(PROJECT["entry-points"][ENTRY_POINT_GROUP].items()))
def test_families_load_under_their_own_names(name: str, path: str) -> None:
    module, _, attribute = path.partition(":")
    family = getattr(import_module(module), attribute)
    assert isinstance(family, Family)
    assert family.name == name


def test_what_is_installed_declares_the_families() -> None:
    try:
        metadata.distribution(PROJECT["name"])
    except metadata.PackageNotFoundError:
        pytest.skip("the distribution is not installed, the tests run from its folder")
    assert installed_families().keys() >= PROJECT["entry-points"][ENTRY_POINT_GROUP].keys()


def test_the_help_names_what_a_run_without_patterns_draws() -> None:
    families = {
        name: import_module(path.partition(":")[0]) for name, path in PROJECT["entry-points"][ENTRY_POINT_GROUP].items()
    }
    assert tuple(select_ops((), {name: module.FAMILY for name, module in families.items()})) == DRAWN_UNASKED


def test_torch_is_pinned_and_admitted_from_2_13_to_2_15() -> None:
    assert pins()["torch"] == "2.13.0"
    torch = next(requirement for requirement in requirements() if requirement.name == "torch")
    admitted = [v for v in ("2.12.1", "2.13.0", "2.14.0", "2.15.0", "2.15.2", "2.16.0") if v in torch.specifier]
    assert admitted == ["2.13.0", "2.14.0", "2.15.0", "2.15.2"]


def test_every_requirement_is_pinned_to_a_version_that_it_admits() -> None:
    pinned = {canonicalize_name(name): version for name, version in pins().items()}
    for requirement in requirements():
        assert pinned.get(canonicalize_name(requirement.name), "no pin") in requirement.specifier, requirement


def test_pins_are_portable_and_sorted() -> None:
    assert [f"{name}=={version}" for name, version in pins().items() if "+" in version] == []
    assert list(pins()) == sorted(pins())


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("verifier", "py.typed"),
        ("strategies", "py.typed"),
        ("verifier.findings.script", "script.py.jinja"),
        *(("verifier.report", path.name) for path in sorted((ROOT / "verifier" / "report").glob("*.jinja"))),
    ],
)
def test_files_beside_the_code_are_found_and_packaged(package: str, name: str) -> None:
    assert resources.files(package).joinpath(name).is_file()
    top, _, folder = package.partition(".")
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    assert any(Path(folder.replace(".", "/"), name).match(pattern) for pattern in data[top])


def test_the_page_has_its_templates() -> None:
    assert (ROOT / "verifier" / "report" / "page.html.jinja").is_file()


@pytest.mark.parametrize(("name", "torch"), [("torch214", "2.14.1"), ("torch215", "2.15.0")])
def test_other_versions_of_torch_have_an_environment_and_pins_of_their_own(name: str, torch: str) -> None:
    environment = tox_ini()[f"testenv:{name}"]
    file = f"constraints-{name}.txt"
    assert environment["constraints"] == f"{{tox_root}}/{file}"
    assert "pytest --hypothesis-profile=ci" in environment["commands"]
    assert pins(file)["torch"] == torch
    assert list(pins(file)) == sorted(pins(file))
    of_torch = {name for name in pins(file) if re.match(r"torch|triton|nvidia|cuda", name)}
    same = pins().keys() & pins(file).keys() - of_torch
    assert {name: pins(file)[name] for name in same} == {name: pins()[name] for name in same}


@pytest.mark.parametrize("name", ["ci", "report", "torchrec", "dev", "lint", "types", "derived215"])
def test_tox_has_the_environment(name: str) -> None:
    environment = tox_ini()[f"testenv:{name}"]
    assert environment["description"]
    assert environment["commands"]


def test_tox_installs_what_is_pinned() -> None:
    assert tox_ini()["testenv"]["constraints"] == "{tox_root}/constraints.txt"


def test_ci_runs_the_test_command() -> None:
    assert tox_ini()["testenv:ci"]["commands"] == "pytest --hypothesis-profile=ci -n auto {posargs}"
    assert tox_ini()["testenv:types"]["commands"] == "mypy --strict {posargs:verifier strategies}"
    types = (ROOT / "tests" / "suite" / "test_types.py").read_text(encoding="utf-8")
    assert '"mypy", "--strict"' in types
    assert 'said_of_types("verifier", "strategies")' in types
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert text.index("-e lint") < text.index("-e ci"), "pytest's summary comes last"
