"""What may be resumed and merged, and what the refusals say; no rank is started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_factory import make_header, make_run

from verifier.campaign.history import Past
from verifier.campaign.recorded import campaign_on_ranks
from verifier.campaign.request import Request, make_plan
from verifier.campaign.resuming import merge, resume, run_to_resume
from verifier.core.case import MeshSpec, OpCase
from verifier.core.parts import RunPart
from verifier.events import CaseSkipped, Event
from verifier.gate.baseline import Baseline
from verifier.placements.alphabet import Alphabet
from verifier.planning.families import DrawContext
from verifier.records.schema import OUT_OF_TIME, RunHeader, UntestedRecord
from verifier.runs import journal
from verifier.runs.journal import Journal, RunWriter, is_open, read_journal
from verifier.runs.store import RunStore
from verifier.torch_internals.placements import Combination

INTERRUPTED = "interrupted"


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "reports")


def header(run_id: str, shard: str = "", **changes: Any) -> RunHeader:
    request = {"seed": 0, "profile": "dev", "shard": shard or None, "baseline": "none.toml"}
    asked = {**request, **changes.pop("request", {})}
    return make_header(id=run_id, shard=shard, request=asked, digests={"baseline": "b1"}, **changes)


def killed(store: RunStore, made: RunHeader) -> None:
    store.open_run(made).close()


def finished(store: RunStore, made: RunHeader, untested: str = "") -> str:
    """Store a run that has reached everything, or that did not for a reason."""
    left = [UntestedRecord("the rest of the run", untested, 1)] if untested else []
    with store.open_run(made) as writer:
        writer.finish(make_run(header=made, complete=not untested, untested=left))
    return made.id


def no_baseline(_: Path) -> Baseline:
    raise AssertionError("refused before anything else is read")


# ------------------------------------------------------------------------------------------------------------- resuming
def test_the_newest_run_that_was_cut_short_is_resumed(store: RunStore) -> None:
    killed(store, header("1"))
    killed(store, header("2"))
    finished(store, header("3"))
    killed(store, replace(header("4"), request={}))  # a rule check, or an older version
    assert run_to_resume(store) == "2"
    finished(store, header("5"), INTERRUPTED)
    assert run_to_resume(store) == "5"
    finished(store, header("6"), OUT_OF_TIME)
    finished(store, header("7"))
    store.path("7").write_text('{"format_version": 9}')
    assert run_to_resume(store) == "5"


def test_a_run_that_goes_on_is_left_alone(store: RunStore) -> None:
    killed(store, header("1"))
    with store.open_run(header("2")) as writer:
        assert is_open(writer.journal_path)
        assert run_to_resume(store) == "1"
        with pytest.raises(ValueError, match="run 2 still goes on in another process"):
            resume("2", store, no_baseline)
    assert not is_open(writer.journal_path)
    assert run_to_resume(store) == "2"


def test_nothing_to_resume_is_said_with_what_there_is(store: RunStore) -> None:
    with pytest.raises(ValueError, match="was cut short, of 0; nothing to resume"):
        run_to_resume(store)
    finished(store, header("1"))
    with store.open_run(header("2")), pytest.raises(ValueError, match="of 2, and 1 still going on; nothing to resume"):
        run_to_resume(store)
    with pytest.raises(ValueError, match="run 1 has finished; there is nothing to resume"):
        resume("1", store, no_baseline)
    finished(store, header("3"), OUT_OF_TIME)
    with pytest.raises(ValueError, match="run 3 was neither killed nor interrupted: its time was up, and "):
        resume("3", store, no_baseline)
    with pytest.raises(ValueError, match=r"no run 'x'; .* has 3 runs"):
        resume("x", store, no_baseline)
    killed(store, header("20260520T12"))
    with pytest.raises(ValueError, match="no run '20260520T13'; did you mean '20260520T12'"):
        resume("20260520T13", store, no_baseline)


def test_a_run_that_does_not_say_what_was_asked_for_is_refused(store: RunStore) -> None:
    killed(store, replace(header("1"), request={}))
    with pytest.raises(ValueError, match="run 1 does not say what was asked for"):
        resume("1", store, no_baseline)


def test_a_torn_line_is_cut_off_before_the_journal_goes_on(store: RunStore) -> None:
    with store.open_run(header("1")) as writer:
        writer.append({"n": 1})
    with writer.journal_path.open("ab") as file:
        file.write(b'{"n": 2')
    again, past = store.reopen_run("1")
    with again:
        again.append({"n": 3})
    assert (past.events, past.torn) == ([{"n": 1}], True)
    assert read_journal(writer.journal_path) == Journal(
        header("1"), [{"n": 1}, {"n": 3}], False, writer.journal_path.stat().st_size
    )


def test_a_journal_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No such file"):
        RunWriter(tmp_path, None)


def test_what_is_written_until_the_journal_is_locked_is_kept(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the rest of a line that was written in two parts."""
    first = store.open_run(header("1"))
    first.append({"n": 1})
    real, whole = journal._locked, b'{"n":2}\n'

    def ends_just_before(descriptor: int) -> bool:
        with first.journal_path.open("ab", buffering=0) as file:
            file.write(whole[:4])
            file.write(whole[4:])
        first.close()
        return real(descriptor)

    monkeypatch.setattr(journal, "_locked", ends_just_before)
    again, past = store.reopen_run("1")
    with again:
        again.append({"n": 3})
    assert (past.events, past.torn) == ([{"n": 1}, {"n": 2}], False)
    assert read_journal(first.journal_path).events == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_run_that_ends_before_its_journal_is_locked_is_not_done_again(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.open_run(header("1"))
    real = store.reopen_run

    def ends_just_before(run_id: str) -> tuple[RunWriter, Journal]:
        first.finish(make_run(header=first.header))
        first.close()
        return real(run_id)

    monkeypatch.setattr(store, "reopen_run", ends_just_before)
    with pytest.raises(ValueError, match="run 1 has finished; there is nothing to resume"):
        resume("1", store, no_baseline)
    assert not is_open(first.journal_path)


# --------------------------------------------------------------------------------------------------------------- shards
def refusal(store: RunStore, names: Sequence[str]) -> str:
    with pytest.raises(ValueError) as caught:
        merge(names, store, no_baseline, "merge")
    return str(caught.value)


def test_every_case_belongs_to_one_shard() -> None:
    for count in (1, 2, 3, 7):
        shards = [RunPart(index, count) for index in range(1, count + 1)]
        for number in range(1, 30):
            assert sum(shard.has(number) for shard in shards) == 1
    assert str(RunPart.parse(" 2/3 ")) == "2/3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0/3", "shards are counted from 1, so I is from 1 to 3"),
        ("4/3", "I is from 1 to 3"),
        ("1/0", "N is at least 1"),
        ("1", "is not I/N"),
        ("-1/3", "is not I/N"),
        ("a/b", "is not I/N"),
    ],
)
def test_a_shard_that_is_none_is_a_mistake(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from verifier.cli.main import main

    monkeypatch.setattr(sys, "argv", ["verifier", "run", f"--shard={text}", "--out", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_shards_that_are_missing_are_named(store: RunStore) -> None:
    names = [finished(store, header(str(index), f"{index}/4")) for index in (1, 3)]
    assert refusal(store, names) == "2 of 4 shards missing: 2/4, 4/4; merge needs all of them"


def test_shards_of_different_wholes_or_named_twice(store: RunStore) -> None:
    names = [finished(store, header(name, shard)) for name, shard in (("a", "1/2"), ("b", "2/3"), ("c", "1/2"))]
    assert refusal(store, names[:2]) == "a is shard 1/2 and b is shard 2/3; N has to be the same"
    assert refusal(store, [names[0], names[2]]) == "shard 1/2 was given twice, as a and as c"
    assert refusal(store, ["a", "a"]) == "shard 1/2 was given twice, as a and as a"


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 7}, "seed is {seed} in a and 7 in b"),
        ({"meshes": ["8"]}, "meshes is {meshes} in a and ['8'] in b"),
        ({"request": {"profile": "ci"}}, "profile is 'dev' in a and 'ci' in b"),
        ({"request": {"patterns": ["embedding"]}}, "patterns is None in a and ['embedding'] in b"),
        ({"versions": {"torch": "2.14.0"}}, "the version of torch is {versions[torch]!r} in a and '2.14.0' in b"),
    ],
)
def test_shards_of_different_runs(store: RunStore, changes: dict[str, Any], difference: str) -> None:
    first = header("a", "1/2")
    names = [finished(store, first), finished(store, header("b", "2/2", **changes))]
    expected = difference.format(seed=first.seed, meshes=first.meshes, versions=first.versions)
    assert refusal(store, names) == f"a and b are not shards of one run: {expected}"


def test_shards_with_other_baselines(store: RunStore) -> None:
    other = replace(header("b", "2/2"), digests={"baseline": "b2"})
    names = [finished(store, header("a", "1/2")), finished(store, other)]
    assert refusal(store, names).endswith("the digest of baseline is 'b1' in a and 'b2' in b")


def test_what_is_no_shard_or_did_not_finish(store: RunStore, tmp_path: Path) -> None:
    assert refusal(store, [finished(store, header("whole"))]).startswith("run whole is no shard; ")
    killed(store, header("part", "1/2"))
    assert "run part, shard 1/2, did not finish; first python -m verifier run --resume part" in refusal(store, ["part"])
    assert refusal(store, ["prat"]) == "no run 'prat'; did you mean 'part'?"
    assert "no run" in refusal(store, [str(tmp_path / "nowhere")])


class Shown:
    """Stands for the steering of trials, and remembers which cases it was shown."""

    def __init__(self) -> None:
        self.cases: list[OpCase] = []

    def wanted(self, case: OpCase, mesh: MeshSpec, alphabet: Alphabet) -> list[Combination]:
        self.cases.append(case)
        return []


@pytest.mark.parametrize(("shard", "past"), [("1/2", Past()), ("2/2", Past()), ("1/1", Past(explored=True))])
def test_whatever_a_shard_has_time_for_all_plan_on_from_the_same_cases(shard: str, past: Past) -> None:
    """Else they would plan different trials from there on, which merging, as the one shard 1/1, refuses."""
    request = Request(["embedding"], ["simulated:2"], max_examples=4, shard=shard)
    plan = make_plan(request, Baseline())
    (mesh,), ((name, ops),) = plan.meshes, plan.selected.items()
    told: list[Event] = []
    campaign = campaign_on_ranks(plan, told.append, past)
    steering = Shown()
    campaign._steering = steering  # type: ignore[assignment]
    tried = campaign._draw(plan.families[name], DrawContext(mesh, plan.dtypes, ops), 0.0, 0.0)  # long past
    assert tried == 0
    assert len(steering.cases) == 4
    late = [event.count for event in told if isinstance(event, CaseSkipped) and "time limit" in event.reason]
    assert late == [4 if shard == "1/1" else 2]
