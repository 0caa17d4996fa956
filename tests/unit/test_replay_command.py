"""The command ``replay`` where the finding is one of the baseline's and of no run here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verifier import cli
from verifier.cases import Trial, Verdict, VerdictKind
from verifier.entry import main

VIEW = "f80b46049ef4"
"""A crash in torch's rule of aten.view, in this repository's baseline; our own strategies have it refuse the call."""
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

    monkeypatch.setattr(cli, "replay_trial", replay)
    options = [word for name in imports for word in ("--import", name)]
    where = ["--out", str(tmp_path), "--baseline", str(BASELINE)]
    monkeypatch.setattr(sys, "argv", ["verifier", "replay", VIEW, *where, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert asked == ["aten._embedding_bag.default", "CRASH", *imports]
    said = capsys.readouterr().out
    assert ("still fails: CRASH" if status else "does not fail as it did (CRASH): now UNSUPPORTED refused") in said
