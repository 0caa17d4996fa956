"""Puts the reports of samples together into what is said of an op."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from verifier.core.verdict import VerdictKind
from verifier.core.wording import shown_path
from verifier.records.schema import (
    ConfirmationRecord,
    MissingRuleRecord,
    OpRulesRecord,
    WrongRuleRecord,
)
from verifier.rules.results import Rule, SampleReport, WrongRule

__all__ = ["op_record", "special_rules", "stale_decisions", "wrong_record", "wrong_rules"]

STALE_TRIED = 10
"""So many stale decisions of an overload and an argument are tried on real processes, until one is confirmed."""

_TELLING = 8
_OTHERS = 4
"""So many more counterexamples of a wrong rule are kept, of the calls that come next in size."""


def wrong_rules(reports: Iterable[SampleReport]) -> list[WrongRule]:
    """Return the wrong rules in ``reports``, each once for meshes of one dim and once for those of several.

    A rule that fails in several ways, as by another shape in one call and by an exception in another, comes once for
    each verdict: one may be known, and the other new. Of several counterexamples the smallest is kept, and with it a
    few that come next.
    """
    return _smallest(wrong for report in reports for wrong in report.wrong)


def stale_decisions(reports: Iterable[SampleReport]) -> list[WrongRule]:
    """Return the stale decisions in ``reports``, smallest first: at most so many of each argument left out.

    Calls on few elements come last, because the same result may come of both calls by accident. There are as many
    decisions to replicate everything as others: to replicate is seldom wrong for the other call.
    """
    kept: list[WrongRule] = []
    seen: Counter[tuple[str, str, bool]] = Counter()
    for stale in sorted((one for report in reports for one in report.stale), key=_by_size):
        key = stale.rule.op, stale.left_out, {*stale.rule.inputs} == {"R"}
        if seen[key] < STALE_TRIED:
            kept.append(stale)
        seen[key] += 1
    return kept


def special_rules(reports: Iterable[SampleReport]) -> list[WrongRule]:
    """Return the rules in ``reports`` that special values refute and ordinary ones of the same call do not.

    Each comes once, smallest first. Ordinary values of other calls may refute it for another reason. If they do for the
    same one, as a kernel that refuses a shape whatever the values are, nothing is special.
    """
    reports = list(reports)
    told = {_told(one) for report in reports for one in report.wrong}
    found = _smallest(one for report in reports for one in report.special if _told(one) not in told)
    return sorted(found, key=lambda one: (one.elements, one.rule))


def _told(wrong: WrongRule) -> tuple[Rule, VerdictKind, str]:
    return wrong.rule, wrong.verdict, wrong.message


def _by_size(stale: WrongRule) -> tuple[bool, int, Rule]:
    return stale.elements < _TELLING, stale.elements, stale.rule


def _smallest(wrongs: Iterable[WrongRule]) -> list[WrongRule]:
    kept: dict[tuple[Rule, bool, VerdictKind], list[WrongRule]] = {}
    for wrong in wrongs:
        kept.setdefault((wrong.rule, "x" in wrong.mesh, wrong.verdict), []).append(wrong)
    smallest = []
    for key in sorted(kept):
        first, *others = sorted(kept[key], key=lambda one: one.elements)
        draws = sum(one.draws for one in kept[key])
        smallest.append(replace(first, draws=draws, others=tuple(others[:_OTHERS])))
    return smallest


def op_record(
    reports: Sequence[SampleReport],
    wrong: Sequence[WrongRuleRecord],
    special: Sequence[WrongRuleRecord],
    given_up: Sequence[str],
    died: Sequence[str],
) -> OpRulesRecord:
    """Return what ``reports`` say of one op.

    ``wrong`` are its wrong rules, and ``special`` those that only special values refute, after an attempt to confirm
    each; ``given_up`` says why samples are missing, ``died`` what ended a worker.
    """
    untested = sum((report.untested for report in reports), Counter(given_up))
    refuted = {
        (tuple(w.input_placements), tuple(w.output_placements), w.op)
        for w in wrong
        if w.verdict != VerdictKind.STALE_CACHE  # the rule is true; it is taken for another call
    }
    # an op that never runs on ranks has one record in the place of those of its wrong rules
    refuted |= {(one.rule.inputs, one.rule.outputs, one.rule.op) for one in wrong_rules(reports)}
    confirmed = {rule for report in reports for rule in report.confirmed}
    held = sorted(rule for rule in confirmed if (rule.inputs, rule.outputs, rule.op) not in refuted)
    inconclusive = {rule for report in reports for rule in report.inconclusive} - confirmed
    return OpRulesRecord(
        overloads=sorted({report.op for report in reports}),
        samples=len(reports),
        combinations=sum(report.combinations for report in reports),
        runs=sum(report.runs for report in reports),
        confirmed=[str(rule) for rule in held],
        wrong=[w for w in wrong if not w.confirmed.unsure],
        unconfirmed=[w for w in wrong if w.confirmed.unsure],
        missing=_missing(reports),
        special=list(special),
        inconclusive=[str(rule) for rule in sorted(inconclusive)],
        untested=dict(sorted(untested.items())),
        not_testable={report.op: report.not_testable for report in reports if report.not_testable},
        died=sorted({text for report in reports for text in report.died} | set(died)),
        seconds=round(sum(report.seconds for report in reports), 4),
        unreached=_unreached(reports),
    )


def _unreached(reports: Sequence[SampleReport]) -> list[str]:
    """Return the lines of strategies of which no sample has reached any part, as file and line."""
    places: set[tuple[str, int]] = set()
    for op in {report.op for report in reports}:
        mine = [report for report in reports if report.op == op]
        reached = {place for report in mine for block in report.reached for place in block.places}
        places |= {place for report in mine for block in report.unreached for place in block.places} - reached
    return [f"{shown_path(file)}:{line}" for file, line in sorted(places)]


def wrong_record(wrong: WrongRule, confirmed: ConfirmationRecord, fingerprint: str, known: bool) -> WrongRuleRecord:
    """Return the record of a wrong rule."""
    return WrongRuleRecord(
        op=wrong.rule.op,
        input_placements=list(wrong.rule.inputs),
        output_placements=list(wrong.rule.outputs),
        mesh=wrong.mesh,
        shapes=[list(shape) for shape in wrong.shapes],
        arguments=wrong.arguments,
        origin=wrong.origin,
        verdict=wrong.verdict,
        message=wrong.message,
        confirmed=confirmed,
        fingerprint=fingerprint,
        known=known,
        draws=wrong.draws,
        fails=wrong.fails,
    )


def _missing(reports: Sequence[SampleReport]) -> list[MissingRuleRecord]:
    """Return each missing rule once, with the sample in which it would save most."""
    best: dict[Rule, MissingRuleRecord] = {}
    samples: Counter[Rule] = Counter()
    calls: dict[Rule, set[str]] = defaultdict(set)
    for rule, missing in (pair for report in reports for pair in report.missing.items()):
        samples[rule] += 1
        calls[rule].update(missing.calls)
        if rule not in best or missing.bytes_saved > best[rule].bytes_saved:
            best[rule] = missing
    return [replace(best[rule], samples=samples[rule], calls=sorted(calls[rule])) for rule in sorted(best)]
