"""Outcomes that rule checks take over from earlier ones, and those that they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_commands import run_module
from run_factory import make_header
from torch.distributed.tensor import Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.findings.failures import Failure
from verifier.findings.grouping import group_key
from verifier.records.files import read_record
from verifier.records.schema import FAILS, GONE
from verifier.rules.campaign.outcomes import Outcome, Outcomes, earlier_outcomes
from verifier.runs.revision import BASELINE, TORCH_RULES, VERIFIER
from verifier.runs.store import RunStore

DIGESTS = {TORCH_RULES: "a", VERIFIER: "b", "my_rules.py": "c", BASELINE: "d"}
HEADER = make_header(
    id="20260101T000000-000000-000000", profile="rules", imports=["my_rules.py"], digests=DIGESTS,
    own_rules=["aten.neg.default"],
)  # fmt: skip


def trial_of(value: float = 1.0) -> Trial:
    case = OpCase("aten.neg.default", "torch.ops.aten.neg.default", (torch.tensor([value, 2.0]),), family="opinfo")
    return Trial(case, MeshSpec((2,)), ((Shard(0),),))


def crash(trial: Trial, fate: Fate = Fate.COMPLETED, kind: VerdictKind = VerdictKind.CRASH) -> Outcome:
    reports = [ProcessReport((rank,), Phase.FORWARD, Raised(Phase.FORWARD, "RuntimeError", "no")) for rank in range(2)]
    verdict = Verdict(kind, "a rank raised", Phase.FORWARD, "output", raised="RuntimeError")
    return Observation(trial, fate, tuple(reports)), verdict


class Check:
    """A rule check that tries trials, and those of its trials that it had to make."""

    def __init__(self, store: RunStore, run_id: str, **header: Any) -> None:
        made = replace(HEADER, **{"id": run_id, **header})
        self.made: list[tuple[Trial, tuple[str, ...]]] = []
        self.scripts: list[str] = []
        self.writer = store.open_run(made)
        self.outcomes = Outcomes(earlier_outcomes(store, made), self.writer.append, run_id)

    def tries(self, trial: Trial, *remedies: str, **outcome: Any) -> Outcome:
        def make() -> Outcome:
            self.made.append((trial, remedies))
            return crash(trial, **outcome)

        return self.outcomes.of_trial(trial, remedies, make)

    def runs(self, source: str, status: str = FAILS) -> str:
        def run() -> str:
            self.scripts.append(source)
            return status

        return self.outcomes.of_script(source, run)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    store = RunStore(tmp_path)
    first = Check(store, HEADER.id)
    first.tries(trial_of())
    first.runs("a script")
    first.writer.close()
    return store


def test_what_an_earlier_check_has_tried_is_not_tried_again(store: RunStore) -> None:
    later = Check(store, "20260102T000000-000000-000000")
    observation, verdict = later.tries(trial_of())
    assert not later.made
    assert verdict == crash(trial_of())[1]
    same = Failure(trial_of(), observation, verdict), Failure(trial_of(), *crash(trial_of()))
    assert group_key(same[0]) == group_key(same[1])
    assert later.outcomes.run_of(trial_of()) == HEADER.id
    assert later.runs("a script") == FAILS
    assert not later.scripts
    later.writer.close()
    third = Check(store, "20260103T000000-000000-000000")
    third.tries(trial_of())
    assert third.outcomes.run_of(trial_of()) == HEADER.id


@pytest.mark.parametrize("kind", [VerdictKind.UNSUPPORTED, VerdictKind.CRASH, VerdictKind.INCONCLUSIVE])
def test_what_every_rank_raised_is_kept(tmp_path: Path, kind: VerdictKind) -> None:
    """A refusal under a remedy mends a trial if the remedy itself has refused, on every rank."""
    store = RunStore(tmp_path)
    for day in (1, 2):
        check = Check(store, f"2026010{day}T000000-000000-000000")
        observation, _ = check.tries(trial_of(), "a-remedy", kind=kind)
        check.writer.close()
        assert [report and report.raised for report in observation.reports] == [
            Raised(Phase.FORWARD, "RuntimeError", "no")
        ] * 2
        assert len(check.made) == (day == 1)


def test_another_trial_other_remedies_and_another_script_are_run(store: RunStore) -> None:
    later = Check(store, "20260102T000000-000000-000000")
    for trial, remedies in ((trial_of(3.0), ()), (replace(trial_of(), seed=1), ()), (trial_of(), ("a-remedy",))):
        later.tries(trial, *remedies)
        assert later.made[-1] == (trial, remedies)
        assert not later.outcomes.run_of(trial) or remedies
    later.runs("another script")
    assert later.scripts == ["another script"]


@pytest.mark.parametrize(
    "changed",
    [
        {"digests": {**DIGESTS, "my_rules.py": "changed"}},
        {"digests": {**DIGESTS, TORCH_RULES: "changed"}},
        {"digests": {**DIGESTS, VERIFIER: "changed"}},
        {"digests": {**DIGESTS, "helper.py": "another file that the rules use"}},
        {"imports": [], "digests": {name: DIGESTS[name] for name in (TORCH_RULES, VERIFIER, BASELINE)}},
        {"own_rules": []},
        {"versions": {**HEADER.versions, "torch": "2.14.0"}},
        {"profile": "ci"},
    ],
)
def test_a_changed_rule_is_tried_again(store: RunStore, changed: Mapping[str, Any]) -> None:
    later = Check(store, "20260102T000000-000000-000000", **changed)
    later.tries(trial_of())
    later.runs("a script")
    assert len(later.made) == len(later.scripts) == 1


def test_another_baseline_decides_no_trial(store: RunStore) -> None:
    later = Check(store, "20260102T000000-000000-000000", digests={**DIGESTS, BASELINE: "changed"})
    later.tries(trial_of())
    assert not later.made


@pytest.mark.parametrize(
    "outcome", [{"fate": Fate.HANG}, {"fate": Fate.DIED}, {"fate": Fate.SLOW}, {"kind": VerdictKind.TOOL_ERROR}]
)
def test_what_depends_on_the_machine_is_not_taken_over(tmp_path: Path, outcome: dict[str, Any]) -> None:
    store = RunStore(tmp_path)
    for day in (1, 2):
        check = Check(store, f"2026010{day}T000000-000000-000000")
        check.tries(trial_of(), **outcome)
        check.runs("a script", GONE)
        assert len(check.made) == len(check.scripts) == 1
        check.writer.close()


def test_a_journal_that_was_damaged_is_not_believed(store: RunStore) -> None:
    path = store.path(HEADER.id, "journal.jsonl")
    path.write_text(path.read_text().replace('"verdict":"CRASH"', '"verdict":"NONSENSE"'))
    later = Check(store, "20260102T000000-000000-000000")
    later.tries(trial_of())
    assert len(later.made) == 1
    path.write_bytes(path.read_bytes()[:-40] + b"\n\xff{")
    Check(store, "20260103T000000-000000-000000")


RULES = """
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy


@register_single_dim_strategy(torch.ops.aten.exp.default)
def exp(op, args, kwargs):
    return [{rules}]
"""


@pytest.mark.nightly
@pytest.mark.ranks
def test_a_file_that_changes_and_stays_wrong_is_confirmed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = []
    for rules in ("[Partial(), Partial()]",) * 2 + ("[Shard(0), Shard(0)], [Partial(), Partial()]",):
        Path("my_rules.py").write_text(RULES.format(rules=rules))
        made = run_module("verifier", "rules", "--import", "my_rules.py", "--claims-only")
        assert made.returncode == 1, made.stdout + made.stderr
        run = read_record(max(tmp_path.glob("reports/runs/*/run.json")))
        assert run.rules is not None
        [finding] = run.findings
        said.append((finding.confirmed.why, run.rules.seconds_confirming))
    assert [bool(why) for why, _ in said] == [False, True, False]
    assert said[1][1] < said[0][1] / 3
