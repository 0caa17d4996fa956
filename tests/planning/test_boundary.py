"""What a file may have called: every way out of it that anybody has thought of, by the commands that read files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import typer
from run_factory import make_finding

from strategies.redistribution.inputs import STEP_NAMES
from strategies.redistribution.programs import STEPS
from verifier.cli import app as cli
from verifier.cli import main as entry
from verifier.cli import work
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import Verdict, VerdictKind
from verifier.execution.imports import run_imports
from verifier.gate.baseline import Baseline
from verifier.gate.entries import BaselineEntry
from verifier.oracle.reference import make_reference
from verifier.placements.parsing import parse_placements
from verifier.planning.boundary import needs_imports, refusal
from verifier.records.schema import FindingRecord

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(cli.app)
TENSOR = {"tensor": {"dtype": "float64", "shape": [4], "values": [1.0, 2.0, 3.0, 4.0]}}
INTEGERS = {"tensor": {"dtype": "int64", "shape": [4], "values": [1, 2, 3, 4]}}
CANARY = "CANARY"
"""Stands for the path that must not come to be."""
EVIL = "EVIL"
"""Stands for the path of a file of Python that makes it."""


@dataclass(frozen=True)
class Attempt:
    """A way to have a file do more than it may."""

    call: str
    args: list[Any] = field(default_factory=lambda: [TENSOR])
    kwargs: dict[str, Any] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)
    mesh: str = "2"
    seed: int = 0
    combination: list[str] = field(default_factory=lambda: ["R"])


TOUCH = f"touch {CANARY}"
OPEN = f"open({CANARY!r}, 'w')"
CONSUMED = "strategies.opinfo.programs.consumed"
SEQUENCE = "strategies.redistribution.programs.sequence"
ATTEMPTS = {
    "a program of the shell": Attempt("os.system", [TOUCH, TENSOR]),
    "the same by its other name": Attempt("posix.system", [TOUCH]),
    "a process": Attempt("subprocess.run", [["touch", CANARY]]),
    "source": Attempt("builtins.exec", [OPEN]),
    "an expression": Attempt("builtins.eval", [OPEN]),
    "a method of a path": Attempt("pathlib.Path.touch", [CANARY]),
    "a module that torch has imported": Attempt("torch.os.system", [TOUCH]),
    "a module that a module of torch has imported": Attempt("torch.serialization.os.system", [TOUCH]),
    "a module of torch's functions": Attempt("torch.nn.functional.importlib.import_module", ["evil_module"]),
    "a file that torch writes": Attempt("torch.save", [TENSOR, CANARY]),
    "a pickle that torch reads": Attempt("torch.load", [CANARY], {"weights_only": False}),
    "a file that torch maps": Attempt("torch.from_file", [CANARY, True, 8]),
    "a repository": Attempt("torch.hub.load", [CANARY, "x"], {"source": "local"}),
    "a compiler": Attempt("torch.utils.cpp_extension.load", ["x", [CANARY]]),
    "a library": Attempt("torch.ops.load_library", [CANARY]),
    "classes of a library": Attempt("torch.classes.load_library", [CANARY]),
    "an import by torch.ops": Attempt("torch.ops.import_module", ["evil_module"]),
    "TorchScript": Attempt("torch.jit.load", [CANARY]),
    "a package": Attempt("torch.package.PackageImporter", [CANARY]),
    "torch.compile": Attempt("torch.compile", [TENSOR]),
    "a module of torch that is loaded when asked for": Attempt("torch._dynamo.optimize"),
    "an op that maps a file": Attempt("torch.ops.aten.from_file.default", [CANARY, True, 8]),
    "an op that maps a file into a tensor": Attempt("torch.ops.aten.from_file.out", [CANARY, True, 8], {"out": TENSOR}),
    "an op that writes a file": Attempt("torch.ops.aten.save", [TENSOR, CANARY]),
    "an op that reads a file": Attempt("torch.ops.debugprims.load_tensor.default", [CANARY, [1], [1]]),
    "an op of more than one rank": Attempt("torch.ops._c10d_functional.all_reduce.default", [TENSOR, "sum", "0"]),
    "a pickle of a tensor": Attempt("torch.Tensor.__reduce_ex__", [TENSOR, 4]),
    "a method that is no op": Attempt("torch.Tensor.numpy"),
    "a class": Attempt("torch.Tensor.__class__"),
    "what a function knows": Attempt("torch.nn.functional.embedding.__globals__"),
    "builtins of a module": Attempt("strategies.embedding.programs.__builtins__.exec", [OPEN]),
    "a module of a program": Attempt("strategies.opinfo.programs.torch.os.system", [TOUCH]),
    "a helper beside programs": Attempt("strategies.torchrec.checkpoint.reloaded", [TENSOR, CANARY]),
    "a program by another name": Attempt("strategies.opinfo.random_ops.sampled"),
    "our own imports": Attempt("verifier.execution.imports.run_imports", [[EVIL]]),
    "our own lookup": Attempt("verifier.core.ops.resolve", ["evil_module.x"]),
    "our own tests": Attempt("verifier.testing.run_on_rank", [TENSOR]),
    "a module that is found": Attempt("evil_module.anything"),
    "no path": Attempt("os;system"),
    "an import of a program's": Attempt(CONSUMED, ["import_module", [], TENSOR], {"module": "evil_module"}),
    "a library of a program's": Attempt(CONSUMED, ["load_library", []], {"path": CANARY}),
    "a file of a program's": Attempt(
        CONSUMED, ["aten.neg.default", [["aten.save", "result", CANARY]]], {"self": TENSOR}
    ),
    "a file of a consumer's": Attempt(
        "strategies.opinfo.programs.produced",
        ["aten.neg.default", "self", ["aten.from_file.default", True, 8]],
        {"self": CANARY},
    ),
    "no op of a program's": Attempt(CONSUMED, [], {"self": TENSOR}),
    "a method of a sequence": Attempt(
        SEQUENCE, [TENSOR, TENSOR, [["numpy", 0], ["tofile", 2, CANARY]]], combination=["R", "R"]
    ),
    "a function of torchrec's module": Attempt(
        "strategies.torchrec.client.train_bags", [], {"plan": [["warnings.warn", {}, "dense"]], "tables": [TENSOR]}
    ),
    "an import of the file's": Attempt("torch.neg", imports=[EVIL]),
    "a dtype that is a module": Attempt("torch.ops.aten.to.dtype", [TENSOR, {"dtype": "_inductor"}]),
    "many ranks": Attempt("torch.neg", mesh="100000"),
    "many simulated ranks": Attempt("torch.neg", mesh="simulated:100000"),
    "more ranks than there are numbers": Attempt("torch.neg", mesh="9" * 5000),
    "a seed of many bits": Attempt("torch.neg", seed=-(1 << 70)),
    "a tensor without its values": Attempt(
        "torch.neg", [{"tensor": {"dtype": "float64", "shape": [10**12], "values": [1.0]}}]
    ),
    "a deep argument": Attempt("torch.neg", [TENSOR, msgspec.json.decode(b"[" * 300 + b"]" * 300)]),
    "too many placements": Attempt("torch.neg", combination=["R", "R"]),
    "placements of another mesh": Attempt("torch.neg", combination=["(R, R)"]),
}


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path that must not come to be; whoever imports ``evil_module``, or the file EVIL, makes it."""
    path = tmp_path / "canary"
    for name in ("evil.py", "evil_module.py"):
        (tmp_path / name).write_text(f"open({str(path)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    sys.modules.pop("evil_module", None)


def filled(value: Any, canary: Path) -> Any:
    """Return ``value`` with the paths for which names stand in it."""
    if isinstance(value, str):
        return value.replace(CANARY, str(canary)).replace(EVIL, str(canary.with_name("evil.py")))
    if isinstance(value, list):
        return [filled(item, canary) for item in value]
    return {name: filled(item, canary) for name, item in value.items()} if isinstance(value, dict) else value


def finding_of(attempt: Attempt, canary: Path) -> FindingRecord:
    found = make_finding()
    call, args, kwargs = filled([attempt.call, attempt.args, attempt.kwargs], canary)
    case = replace(found.trial.case, call=call, args=args, kwargs=kwargs)
    trial = replace(
        found.trial, case=case, mesh=attempt.mesh, seed=attempt.seed, combination=attempt.combination, cotangents=[]
    )
    return replace(found, trial=trial, imports=filled(attempt.imports, canary))


def run_here(trial: Trial, *_: object) -> tuple[Verdict, bool]:
    """Stand in for ranks: make the call in this process, so that whatever passes does its worst."""
    make_reference(trial.case)
    return Verdict(VerdictKind.PASS), False


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setattr(work, "replay_trial", run_here)
    monkeypatch.setattr(entry, "get_command", lambda app: COMMANDS)

    def typed(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["verifier", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            entry.main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return typed


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
def test_a_finding_has_nothing_done_but_ops_of_torch(
    attempt: Attempt, canary: Path, tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "finding.json"
    file.write_bytes(msgspec.json.encode(finding_of(attempt, canary)))
    refused = tmp_path / "refused.json"  # another one first, which loads what any refusal loads
    refused.write_bytes(msgspec.json.encode(finding_of(replace(attempt, call="os.getpid", args=[]), canary)))
    assert command("replay", refused, "--out", tmp_path / "none")[0] == 2
    before = set(sys.modules)
    status, out, err = command("replay", file, "--out", tmp_path / "none")
    assert not canary.exists()
    assert {name for name in set(sys.modules) - before if "evil" in name or name.startswith("torch.")} == set()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")


@pytest.mark.parametrize("name", [name for name, attempt in ATTEMPTS.items() if not attempt.imports])
def test_a_baseline_has_nothing_done_but_ops_of_torch(
    name: str, canary: Path, tmp_path: Path, command: Command
) -> None:
    found = finding_of(ATTEMPTS[name], canary)
    entry = BaselineEntry(
        fingerprint=found.fingerprint, op=found.op, family=found.family, verdict=found.verdict, rule=found.rule,
        mesh=found.mesh, summary="", reason="a test", torch=("2.13.0",), expires=date(2099, 1, 1),
        replay=msgspec.json.encode(found.trial).decode(),
    )  # fmt: skip
    file = tmp_path / "baseline.toml"
    Baseline((entry,)).save(file)
    status, out, err = command("replay", found.fingerprint, "--baseline", file, "--out", tmp_path / "none")
    assert not canary.exists()
    assert (status, out, err.count("\n")) == (2, "", 1), err


def test_what_is_not_outside_is_called(canary: Path, tmp_path: Path, command: Command) -> None:
    """The tests above would pass if nothing ever ran."""
    file = tmp_path / "finding.json"
    file.write_bytes(msgspec.json.encode(finding_of(Attempt("torch.neg"), canary)))
    assert command("replay", file, "--out", tmp_path / "none")[0] == 0
    file.write_bytes(msgspec.json.encode(finding_of(Attempt("evil_module.open", [str(canary), "w"], {}), canary)))
    assert command("replay", file, "--import", "evil_module", "--out", tmp_path / "none")[0] == 2
    assert canary.exists()  # made by the import, which is what the command line asked for


# --------------------------------------------------------------------------------------------------- what has to pass
ENTRIES = """
import sys
from pathlib import Path
from verifier.gate.baseline import load_baseline
from verifier.planning.boundary import refusal
from verifier.records.values import load_trial

for name in sys.argv[1:]:
    print(name)
    for entry in load_baseline(Path(name)).entries:
        print(entry.fingerprint, refusal(load_trial(entry.trial())))
"""


@pytest.mark.processes
def test_every_entry_of_our_own_baselines_can_be_run_again() -> None:
    """In a process of its own: tests have imported more programs than a command does."""
    names = [str(ROOT / "reports" / name) for name in ("baseline.toml", "baseline-torchrec.toml")]
    program = [sys.executable, "-c", ENTRIES, *names]
    said = subprocess.run(program, capture_output=True, check=True, text=True).stdout.splitlines()
    assert [line for line in said if not re.fullmatch(r"[0-9a-f]{12} ", line)] == names
    assert len(said) - said.index(names[1]) > 1 < said.index(names[1])


@pytest.mark.parametrize(
    "call",
    [
        "torch.add", "torch.einsum", "torch.norm", "torch.split", "torch.relu_", "torch._foreach_add",
        "torch.nn.functional.gelu", "torch.nn.functional.sigmoid", "torch.nn.functional.max_pool2d",
        "torch.nn.functional.scaled_dot_product_attention", "torch.nn.functional.cross_entropy", "torch.linalg.qr",
        "torch.fft.fft", "torch.special.erf", "torch.Tensor.add_", "torch.Tensor.__matmul__", "torch.Tensor.__radd__",
        "torch.Tensor.unique", "torch.Tensor.view", "torch.ops.aten.mm", "torch.ops.aten.mm.default",
        "torch.ops.prims.add.default", "strategies.embedding.programs.used_twice",
        "strategies.embedding_bag.programs.scaled", "strategies.sharded_tensor.programs.trained",
        "strategies.torchrec.programs.train",
    ],
)  # fmt: skip
def test_functions_of_tensors_and_programs_of_families_may_be_called(call: str) -> None:
    assert refusal(_neg(call)) == ""


def test_the_op_of_a_file_that_the_command_line_imports_may_be_called(tmp_path: Path) -> None:
    file = tmp_path / "defines_an_op.py"
    file.write_text(
        "import torch\n"
        "@torch.library.custom_op('boundary_test::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n"
        "    return 2 * x\n"
    )
    run_imports([str(file)])
    trial = _neg("torch.ops.boundary_test.twice.default")
    assert "needs --import with the file that defines it" in refusal(trial)
    assert refusal(trial, [str(file)]) == ""


def test_functions_that_an_imported_module_defines_may_be_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boundary_programs.py").write_text(
        "import os\nfrom os import system\nimport torch\n"
        "def twice(x):\n    return 2 * x\n"
        "class Double(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return 2 * x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "boundary_programs"
    assert refusal(_neg(f"{name}.twice")).endswith(f"; needs --import {name}")
    assert name not in sys.modules
    run_imports([name])
    assert refusal(_neg(f"{name}.twice"), [name]) == ""
    assert refusal(_neg(f"{name}.Double.apply"), [name]) == ""
    for outside in ("system", "os.system", "twice.__globals__", "__dict__", "missing", "Double.__init__.__globals__"):
        assert refusal(_neg(f"{name}.{outside}"), [name]), outside


def test_an_import_is_the_same_wherever_the_file_lies() -> None:
    assert needs_imports(["rules.py", "mine.ops"], ["/home/me/rules.py", "mine.ops"]) == []
    assert needs_imports(["rules.py", "mine.ops"], ["mine"]) == ["rules.py", "mine.ops"]


def test_every_step_that_a_sequence_is_drawn_with_may_be_read_back() -> None:
    assert set(STEP_NAMES) <= STEPS


def _neg(call: str = "torch.neg") -> Trial:
    case = OpCase("aten.neg.default", call, (torch.ones(2),))
    return Trial(case, MeshSpec((2,)), (parse_placements("R"),))
