"""A failure is explained by what mends it, tried on ranks that are none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import date

import msgspec
import pytest
import torch

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Difference, DifferenceKind, Executed, Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase, VerdictKind
from verifier.execution.remedies import Remedy
from verifier.findings.attribution import Attribution, passed_again
from verifier.findings.failures import Failure
from verifier.gate.baseline import Baseline, BaselineError
from verifier.gate.entries import Cause
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements
from verifier.records.values import trial_record

OP = "aten.neg.default"
WRONG = Difference(DifferenceKind.VALUE, Phase.FORWARD, "output", 0, "1.0", "-1.0", (0,))


def trial_of(*values: float) -> Trial:
    case = OpCase(OP, "torch.neg", (torch.tensor(values),), family="family")
    return Trial(case, MeshSpec((2,)), (parse_placements("S(0)"),))


TRIAL = trial_of(1.0, 2.0)


def observed(trial: Trial, wrong: bool, refused: bool = False) -> Observation:
    raised = Raised(Phase.FORWARD, "NotImplementedError", "no", refusal=True) if refused else None
    reached = Phase.FORWARD if refused else Phase.DONE
    reports = [ProcessReport((rank,), reached, raised, differences=(WRONG,) * wrong) for rank in (0, 1)]
    return Observation(trial, Fate.COMPLETED, tuple(reports))


def cause(name: str) -> Cause:
    return Cause(
        fingerprint=name, op=OP, family="family", verdict="WRONG_VALUE", rule="", mesh="2", summary="", reason="a test",
        torch=("2.13.0",), expires=date(2099, 1, 1), replay=msgspec.json.encode(trial_record(TRIAL)).decode(),
        remedy=name, title="", where=(),
    )  # fmt: skip


def remedy(name: str, ops: str = "aten.*", verdicts: Collection[str] = (), refuses: bool = False) -> Remedy:
    return Remedy(name, "", nullcontext, (ops,), frozenset(verdicts), refuses)


Mends = Callable[[frozenset[str]], bool]


class Tried:
    """An attribution whose ranks pass where ``mends`` says so of the remedies in force, and what it tried."""

    def __init__(self, mends: Mends, *remedies: Remedy, refused: bool = False) -> None:
        self.runs: list[tuple[str, ...]] = []

        def run(trial: Trial, names: tuple[str, ...]) -> Observation:
            self.runs.append(names)
            mended = mends(frozenset(names))
            return observed(trial, not mended, mended and refused)

        self.it = Attribution(run, [cause(one.name) for one in remedies], {one.name: one for one in remedies})

    def explain(self, trial: Trial = TRIAL, first: Sequence[str] = (), before: Collection[str] = ()) -> list[str]:
        observation = observed(trial, wrong=True)
        failure = Failure(trial, observation, judge(observation, make_reference(trial.case)))
        assert failure.verdict.kind is VerdictKind.WRONG_VALUE
        groups = [tuple(map(cause, group)) for group in first]
        return [one.remedy for one in self.it.explain(failure, first=groups, before={*map(cause, before)})]


def all_of(*names: str) -> Mends:
    return lambda in_force: in_force >= set(names)


def test_the_cause_whose_remedy_mends_it() -> None:
    tried = Tried(all_of("b"), remedy("a"), remedy("b"), remedy("c"))
    assert tried.explain() == ["b"]
    assert tried.runs == [("a",), ("b",), (), ()]


def test_a_cause_of_one_op_is_tried_before_one_of_any_op() -> None:
    tried = Tried(lambda names: bool(names), remedy("any", "*"), remedy("own", OP))
    assert tried.explain() == ["own"]


def test_a_cause_that_explained_such_a_failure_is_tried_before_all_others() -> None:
    tried = Tried(all_of("c"), *map(remedy, "abc"))
    assert tried.explain(first=["c"]) == ["c"]
    assert tried.runs == [("c",), (), ()]


def test_of_causes_that_explained_such_failures_as_few_are_named_as_mend_this_one() -> None:
    tried = Tried(all_of("c"), *map(remedy, "abcd"))
    assert tried.explain(first=["a", "bcd"]) == ["c"]
    assert tried.runs[:2] == [("a",), ("b", "c", "d")]
    assert len(tried.runs) <= 7


def test_a_cause_that_explained_anything_before_is_tried_before_the_other_likely_ones() -> None:
    tried = Tried(all_of("c"), *map(remedy, "abc"))
    assert tried.explain(before="c") == ["c"]
    assert tried.runs == [("c",), (), ()]


def test_likely_causes_are_tried_together_before_all_causes_are() -> None:
    others = [remedy(f"r{n}", "aten.other") for n in range(64)]
    tried = Tried(all_of("a", "b"), remedy("a"), *others, remedy("b"))
    assert tried.explain() == ["a", "b"]
    assert max(map(len, tried.runs)) == 2


def test_a_cause_that_explained_another_failure_need_not_explain_this_one() -> None:
    tried = Tried(all_of("b"), *map(remedy, "abc"))
    assert tried.explain(first=["c"]) == ["b"]


def test_what_is_not_likely_is_found_by_leaving_out() -> None:
    others = [remedy(f"r{n}", "aten.other") for n in range(9)]
    assert Tried(all_of("r6"), *others).explain() == ["r6"]


def test_two_causes_may_be_needed_and_no_more_are_named() -> None:
    remedies = [remedy(f"r{n}") for n in range(7)]
    assert Tried(all_of("r2", "r5"), *remedies).explain() == ["r2", "r5"]


@pytest.mark.parametrize(("ops", "refuses"), [("aten.*", False), ("aten.other", True)])
def test_a_remedy_may_let_the_trial_get_as_far_as_another_cause(ops: str, refuses: bool) -> None:
    """The remedy of a wrong value is not tried on a crash, but on what is left once the crash is mended.

    A remedy of an op that was not seen is tried if it lets DTensor refuse.
    """
    tried = Tried(
        all_of("crash", "value"),
        remedy("crash", verdicts=["CRASH"]),
        remedy("value", ops, ["WRONG_VALUE"], refuses),
    )
    raised = Raised(Phase.FORWARD, "RuntimeError", "no")
    reports = tuple(ProcessReport((rank,), Phase.FORWARD, raised) for rank in (0, 1))
    observation = Observation(TRIAL, Fate.COMPLETED, reports)
    failure = Failure(TRIAL, observation, judge(observation, make_reference(TRIAL.case)))
    assert failure.verdict.kind is VerdictKind.CRASH
    assert [one.remedy for one in tried.it.explain(failure)] == ["crash", "value"]
    assert tried.runs == [("crash",), ("crash", "value"), (), ()]
    tried.runs.clear()
    seen = {cause("value")}  # beside which the other one is tried before all likely ones are in force together
    assert [one.remedy for one in tried.it.explain(failure, before=seen)] == ["crash", "value"]
    assert tried.runs == [("crash",), ("crash", "value"), (), ()]


def test_three_causes_may_crash_in_a_row_and_the_last_show_as_a_wrong_value_too() -> None:
    """The third remedy is one of a wrong value: it is tried because the trial crashes elsewhere under the first two."""
    where = {frozenset[str](): "first", frozenset({"a"}): "second", frozenset({"a", "b"}): "third"}

    def run(trial: Trial, names: tuple[str, ...]) -> Observation:
        if names == ("a", "b", "c"):
            return observed(trial, wrong=False)
        place = where.get(frozenset(names) - {"c"}, "first")
        raised = Raised(Phase.FORWARD, "RuntimeError", "no", where=place)
        return Observation(trial, Fate.COMPLETED, tuple(ProcessReport((r,), Phase.FORWARD, raised) for r in (0, 1)))

    remedies = [remedy("a"), remedy("b"), remedy("c", verdicts=["WRONG_VALUE"])]
    # they are in force in the order in which they are declared, whatever that of the causes is
    attribution = Attribution(run, [cause(n) for n in "cba"], {one.name: one for one in remedies})
    failure = Failure(TRIAL, run(TRIAL, ()), judge(run(TRIAL, ()), make_reference(TRIAL.case)))
    assert failure.verdict.kind is VerdictKind.CRASH
    assert {one.remedy for one in attribution.explain(failure)} == {"a", "b", "c"}


def test_what_no_remedy_mends_is_unexplained_however_familiar() -> None:
    tried = Tried(lambda _: False, remedy("a"), remedy("b"))
    assert tried.explain() == []
    assert tried.runs[-1] == ("a", "b")


def test_a_remedy_of_other_verdicts_is_not_tried() -> None:
    tried = Tried(all_of("a"), remedy("a", verdicts=["CRASH"]))
    assert (tried.explain(), tried.runs) == ([], [])


@pytest.mark.parametrize("refuses", [True, False])
def test_a_refusal_mends_only_under_a_remedy_that_refuses(refuses: bool) -> None:
    tried = Tried(all_of("a"), remedy("a", refuses=refuses), refused=True)
    assert tried.explain() == ["a"] * refuses


def test_a_refusal_after_the_phase_that_failed_comes_after_a_right_result() -> None:
    def run(trial: Trial, names: tuple[str, ...]) -> Observation:
        raised = Raised(Phase.BACKWARD, "NotImplementedError", "no", refusal=True)
        return Observation(trial, Fate.COMPLETED, tuple(ProcessReport((r,), Phase.BACKWARD, raised) for r in (0, 1)))

    attribution = Attribution(run, [cause("a")], {"a": remedy("a")})
    failure = Failure(TRIAL, observed(TRIAL, True), judge(observed(TRIAL, True), make_reference(TRIAL.case)))
    assert failure.verdict.phase is Phase.FORWARD
    assert attribution.is_mended(failure, [cause("a")])


def test_a_refusing_remedy_of_an_op_that_was_not_seen_is_tried_last() -> None:
    """A function of torch calls ops that nobody names, and whose arguments are not redistributed."""
    tried = Tried(lambda names: names == {"b"}, remedy("a"), remedy("b", "aten.other", refuses=True))
    assert tried.explain() == ["b"]
    assert tried.runs == [("a",), ("a", "b"), ("b",), (), ()]


@pytest.mark.parametrize(
    ("raised_in", "ran", "runs_now", "explained"),
    [
        ("placement_types.py", ["aten.mean.dim"], ["aten.mean.dim", "aten.mul.Tensor"], True),
        ("placement_types.py", ["aten.mean.dim"], ["aten.mean.dim"], True),  # the refused op is not recorded
        ("placement_types.py", ["aten.mean.dim"], [], False),  # refused before what crashed
        ("placement_types.py", ["aten.mean.dim"], ["aten.sum.default"], False),
        ("placement_types.py", [], [], False),
        ("_math_ops.py", ["aten.mean.dim"], ["aten.mean.dim", "aten.var.correction"], True),
        ("_math_ops.py", ["aten.mean.dim"], ["aten.mean.dim"], False),  # the op that crashed may be the one refused
    ],
)
def test_a_refusal_of_a_later_op_comes_after_what_crashed(
    raised_in: str, ran: list[str], runs_now: list[str], explained: bool
) -> None:
    def seen(raised: Raised, ops: list[str]) -> Observation:
        executed = tuple(Executed(Phase.BACKWARD, 0, op, ("R",)) for op in ops)
        reports = (ProcessReport((rank,), Phase.BACKWARD, raised, executed=executed) for rank in (0, 1))
        return Observation(TRIAL, Fate.COMPLETED, tuple(reports))

    refusal = Raised(Phase.BACKWARD, "NotImplementedError", "no", refusal=True)
    observation = seen(Raised(Phase.BACKWARD, "AssertionError", "", file=raised_in), ran)
    attribution = Attribution(
        lambda _, names: seen(refusal, runs_now) if names else observation, [cause("a")], {"a": remedy("a")}
    )
    failure = Failure(TRIAL, observation, judge(observation, make_reference(TRIAL.case)))
    assert failure.verdict.kind is VerdictKind.CRASH
    assert [one.remedy for one in attribution.explain(failure)] == ["a"] * explained
    in_journal = replace(observation, reports=observation.reports[:1])  # a journal leaves out ranks that did the same
    assert [one.remedy for one in attribution.explain(replace(failure, observation=in_journal))] == ["a"] * explained


def test_what_fails_every_other_time_is_explained_by_nothing() -> None:
    """A rule that counts its calls fails in some of them, whatever remedies are in force."""
    calls = iter(range(100))
    tried = Tried(lambda _: next(calls) % 2 == 0, remedy("a"))
    assert tried.explain() == []
    assert tried.runs[0] == ("a",)


def test_a_hang_is_explained_if_it_hangs_once_more_without_the_remedy() -> None:
    def explained(hangs: Callable[[tuple[str, ...]], bool]) -> list[str]:
        def run(trial: Trial, names: tuple[str, ...]) -> Observation:
            runs.append(names)
            return stuck if hangs(names) else observed(trial, wrong=False)

        runs: list[tuple[str, ...]] = []
        stuck = Observation(TRIAL, Fate.HANG, (None, None))
        failure = Failure(TRIAL, stuck, judge(stuck, make_reference(TRIAL.case)))
        assert failure.verdict.kind is VerdictKind.HANG
        found = Attribution(run, [cause("a")], {"a": remedy("a", verdicts=["HANG"])}).explain(failure)
        assert runs == [("a",), ()]
        return [one.remedy for one in found]

    assert explained(lambda names: not names) == ["a"]
    assert explained(lambda _: False) == []


def test_a_hang_is_not_waited_for_under_remedies_of_other_verdicts() -> None:
    def run(trial: Trial, names: tuple[str, ...]) -> Observation:
        runs.append(names)
        return stuck

    runs: list[tuple[str, ...]] = []
    stuck = Observation(TRIAL, Fate.HANG, (None, None))
    failure = Failure(TRIAL, stuck, judge(stuck, make_reference(TRIAL.case)))
    remedies = {
        "a": remedy("a"), "b": remedy("b", "aten.other", refuses=True), "c": remedy("c", "aten.other", ["HANG"], True),
    }  # fmt: skip
    assert Attribution(run, [cause(name) for name in remedies], remedies).explain(failure) == ()
    assert runs == [("a", "b", "c"), ("c",)]


def test_zeros_that_were_wrong_before_are_mended() -> None:
    """Alone, agreement on zeros proves nothing; here the same trial has shown the difference."""
    assert Tried(all_of("a"), remedy("a")).explain(trial_of(0.0, 0.0)) == ["a"]


def test_what_passes_without_a_remedy_shows_nothing() -> None:
    failure = Failure(TRIAL, observed(TRIAL, True), judge(observed(TRIAL, True), make_reference(TRIAL.case)))
    assert not Tried(lambda _: True, remedy("a")).it.shows_alone(failure)
    assert Tried(lambda _: False, remedy("a")).it.shows_alone(failure)


def test_a_cause_is_not_fixed_by_what_a_run_imports() -> None:
    assert passed_again(cause("a"), []).status == "fixed"
    assert passed_again(cause("a"), ["strategies.install_all"]).status == "untested"


def test_a_cause_without_an_installed_remedy_is_named() -> None:
    with pytest.raises(BaselineError, match="declares the remedy 'empty-shard' of the baseline; did you mean"):
        Attribution.of(Baseline((cause("empty-shard"),)), lambda trial, names: observed(trial, True))
