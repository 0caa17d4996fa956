"""Which recorded runs a gate goes by: an unrelated, older or stale run neither hides a finding nor is evidence."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from plain_records import EMBEDDING, a_finding, a_header, a_run
from run_factory import make_op_rules, make_rules

from verifier.gate.baseline import Baseline
from verifier.gate.decision import decide_all
from verifier.gate.evidence import Evidence, collect
from verifier.gate.question import Question
from verifier.records.files import RunFormatError
from verifier.records.schema import INTERRUPTED, FindingRecord, MatrixRecord, RunHeader, RunRecord, UntestedRecord
from verifier.runs.revision import TORCH_RULES, VERIFIER, changes_since, revision
from verifier.runs.store import RunStore

MM = "aten.mm.default"
BAG = "aten._embedding_bag.default"
TODAY = datetime.now(UTC).date()
NOW = revision()
TORCH = "2.13.0"


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "reports")


@pytest.fixture(autouse=True)
def _torch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier.runs.revision.version", lambda _: f"{TORCH}+cpu")


def header(run_id: str, *, patterns: tuple[str, ...] = ("embedding",), **changes: object) -> RunHeader:
    request = {"patterns": list(patterns), "seed": 1} if patterns else {}
    command = f"python -m verifier run {' '.join(patterns)}" if patterns else "pytest test_rules.py"
    made = a_header(id=run_id, request=request, command=command, digests=dict(NOW), versions={"torch": TORCH})
    return replace(made, **changes)  # type: ignore[arg-type]


def stored(
    store: RunStore, made: RunHeader, *findings: FindingRecord, ops: tuple[str, ...] = (EMBEDDING,), **changes: object
) -> RunRecord:
    """Store a run that tried ``ops`` on all of its meshes; each has 8 trials on a mesh."""
    counts = changes.pop("verdicts", {"PASS": 8})
    matrices = [MatrixRecord(op, mesh, "a", "b", {"R": {"R": counts}}) for op in ops for mesh in made.meshes]  # type: ignore[dict-item]
    total = Counter[str]()
    for _ in matrices:
        total.update(counts)  # type: ignore[call-overload]
    values: dict[str, object] = {
        "header": made, "matrices": matrices, "counts": dict(total), "trials": total.total(),
        "counts_by_op": dict.fromkeys(ops, counts), **changes,
    }  # fmt: skip
    run = a_run(*findings, **values)
    with store.open_run(made) as writer:
        writer.finish(run)
    return run


def judged(store: RunStore, question: Question | None = None, baseline: Baseline | None = None) -> tuple[int, Evidence]:
    """Return the exit status of a gate, and what it went by."""
    known = baseline or Baseline()
    evidence = collect(store, question or Question(), known)
    return decide_all(evidence, known, TODAY).exit_status, evidence


def why(evidence: Evidence) -> str:
    return "\n".join(f"{one.why} | {one.remedy}" for one in evidence.unanswered)


# --------------------------------------------------------------------------------------------- unrelated and older runs
@pytest.mark.parametrize("unrelated", ["another op", "a test", "a rule check", "another mesh", "another import"])
def test_an_unrelated_run_does_not_hide_a_finding(store: RunStore, unrelated: str) -> None:
    stored(store, header("1"), a_finding("a1"))
    assert judged(store)[0] == 1
    match unrelated:
        case "another op":
            stored(store, header("2", patterns=("mm",)), ops=(MM,))
        case "a test":
            stored(store, header("2", patterns=()), ops=(MM,))
        case "a rule check":
            rules = make_rules(ops={"mm": make_op_rules(overloads=[MM], wrong=[], unconfirmed=[])})
            stored(store, header("2", patterns=(), profile="rules"), ops=(), rules=rules)
        case "another mesh":
            stored(store, header("2", meshes=["2"]))
        case "another import":
            stored(store, header("2", imports=["my.py"], digests={**NOW, "sys": ""}))
    status, evidence = judged(store)
    assert status == 1
    assert {run.header.id for run in evidence.runs} == {"1", "2"}


@pytest.mark.parametrize(
    "less",
    [{"max_examples": 1}, {"seed": 2}, {"profile": "dev"}, {"dtypes": []}, {"shard": "1/2"}, {"device": "cuda"}],
    ids=lambda changes: str(next(iter(changes))),
)
def test_a_weaker_run_of_the_same_does_not_hide_a_finding(store: RunStore, less: dict[str, object]) -> None:
    stored(store, header("1"), a_finding("a1"))
    stored(store, header("2", **less))
    assert judged(store)[0] == 1


def test_an_incomplete_run_of_the_same_does_not_hide_a_finding(store: RunStore) -> None:
    stored(store, header("1"), a_finding("a1"))
    stored(store, header("2"), complete=False)
    assert judged(store)[0] == 1


@pytest.mark.parametrize("more", [{}, {"max_examples": 20}, {"meshes": ["4", "8"]}, {"profile": "nightly"}])
def test_a_later_run_of_the_same_or_more_decides(store: RunStore, more: dict[str, object]) -> None:
    stored(store, header("1"), a_finding("a1"))
    stored(store, header("2", **more))
    status, evidence = judged(store)
    assert (status, [run.header.id for run in evidence.runs]) == (0, ["2"])


def test_a_finding_stands_until_its_op_was_tried_again_on_all_meshes(store: RunStore) -> None:
    stored(store, header("1", meshes=["2", "2x2"]), a_finding("a1", mesh="2"))
    stored(store, header("2", meshes=["2"]))
    assert judged(store)[0] == 1
    stored(store, header("3", meshes=["2x2"]))
    assert judged(store)[0] == 0, "two later runs have tried it again between them"


def test_tests_are_tried_again_by_as_many_trials(store: RunStore) -> None:
    stored(store, header("1", patterns=()), a_finding("a1"))
    stored(store, header("2", patterns=()), verdicts={"PASS": 7})
    assert judged(store)[0] == 1
    stored(store, header("3", patterns=(), command="pytest"), verdicts={"PASS": 8})
    assert judged(store)[0] == 0


# ------------------------------------------------------------------------------------------------------- stale evidence
def changed_file(tmp_path: Path) -> tuple[str, dict[str, str]]:
    file = tmp_path / "my_rules.py"
    file.write_text("x = 1\n")
    digests = revision([str(file)])
    file.write_text("x = 2\n")
    return str(file), digests


def test_evidence_of_an_import_that_has_changed_is_refused_by_name(store: RunStore, tmp_path: Path) -> None:
    name, digests = changed_file(tmp_path)
    stored(store, header("1", imports=[name], digests=digests))
    status, evidence = judged(store)
    assert status == 2
    assert why(evidence) == (
        f"run 1 is stale: {name} has changed; no later run has tried {EMBEDDING} again "
        "| again: python -m verifier run embedding"
    )
    Path(name).unlink()
    assert f"{name} is not there any more" in why(judged(store)[1])


def test_stale_evidence_stays_in_question_beside_an_unrelated_run(store: RunStore, tmp_path: Path) -> None:
    name, digests = changed_file(tmp_path)
    stored(store, header("1", imports=[name], digests=digests))
    stored(store, header("2", patterns=("mm",)), ops=(MM,))
    assert judged(store)[0] == 2
    assert judged(store, Question(("mm",)))[0] == 0, "it was not asked about"
    stored(store, header("3", imports=[name], digests=revision([name])))
    assert judged(store)[0] == 0, "it was made anew"


@pytest.mark.parametrize(
    ("later", "finding", "status"),
    [({"seed": 2}, False, 0), ({"seed": 2}, True, 2), ({"seed": 2, "max_examples": 1}, False, 2)],
)
def test_a_stale_run_without_a_finding_may_be_tried_again_with_another_seed(
    later: dict[str, object], finding: bool, status: int, store: RunStore, tmp_path: Path
) -> None:
    name, digests = changed_file(tmp_path)
    stored(store, header("1", imports=[name], digests=digests), *[a_finding("a1")] * finding)
    stored(store, header("2", imports=[name], digests=revision([name]), **later))
    ended, evidence = judged(store, Question((EMBEDDING,)))
    assert ended == status
    assert ("again as thoroughly" in why(evidence)) is (status == 2)


def test_only_the_newest_of_several_stale_runs_is_to_be_made_anew(store: RunStore, tmp_path: Path) -> None:
    name, digests = changed_file(tmp_path)
    stored(store, header("1", imports=[name], digests=digests), a_finding("a1"))
    stored(store, header("2", imports=[name], digests={**digests, name: "0123456789abcdef"}))
    evidence = judged(store, Question(("embedding",)))[1]
    assert [one.why.split(":")[0] for one in evidence.unanswered] == ["run 2 is stale"]


def test_a_run_counts_again_once_the_import_is_as_it_was(store: RunStore, tmp_path: Path) -> None:
    name, digests = changed_file(tmp_path)
    stored(store, header("1", imports=[name], digests=revision([name])))
    stored(store, header("2", imports=[name], digests=digests), a_finding("a1"))
    assert judged(store)[0] == 0


def test_a_finding_of_a_stale_run_is_neither_new_nor_settled(store: RunStore, tmp_path: Path) -> None:
    name, digests = changed_file(tmp_path)
    stored(store, header("1", imports=[name], digests=digests), a_finding("a1"))
    status, evidence = judged(store)
    assert (status, evidence.runs) == (2, ())
    assert "it has 1 finding that the baseline does not accept" in why(evidence)


def test_torchs_rules_count_by_their_source(store: RunStore) -> None:
    stored(store, header("1", digests={**NOW, TORCH_RULES: "0123456789abcdef"}))
    status, evidence = judged(store)
    assert status == 2
    assert "the source of torch's rules has changed" in why(evidence)


@pytest.mark.parametrize(
    "other",
    [{"digests": {**NOW, VERIFIER: "0123456789abcdef"}}, {"versions": {"torch": "2.15.0"}}, {"digests": {}}],
    ids=["verifier", "torch", "no digests"],
)
def test_runs_of_another_version_are_left_out_but_not_their_findings(store: RunStore, other: dict[str, object]) -> None:
    stored(store, header("1", **other))
    status, evidence = judged(store)
    assert (status, evidence.unanswered[0].remedy) == (2, f"python -m verifier gate --fresh --out {store.root}")
    stored(store, header("2", patterns=("mm",)), ops=(MM,))
    status, evidence = judged(store)
    assert (status, evidence.left_out) == (
        0,
        ("1 run was made with another torch or verifier, the newest is 1",),
    )
    stored(store, header("0", **other), a_finding("a1"), ops=(BAG,))
    assert judged(store)[0] == 2


# ------------------------------------------------------------------------------------------------------- what was asked
def test_what_was_asked_and_has_no_evidence_is_named(store: RunStore) -> None:
    stored(store, header("1"))
    for question, missing, remedy in [
        (Question(("mm",)), "mm", "run mm"),
        (Question(("embedding",), ("8",)), "embedding", "run embedding"),
        (Question((EMBEDDING,), ("4", "2x2")), "mesh 2x2", f"run {EMBEDDING} --mesh 2x2"),
        (Question(("embedding",), (), ("my.py",)), "embedding", "run embedding --import my.py"),
    ]:
        status, evidence = judged(store, question)
        assert status == 2
        assert why(evidence) == (
            f"no run that counts has evidence for {missing} | python -m verifier {remedy} --out {store.root}"
        )
    assert judged(store, Question(("embedding",), ("4",), ()))[0] == 0


def test_trials_that_prove_nothing_are_no_evidence(store: RunStore) -> None:
    stored(store, header("1", patterns=("mm",)), ops=(MM,), verdicts={"UNSUPPORTED": 5, "INCONCLUSIVE": 3})
    stored(store, header("2"))
    assert judged(store)[0] == 0
    status, evidence = judged(store, Question(("mm",)))
    assert status == 2
    assert "mm: all 8 trials are unsupported or inconclusive" in why(evidence)


def test_an_op_of_a_glob_that_no_run_was_to_try_is_named(store: RunStore) -> None:
    stored(store, header("1", patterns=("mm",)), ops=(MM,))
    status, evidence = judged(store, Question(("*mm",)))
    assert status == 2
    assert "no run that counts has evidence for " in why(evidence)
    assert "baddbmm" in why(evidence)


def test_an_op_that_does_not_exist_is_a_mistake(store: RunStore) -> None:
    stored(store, header("1"))
    with pytest.raises(ValueError, match="did you mean 'embedding'"):
        collect(store, Question(("embeding",)), Baseline())
    stored(store, header("2", patterns=()), ops=("mylib.my_op.default",))
    assert judged(store, Question(("mylib.my_op.default",)))[0] == 0, "a test has tried it"


def test_nothing_recorded_is_told_from_nothing_that_counts(store: RunStore) -> None:
    assert judged(store)[1].nothing_recorded
    stored(store, header("1", digests={}))
    assert not judged(store)[1].nothing_recorded


# ------------------------------------------------------------------------------------------------------------ cut short
def killed(store: RunStore, made: RunHeader) -> None:
    store.open_run(made).close()


def test_a_killed_run_is_named_with_what_to_type(store: RunStore) -> None:
    killed(store, header("1"))
    status, evidence = judged(store)
    assert status == 2
    assert why(evidence) == (
        f"run 1 was cut short and has no record | to go on: python -m verifier run --resume 1 --out {store.root}"
    )
    killed(store, header("2", patterns=(), profile="rules", command="python -m verifier rules mm"))
    assert "run 2 was cut short and has no record | again: python -m verifier rules mm" in why(judged(store)[1])


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_killed_run_is_answered_by_a_complete_one_of_the_same(store: RunStore, order: str) -> None:
    stored(store, header("5"))
    killed(store, header("4" if order == "before" else "6"))
    status, evidence = judged(store)
    assert (status, len(evidence.left_out)) == (0, 1)
    killed(store, header("7", max_examples=100))
    assert judged(store)[0] == 2


def test_a_run_that_goes_on_is_said_to_do_so(store: RunStore) -> None:
    stored(store, header("1"))
    with store.open_run(header("2", max_examples=100)):
        status, evidence = judged(store)
    assert (status, evidence.left_out) == (0, ("run 2 is still going on",))


@pytest.mark.parametrize(
    ("untested", "remedy"), [(INTERRUPTED, "to go on: python -m verifier run --resume 1"), ("x", "again: python -m")]
)
def test_an_incomplete_run_proves_what_it_reached_only(store: RunStore, untested: str, remedy: str) -> None:
    left = [UntestedRecord("the rest of the run", untested, 1)]
    stored(store, header("1"), complete=False, untested=left)
    status, evidence = judged(store)
    assert status == 2
    assert f"run 1 is incomplete: it stopped before its end | {remedy}" in why(evidence)
    stored(store, header("0"))
    assert judged(store)[0] == 0, "a complete run of the same stands"


def test_a_record_that_cannot_be_read_is_named(store: RunStore) -> None:
    stored(store, header("1"))
    stored(store, header("2"))
    store.path("2").write_text("{")
    with pytest.raises(RunFormatError, match=r"run\.json: not JSON: .*; move .*runs/2 away, and run again"):
        judged(store)


def test_a_run_that_was_killed_before_it_began_is_none(store: RunStore) -> None:
    stored(store, header("1"))
    store.path("2").parent.mkdir()
    store.path("2", "journal.jsonl").write_text('{"format_ver')
    assert judged(store)[0] == 0


# -------------------------------------------------------------------------------------------------- one decision of all
def test_what_any_run_found_is_said_of_all(store: RunStore) -> None:
    stored(store, header("1", patterns=("mm",)), a_finding("b2", op=MM), ops=(MM,))
    stored(store, header("2"), a_finding("a1"))
    decision = decide_all(collect(store, Question(), Baseline()), Baseline(), TODAY)
    assert [item.fingerprint for item in decision.new] == ["a1", "b2"]
    assert (decision.trials, len(decision.runs)) == (16, 2)
    only = decide_all(collect(store, Question(("mm",)), Baseline()), Baseline(), TODAY)
    assert ([item.fingerprint for item in only.new], only.trials) == (["b2"], 8)


def test_an_accepted_finding_is_known_whichever_run_has_it(store: RunStore) -> None:
    run = stored(store, header("1"), a_finding("a1"))
    stored(store, header("2", patterns=("mm",)), ops=(MM,))
    known = Baseline().updated([run], TODAY - timedelta(days=1))
    assert judged(store, baseline=known)[0] == 1, "nobody has given a reason"
    explained = Baseline(tuple(replace(entry, reason="pytorch#190063") for entry in known.entries))
    assert judged(store, baseline=explained)[0] == 0


# ---------------------------------------------------------------------------------------------------- what is digested
def test_what_the_users_rules_use_counts_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_kernels_of_rules.py").write_text("def kernel(): ...\n")
    file = tmp_path / "my_rules_with_kernels.py"
    file.write_text("from my_kernels_of_rules import kernel\ndef rule(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("my_rules_with_kernels")
    made = revision(["my_rules_with_kernels"], [module])
    assert made.keys() - NOW.keys() == {"my_rules_with_kernels", "my_kernels_of_rules.py"}
    before = header("1", imports=["my_rules_with_kernels"], digests=made)
    assert changes_since(before) == []
    (tmp_path / "my_kernels_of_rules.py").write_text("def kernel(): return 1\n")
    assert [change.text for change in changes_since(before)] == ["my_kernels_of_rules.py has changed"]


@pytest.mark.parametrize(
    ("file", "old", "new", "rules"),
    [
        ("settings_of_mine.py", "MODE = 1\n", "MODE = 2\n", "from settings_of_mine import MODE\n"),
        ("settings_of_mine.py", "MODE = 1\n", "MODE = 2\n", "def rule():\n    from settings_of_mine import MODE\n"),
        ("settings_of_mine.py", "MODE = 1\n", "MODE = 2\n", "import importlib\ndef rule():\n"
         "    importlib.import_module('settings_of_mine')\n"),
        ("table_of_mine.json", "[1]", "[2]", "from pathlib import Path\n"
         "TABLE = Path(__file__).with_name('table_of_mine.json').read_text()\n"),
    ],
)  # fmt: skip
def test_constants_and_tables_of_rules_count_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str, rules: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path(file).write_text(old)
    Path("rules_with_constants.py").write_text(rules)
    for name in ("rules_with_constants", "settings_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("rules_with_constants")
    before = header("1", imports=["rules_with_constants"], digests=revision(["rules_with_constants"], [module]))
    assert changes_since(before) == []
    Path(file).write_text(new)
    assert [change.text for change in changes_since(before)] == [f"{file} has changed"]
