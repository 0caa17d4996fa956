"""The command ``replay``: of a finding that only the baseline knows, and of one in an op of the user's own."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from run_factory import make_finding

import strategies
from verifier.cli import work
from verifier.cli.main import main
from verifier.core.case import Trial
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.gate.baseline import load_baseline
from verifier.records.schema import FAILS, GONE, NOT_RUN
from verifier.records.values import load_trial

LOOKUP = "45c5f5c71f01"
"""A crash in torch's row-wise lookup, in this repository's baseline."""
BASELINE = Path(__file__).parents[2] / "reports" / "baseline.toml"


@pytest.mark.parametrize(
    ("imports", "made", "status"),
    [
        ([], Verdict(VerdictKind.CRASH, "every rank raised"), 1),
        (["strategies.install"], Verdict(VerdictKind.UNSUPPORTED, "refused"), 0),
    ],
)
def test_ranks_run_what_is_given_to_import(
    imports: list[str],
    made: Verdict,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[object] = []

    def replay(trial: Trial, expected: str, imports: list[str], *_: object) -> tuple[Verdict, bool]:
        asked.extend([trial.case.op, expected, *imports])
        return made, made.kind == expected

    monkeypatch.setattr(work, "replay_trial", replay)
    options = [word for name in imports for word in ("--import", name)]
    where = ["--out", str(tmp_path), "--baseline", str(BASELINE)]
    monkeypatch.setattr(sys, "argv", ["verifier", "replay", LOOKUP, *where, *options])
    with pytest.raises(SystemExit) as ended, strategies.installed():  # which takes back what is imported
        main()
    assert ended.value.code == status
    assert asked == ["aten.embedding.default", "CRASH", *imports]
    said = capsys.readouterr().out
    assert ("still fails: CRASH" if status else "does not fail as it did (CRASH): now UNSUPPORTED refused") in said


def test_an_op_that_an_import_of_the_run_defines_is_there_to_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    definitions = tmp_path / "of_the_user.py"
    definitions.write_text(
        "import torch\n"
        "LIBRARY = torch.library.Library('replayed_by_name', 'DEF')\n"
        "LIBRARY.define('negated(Tensor x) -> Tensor')\n"
        "LIBRARY.impl('negated', torch.neg, 'CPU')\n"
    )
    finding = make_finding(op="replayed_by_name.negated.default", imports=[str(definitions)], script="")
    table = finding.trial.case.args[1]
    case = replace(
        finding.trial.case, op=finding.op, call="torch.ops.replayed_by_name.negated.default", args=[table], kwargs={}
    )
    finding = replace(finding, trial=replace(finding.trial, case=case, combination=["S(0)"]))
    file = tmp_path / "finding.json"
    file.write_bytes(msgspec.json.encode(finding))
    ranks_import: list[str] = []

    def replayed(trial: Trial, expected: str, imports: list[str], *_: object) -> tuple[Verdict, bool]:
        ranks_import.extend(imports)
        return Verdict(VerdictKind(expected), f"{trial.case.op} replayed"), True

    monkeypatch.setattr(work, "replay_trial", replayed)
    typed = ["verifier", "replay", str(file), "--out", "else where"]
    monkeypatch.setattr(sys, "argv", typed)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.count("\n") == 1
    assert said.err.endswith(f"python -m verifier replay {file} --import {definitions} --out 'else where'\n")
    assert not ranks_import
    monkeypatch.setattr(sys, "argv", [*typed, "--import", str(definitions)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 1, said.err
    assert ranks_import == [str(definitions)]
    assert "still fails: WRONG_GRADIENT: replayed_by_name.negated.default replayed" in said.out
    assert f"reproduce: python -m verifier replay a1b2c3d4e5 --import {definitions} --out 'else where'" in said.out


@pytest.mark.parametrize(
    ("stored", "came", "ran", "status", "said"),
    [
        (FAILS, FAILS, False, 0, ""),
        (NOT_RUN, FAILS, True, 0, "was run: fails as described"),
        (NOT_RUN, GONE, True, 2, "was run: did not fail\n  what it printed"),
        (GONE, "broke with exit status 2", True, 2, "was run: broke with exit status 2"),
    ],
)
def test_a_script_is_run_before_it_is_printed(
    stored: str,
    came: str,
    ran: bool,
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The text in the file is printed at most: it is not what is run."""
    finding = make_finding(script="raise SystemExit('from the file')\n", script_status=stored)
    finding = replace(finding, trial=replace(finding.trial, mesh="2"))
    file = tmp_path / "finding.json"
    file.write_bytes(msgspec.json.encode(finding))
    verdict = Verdict(VerdictKind(finding.verdict), "as it was", Phase.FORWARD)
    monkeypatch.setattr(work, "replay_trial", lambda *_: (verdict, True))
    runs: list[str] = []
    monkeypatch.setattr(work, "run_script", lambda source: (runs.append(source), (came, "what it printed"))[1])
    monkeypatch.setattr(sys, "argv", ["verifier", "replay", str(file), "--script", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == status
    assert len(runs) == ran
    assert shown.out == (runs[0] if ran else finding.script)
    assert ("from the file" in shown.out) == (not ran)
    assert said in shown.err


@pytest.mark.ranks
def test_a_verdict_that_says_why_a_trial_fails_is_met_by_how_it_fails() -> None:
    stale = next(one for one in load_baseline(BASELINE).entries if one.verdict == VerdictKind.STALE_CACHE)
    trial = load_trial(stale.trial())
    verdict, fails = work.replay_trial(trial, stale.verdict)
    assert verdict.kind not in (VerdictKind.STALE_CACHE, VerdictKind.PASS)
    assert fails
    assert not work.replay_trial(trial, VerdictKind.DIED)[1]
