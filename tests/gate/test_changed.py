"""What a strategy depends on, and what of it differs from a git revision."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from forked_commands import run_module
from run_factory import make_header, make_run

from verifier.gate.baseline import Baseline
from verifier.gate.changed import Changed, recorded_since
from verifier.runs.revision import import_digests, revision
from verifier.runs.store import RunStore

pytestmark = pytest.mark.processes

RULES = '''
from helpers import twice, SIZE as size
import torch

LIMIT = 3


def shared(x):
    return x + LIMIT


def first(x):
    """A docstring."""
    return shared(twice(x))


def second(x):
    return x * size


class Third:
    def run(self):
        return other(2)


def other(x):
    return x
'''
HELPERS = """
import deeper

SIZE = 2


def twice(x):
    return deeper.double(x)


def unused(x):
    return x
"""
NAMES = ("first", "second", "Third")


def git(*arguments: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rules.py").write_text(RULES)
    Path("helpers.py").write_text(HELPERS)
    Path("deeper.py").write_text("def double(x):\n    return 2 * x\n")
    Path("README.md").write_text("text")
    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path


def edit(file: str, old: str, new: str) -> None:
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new))


def changed_names() -> list[str]:
    changed = Changed("HEAD", ["rules.py"])
    file = str(Path("rules.py").resolve())
    return [name for name in NAMES if changed.is_changed([(file, name)])]


@pytest.mark.parametrize(
    ("file", "old", "new", "names"),
    [
        ("rules.py", "return x * size", "return x * size + 1", ["second"]),
        ("rules.py", "x + LIMIT", "x - LIMIT", ["first"]),
        ("rules.py", "LIMIT = 3", "LIMIT = 4", ["first"]),
        ("helpers.py", "SIZE = 2", "SIZE = 3", ["second"]),
        ("deeper.py", "2 * x", "3 * x", ["first"]),
        ("rules.py", "def other(x):\n    return x", "def other(x):\n    return -x", ["Third"]),
        ("rules.py", "LIMIT = 3", "LIMIT = 3\nregister(first)", list(NAMES)),
        ("rules.py", "SIZE as size", "unused as size", ["second"]),
        ("helpers.py", "def unused(x):\n    return x", "def unused(x):\n    return -x", []),
        ("rules.py", '"""A docstring."""', '"""Another one."""  # and a comment', []),
        ("README.md", "text", "other text", []),
    ],
)  # fmt: skip
def test_a_strategy_changes_with_what_it_reads(project: Path, file: str, old: str, new: str, names: list[str]) -> None:
    edit(file, old, new)
    assert changed_names() == names
    changed = Changed("HEAD", ["rules.py"])
    assert bool(changed.files) == bool(names or "unused" in old)


def test_files_that_are_new_or_gone_count(project: Path) -> None:
    edit("rules.py", "return x * size", "return added.times(x)")
    edit("rules.py", "import torch", "import torch\nimport added")
    Path("added.py").write_text("def times(x):\n    return x\n")
    assert Changed("HEAD", ["rules.py"]).files == ("rules.py", "added.py")
    git("add", ".")
    git("commit", "-q", "-m", "second")
    assert Changed("HEAD", ["rules.py"]).files == ()
    edit("added.py", "return x", "return -x")
    assert changed_names() == ["second"]
    Path("deeper.py").unlink()
    assert changed_names() == ["first", "second"]
    assert "deeper.py" in Changed("HEAD", ["rules.py"]).files


def test_names_that_an_import_of_all_names_defines_are_followed(project: Path) -> None:
    edit("rules.py", "from helpers import twice, SIZE as size", "from helpers import *")
    edit("rules.py", "x * size", "x * SIZE")
    git("commit", "-q", "-a", "-m", "all names")
    edit("helpers.py", "SIZE = 2", "SIZE = 3")
    assert "second" in changed_names()


@pytest.mark.parametrize("layout", ["rules_of_mine", "src/rules_of_mine"])
def test_modules_of_packages_are_found_by_their_names(project: Path, layout: str) -> None:
    folder = Path(layout)
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "scale.py").write_text(
        "from .shared import base\nfrom . import extra\n\n\ndef rule():\n    return base()\n"
    )
    (folder / "shared.py").write_text("def base():\n    return 1\n")
    (folder / "extra.py").write_text("")
    git("add", ".")
    git("commit", "-q", "-m", "package")
    imports = ["rules_of_mine.scale"]
    assert Changed("HEAD", imports).files == ()
    edit(f"{layout}/shared.py", "return 1", "return 2")
    changed = Changed("HEAD", imports)
    assert changed.files == (f"{layout}/shared.py",)
    assert changed.is_changed([(str(folder / "scale.py"), "rule")])


@pytest.mark.parametrize(
    ("file", "old", "new", "loads"),
    [
        ("kept/table.json", "[1]", "[2]", 'open(os.path.join(os.path.dirname(__file__), "kept/table.json"))'),
        ("kernel.cpp", "return 1;", "return 2;", 'load(sources=["kernel.cpp"])'),
        ("late.py", "ONE = 1", "ONE = 2", 'importlib.import_module("late").ONE'),
        ("lib/found_by_path.py", "ONE = 1", "ONE = 2", "found_by_path.ONE"),
        ("ignored.py", "ONE = 1", "ONE = 2", "ignored.ONE"),
    ],
)  # fmt: skip
def test_what_code_names_or_finds_elsewhere_counts(project: Path, file: str, old: str, new: str, loads: str) -> None:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(old)
    Path(".gitignore").write_text("ignored.py\n")
    edit("rules.py", "x * size", f"x * {loads}")
    edit("rules.py", "import torch", "import torch, importlib, os, found_by_path, ignored")
    git("add", ".")
    git("commit", "-q", "-m", "named")
    if file != "ignored.py":
        edit("rules.py", "found_by_path, ignored", "found_by_path")
        git("commit", "-q", "-a", "-m", "nothing ignored")
        assert (changed_names(), Changed("HEAD", ["rules.py"]).files) == ([], ())
    edit(file, old, new)
    assert (changed_names(), Changed("HEAD", ["rules.py"]).files) == (["second"], (file,))


OP = """
import torch

from helpers import registering


@torch.library.custom_op("changed::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@op.register_fake
def fake(x):
    return x + 2


@registering(torch.ops.changed.op.default)
def first(x):
    return x + 3


@registering(torch.ops.aten.exp.default)
def second(x):
    return x + 4
"""


@pytest.mark.parametrize(("old", "names"), [("2", ["first", "second"]), ("3", ["first"]), ("4", ["second"])])
def test_what_is_registered_beside_the_rules_concerns_all(project: Path, old: str, names: list[str]) -> None:
    Path("rules.py").write_text(OP)
    git("commit", "-q", "-a", "-m", "an op")
    edit("rules.py", f"x + {old}", f"x - {old}")
    changed = Changed("HEAD", ["rules.py"])
    file = str(Path("rules.py").resolve())
    changed.know_rules([(file, "op"), (file, "first"), (file, "second")])
    assert [name for name in ("first", "second") if changed.is_changed([(file, name)])] == names


@pytest.mark.parametrize(
    ("file", "new"),
    [
        ("own.py", "from shared import install\ninstall(1)\ninstall(2)\n"),
        ("own.py", "from shared import install\ninstall(1)\nimport unused_before\n"),
        ("own.py", "from shared import install\ninstall(1)\nif True:\n    import unused_before\n"),
        ("pyproject.toml", '[tool.dtensor-verifier]\nimport = ["own.py", "unused_before.py"]\n'),
        ("dynamic.py", 'from importlib import import_module\nNAMES = ["unused_before"]\nfor name in NAMES:\n'
         "    import_module(name)\n"),
    ],
)  # fmt: skip
def test_a_rule_of_an_unchanged_file_changes_with_what_registers_it(project: Path, file: str, new: str) -> None:
    Path("shared.py").write_text("def install(op):\n    register(op)\n")
    Path("unused_before.py").write_text("@register\ndef rule(x):\n    return x\n")
    Path("own.py").write_text("from shared import install\nimport dynamic\ninstall(1)\n")
    Path("dynamic.py").write_text(new.replace('["unused_before"]', "[]") if file == "dynamic.py" else "")
    Path("pyproject.toml").write_text('[tool.dtensor-verifier]\nimport = ["own.py"]\n')
    git("add", ".")
    git("commit", "-q", "-m", "own")
    imports = ["own.py", *["unused_before.py"] * (file == "pyproject.toml")]
    starts = [(str(Path("shared.py").resolve()), "install"), (str(Path("unused_before.py").resolve()), "rule")]
    assert Changed("HEAD", ["own.py"]).files == ()
    assert not Changed("HEAD", ["own.py"]).is_changed(starts[:1])
    Path(file).write_text(new)
    changed = Changed("HEAD", imports)
    assert changed.files
    assert changed.is_changed(starts[:1] if "install(2)" in new else starts[1:])


@pytest.mark.parametrize(("ref", "said"), [("mian", "did you mean 'main'"), ("--all", "no such revision"), ("", "''")])
def test_a_revision_that_does_not_exist_is_a_usage_error(project: Path, ref: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Changed(ref, ["rules.py"])


@pytest.mark.parametrize("name", ["no_such_module", "json"])
def test_an_import_that_is_not_under_git_cannot_be_compared(project: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"--import {name}: has no file in"):
        Changed("HEAD", [name])


def test_outside_a_repository_nothing_can_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match="needs a git repository"):
        Changed("HEAD", ["rules.py"])


# ------------------------------------------------------------------------------------------------------------- evidence
def recorded(store: RunStore, run_id: str, version: str = str(torch.__version__)) -> None:
    header = make_header(
        id=run_id, imports=["rules.py"], own_rules=["aten.exp.default"],
        digests={**revision(), **import_digests(["rules.py", "helpers.py"])}, request={"patterns": []},
    )  # fmt: skip
    header.versions["torch"] = version
    with store.open_run(header) as writer:
        writer.finish(make_run(header=header, findings=[], tool_errors=[]))


def test_evidence_from_the_revision_counts_while_nothing_differs(project: Path) -> None:
    store = RunStore(Path("reports"))
    recorded(store, "20260101T000000-000000-000001")
    edit("rules.py", "LIMIT = 3", "LIMIT = 3  # of the op")
    evidence = recorded_since(Changed("HEAD", ["rules.py"]), store, Baseline())
    assert [run.header.id for run in evidence.runs] == ["20260101T000000-000000-000001"]
    assert evidence.unchanged == "no strategy of --import rules.py differs from HEAD, so none had to be verified"

    edit("rules.py", "LIMIT = 3", "LIMIT = 4")
    git("commit", "-q", "-a", "-m", "another limit")
    evidence = recorded_since(Changed("HEAD", ["rules.py"]), store, Baseline())
    assert not evidence.runs
    assert any("rules.py has changed" in line for line in evidence.left_out)


def test_runs_of_another_torch_are_left_out_once(project: Path) -> None:
    store = RunStore(Path("reports"))
    recorded(store, "1", "2.12.0")
    evidence = recorded_since(Changed("HEAD", ["rules.py"]), store, Baseline())
    assert evidence.left_out == ("1 run was made with another torch or verifier, the newest is 1",)


# ------------------------------------------------------------------------------------------------------------- commands
STRATEGIES = """
import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy


@register_single_dim_strategy(torch.ops.aten.exp.default)
def exp(op, args, kwargs):
    return []


@register_single_dim_strategy(torch.ops.aten.neg.default)
def neg(op, args, kwargs):
    return [[Partial(), Partial()]]
"""


def gate(*arguments: str) -> tuple[int, str]:
    made = run_module("verifier", "gate", "--import", "own.py", *arguments)
    assert "Traceback" not in made.stderr
    return made.returncode, made.stdout + made.stderr


@pytest.mark.cli
def test_nothing_is_verified_where_no_strategy_has_changed(project: Path) -> None:
    Path("own.py").write_text(STRATEGIES)
    git("add", ".")
    git("commit", "-q", "-m", "strategies")
    edit("README.md", "text", "other text")
    status, said = gate("--changed-since", "HEAD")
    assert status == 0, said
    assert "gate passed: nothing had to be verified (exit status 0)" in said
    assert not Path("reports").exists()

    for arguments, expected in (
        (("--changed-since", "HAED"), "no such revision; did you mean 'HEAD'?"),
        (("--changed-since", "HEAD", "--fresh"), "leave out --fresh"),
        (("--changed-since", "HEAD", "exp"), "leave out a pattern"),
    ):
        status, said = gate(*arguments)
        assert status == 2
        assert expected in said


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.cli
def test_only_the_op_whose_strategy_has_changed_is_verified(project: Path) -> None:
    Path("own.py").write_text(STRATEGIES)
    git("add", ".")
    git("commit", "-q", "-m", "strategies")
    status, said = gate()
    assert status == 0, said
    edit("own.py", "    return []", "    return [[Partial(), Partial()]]")
    status, said = gate("--changed-since", "HEAD")
    assert status == 1, said
    assert "1 op whose strategies do not differ from HEAD: aten.neg.default" in said
    assert [line for line in said.splitlines() if line.startswith("    in aten.exp.default")]
    assert len(list(Path("reports/runs").iterdir())) == 3
