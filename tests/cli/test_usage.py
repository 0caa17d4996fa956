"""What a user got wrong on the command line is one line on stderr and exit status 2."""

from __future__ import annotations

import sys
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
