"""What a user got wrong on the command line is one line on stderr and exit status 2."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from verifier.cli import main as entry
from verifier.cli import rules_work, work


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is not refused end at once."""
    for module, name in ((work, "record"), (rules_work, "record_rules")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a run was begun"))


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command line; return the exit status, and what stands on stdout and on stderr."""
    monkeypatch.setattr(sys, "argv", ["verifier", *arguments])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert isinstance(ended.value.code, int)
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "-1"])
def test_a_time_limit_is_positive_and_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    status, out, err = run(monkeypatch, capsys, "run", "embedding", "--time-limit", seconds, "--out", str(tmp_path))
    assert (status, out) == (2, "")
    assert err == f"error: --time-limit {seconds}: the limit must be a positive, finite number of seconds\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtypes", ["", ",", "float32,"])
def test_an_empty_dtype_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtypes: str
) -> None:
    status, out, err = run(monkeypatch, capsys, "run", "embedding", "--dtype", dtypes, "--out", str(tmp_path))
    assert (status, out) == (2, "")
    assert err.startswith("error: dtype '' is none of float")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [["run"], ["merge", "a"], ["rules"], ["report"], ["gate"], ["replay", "a"]],
    ids=lambda command: command[0],
)
def test_an_empty_out_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(monkeypatch, capsys, *command, "--out", "")
    assert (status, out) == (2, "")
    assert err == "error: --out '' names no folder; give a path, as . for this one\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--jobs", "0"], "--jobs 0: must be from 1 to 256"),
        (["--products", "5", "--world-size", "3"], "--products 5: no mesh has several dims; add one, as --mesh 2x2"),
    ],
)
def test_what_a_rule_check_cannot_use_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    status, out, err = run(monkeypatch, capsys, "rules", "add", *options, "--out", str(tmp_path))
    assert (status, out, err) == (2, "", f"error: {message}\n")


def test_an_import_of_pytest_that_is_no_file_is_a_mistake(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_one(): pass")
    result = pytester.runpytest_inprocess("--verifier-import", "no_such_file.py")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--verifier-import no_such_file.py: there is no file */no_such_file.py"])


def test_an_empty_folder_of_pytest_is_a_mistake(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_one(): pass")
    result = pytester.runpytest_inprocess("--verifier-out", "")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--verifier-out '' names no folder; give a path, as . for this one"])


def test_what_can_be_named_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(monkeypatch, capsys, "list", "embedding", "aten.cumsum.default")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("family embedding: ")
    assert "  aten.embedding.default" in lines
    assert lines[-2:][0] == "  aten.cumsum.default"
    assert "2x2" in lines[-1]
    status, out, err = run(monkeypatch, capsys, "list", "own")
    assert (status, out) == (2, "")
    assert err == "error: the family 'own' draws no op here; --import the file that has its samples\n"
    status, out, err = run(monkeypatch, capsys, "list")
    assert (status, err) == (0, "")
    families = [line for line in out.splitlines() if line.startswith("family ")]
    assert [line.split()[1] for line in families][:2] == ["chains:", "embedding:"]
    status, out, err = run(monkeypatch, capsys, "list", "cumsun")
    assert (status, out) == (2, "")
    assert "did you mean 'cumsum'?" in err


@pytest.mark.parametrize("command", ["run", "rules", "list"])
def test_an_op_of_ones_own_without_its_import_is_a_line_that_names_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    status, out, err = run(monkeypatch, capsys, command, "no_such_library.double")
    assert (status, out) == (2, "")
    assert err == "error: no op no_such_library.double is registered; --import the file or module that defines it\n"


def test_an_op_of_ones_own_without_samples_says_how_to_give_some(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "library_of_usage.py"
    file.write_text(
        "import torch\nOWN = torch.library.Library('of_usage', 'DEF')\nOWN.define('twice(Tensor x) -> Tensor')\n"
    )
    status, out, err = run(monkeypatch, capsys, "run", "of_usage.twice", "--import", str(file))
    assert (status, out) == (2, "")
    assert err.startswith("error: of_usage.twice has no samples")
    assert "docs/guides/samples.md" in err
    assert err.count("\n") == 1


def test_the_versions_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(monkeypatch, capsys, "--version")
    assert (status, err) == (0, "")
    assert out.startswith("dtensor-verifier 0.1.0, torch 2.")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("typed", "completed"),
    [("ru", ["run", "rules"]), ("run --mes", ["--mesh"]), ("gate --format s", ["sarif"]), ("run --frmat ", [])],
)
def test_the_shell_completes_what_was_typed(typed: str, completed: list[str]) -> None:
    """As the function does that ``dtensor-verifier --install-completion`` gives to bash."""
    words = f"dtensor-verifier {typed}"
    asked = {"_DTENSOR_VERIFIER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    program = "import sys; sys.argv = ['dtensor-verifier']; from verifier.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == completed, done.stderr


def test_warnings_of_torchs_kernels_are_not_shown_and_others_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warns(*_: object) -> list[str]:
        warnings.warn("index_reduce() is in beta (Triggered internally at Foo.cpp:1.)", stacklevel=2)
        warnings.warn("something of the user's", stacklevel=2)
        return []

    monkeypatch.setattr("verifier.cli.reading.names_to_verify", warns)
    status, _, err = run(monkeypatch, capsys, "list")
    assert status == 0
    assert "something of the user's" in err
    assert "index_reduce" not in err
