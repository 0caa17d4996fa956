"""The command ``bisect``: the script of a finding under interpreters with other versions of torch."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from verifier.campaign import bisecting
from verifier.cli.main import main
from verifier.core.case import Trial
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.findings import versions
from verifier.gate.baseline import Baseline, load_baseline
from verifier.records.schema import FAILS, GONE

pytestmark = pytest.mark.processes

COMMITTED = Path(__file__).parents[2] / "reports" / "baseline.toml"
CAUSE = "masks-shared"


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """Return a baseline with one cause."""
    entry = next(one for one in load_baseline(COMMITTED).causes if one.remedy == CAUSE)
    path = tmp_path / "known.toml"
    Baseline((replace(entry, torch=("2.13.0",), mended=()),)).save(path)
    return path


@pytest.fixture
def fails_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the finding fail, and its script show that, under the torch of this process, 2.13.0, without ranks."""

    def replay(trial: Trial, expected: str, imports: object) -> tuple[Verdict, bool]:
        return Verdict(VerdictKind(expected), "every rank raised", phase=Phase.FORWARD), True

    def run_script(source: str, python: str | None = None) -> tuple[str, str]:
        return (FAILS, "seen") if python is None else usual(source, python)

    usual = versions.run_script
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(bisecting, "replay", replay)
    monkeypatch.setattr(bisecting, "render_script", lambda *_: "raise SystemExit(17)")
    monkeypatch.setattr(versions, "run_script", run_script)


def interpreter(folder: Path, version: str, status: int, said: str = "") -> str:
    """Return the path of a program that says it has a version of torch, and ends scripts with a status."""
    path = folder / f"python-{version}"
    path.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            if [ "$1" = -c ]; then echo "torch {version}+cpu"; exit 0; fi
            echo "{said}"; exit {status}
        """)
    )
    path.chmod(0o755)
    return str(path)


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["verifier", "bisect", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.usefixtures("fails_here")
def test_versions_are_told_apart_and_noted(
    baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [interpreter(tmp_path, "2.15.0", 0), interpreter(tmp_path, "2.14.1", 1)]
    options = [word for python in others for word in ("--python", python)]
    assert typed(monkeypatch, CAUSE, *options, "--baseline", str(baseline), "--update") == 0
    said = capsys.readouterr().out
    assert "torch 2.13.0  fails as described\n  torch 2.14.1  fails as described\n  torch 2.15.0  did not fail" in said
    assert "fails under 2.13.0 to 2.14.1; does not fail under 2.15.0" in said
    (entry,) = load_baseline(baseline).entries
    assert (entry.torch, entry.mended) == (("2.13.0", "2.14.1"), ("2.15.0",))


@pytest.mark.usefixtures("fails_here")
@pytest.mark.parametrize("output", ["json", "markdown", "text"])
def test_a_script_that_does_not_tell_is_status_2(
    output: str, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = interpreter(tmp_path, "2.15.0", 2, "UNDECIDED: it raised: no such name")
    before = baseline.read_text()
    options = ["--python", broken, "--baseline", str(baseline), "--format", output]
    assert typed(monkeypatch, *options) == 2
    said = capsys.readouterr().out
    if output == "json":
        (found,) = json.loads(said)["findings"]
        assert [one["status"] for one in found["outcomes"]] == [FAILS, "broke with exit status 2"]
        assert "no such name" in found["outcomes"][1]["said"]
    elif output == "markdown":
        assert "| fails | not told |" in said
    else:
        assert "torch 2.15.0  broke with exit status 2: it raised: no such name\n" in said
    assert typed(monkeypatch, *options, "--update") == 2
    assert baseline.read_text() == before


@pytest.mark.usefixtures("fails_here")
def test_what_does_not_fail_here_has_no_script(
    baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bisecting, "replay", lambda *_: (Verdict(VerdictKind.PASS, ""), False))
    python = interpreter(tmp_path, "2.15.0", 1)
    assert typed(monkeypatch, CAUSE, "--python", python, "--baseline", str(baseline)) == 2
    said = capsys.readouterr().out
    assert GONE in said
    assert "so it has no script" in said


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "bisect: which versions of torch? Give --python PATH of an interpreter, or --make VERSION"),
        (["--python", "nowhere/python"], "--python nowhere/python: there is no such program"),
        (["--python", "/bin/false"], "--python /bin/false: it cannot import torch: exit status 1"),
        (["--make", "latest"], "--make latest: a version of torch is written as 2.14.1"),
    ],
)
def test_wrong_versions_are_refused(
    words: list[str], error: str, baseline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, CAUSE, *words, "--baseline", str(baseline)) == 2
    assert error in capsys.readouterr().err


def test_an_unknown_finding_is_refused(
    baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--baseline", str(baseline), "--out", str(tmp_path / "none")]
    assert typed(monkeypatch, "masks-shred", "--python", sys.executable, *where) == 2
    assert "no finding and no remedy 'masks-shred'; did you mean 'masks-shared'?" in capsys.readouterr().err
    assert typed(monkeypatch, "0000", "--python", sys.executable, *where) == 2
    assert "no finding '0000'" in capsys.readouterr().err


def test_an_environment_is_made_once_and_never_left_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> object:
        asked.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
            shutil.copy(interpreter(tmp_path, "2.14.1", 0), Path(command[-1]) / "bin" / "python")
        failed = "torch==9.9" in command
        return type(
            "Done", (), {"returncode": int(failed), "stdout": "", "stderr": "x\nERROR: no such version\nnote"}
        )()

    with monkeypatch.context() as patch:
        patch.setattr(versions.subprocess, "run", run)
        patch.setattr(versions, "ask", lambda python: versions.Interpreter(python, "2.14.1"))
        made = [versions.make("2.14.1", tmp_path / "made") for _ in range(2)]
        assert len(asked) == 2
        with pytest.raises(ValueError, match=r"--make 9\.9: .* failed: ERROR: no such version"):
            versions.make("9.9", tmp_path / "made")
    assert made[0] == made[1]
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["torch-2.14.1"]
    assert versions.ask(made[0].python or "").torch == "2.14.1"
