"""Decides which findings and entries in a set of evidence are new, known, fixed, expired or untested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date

from verifier.core.verdict import VerdictKind
from verifier.core.wording import plural
from verifier.gate.baseline import Baseline
from verifier.gate.budgets import Budget
from verifier.gate.entries import BaselineEntry, torch_of
from verifier.gate.evidence import Evidence, NoEvidence, proves
from verifier.gate.question import imports_text, replaced_text
from verifier.gate.regret import OverBudget, RegretDecision, over_budget
from verifier.gate.rule_changes import RuleChange
from verifier.records.schema import FindingRecord, RunHeader, RunRecord
from verifier.records.special import concerns_own_rules, is_aside

__all__ = [
    "GateDecision",
    "GateItem",
    "decide",
    "decide_all",
    "with_budgets",
    "without_special",
]


@dataclass(frozen=True)
class GateItem:
    """One finding of the run, or one entry of the baseline, as the gate sees it.

    ``message`` is the finding's, or the entry's summary if the run has no finding. ``note`` says why the item is in its
    category. ``reason``, ``link`` and ``expires`` (an ISO date) come from the baseline and are empty without an entry.
    A replay needs ``imports`` and ``rank_memory``. ``strategy`` says where the strategy is defined, as ``FILE:LINE``.
    """

    fingerprint: str
    op: str
    family: str
    verdict: str
    mesh: str
    message: str
    note: str = ""
    reason: str = ""
    link: str = ""
    expires: str = ""
    imports: tuple[str, ...] = ()
    rank_memory: str = ""
    strategy: str = ""


@dataclass(frozen=True)
class GateDecision:
    """What is ``new``, ``known``, ``fixed``, ``expired`` (known, still there, past its day) and ``untested``.

    ``special`` has findings that only special values show, if they are not to count as new.

    ``runs`` describes each run that counts, newest first, ``revision`` the versions that they verified. ``trials``
    counts all trials, and the rules of level 1 if ``rules`` is true. ``evidence`` counts those that proved something:
    unsupported and inconclusive trials and our own ``errors`` prove nothing. ``unanswered`` lists the parts of
    ``question`` without evidence, ``left_out`` the runs that do not count. ``imports`` are those of the runs; entries
    are fixed only with these imports. ``unchanged`` says why nothing had to be verified, if that is so.

    ``mended`` has entries that passed under this version of torch and were seen under others alone.

    ``lost`` has rules of torch's that hold and that the imports do not claim; with ``fail_on_lost`` they count.
    ``unreached`` has ops with the lines of their strategies that no call has reached, which proves nothing of these.
    ``regret`` has what the budgets say of the redistributions; None if the gate is not to fail on them. ``options`` are
    the arguments with which a command asks the same question.
    """

    question: str
    runs: tuple[str, ...]
    revision: str
    new: tuple[GateItem, ...]
    known: tuple[GateItem, ...]
    fixed: tuple[GateItem, ...]
    expired: tuple[GateItem, ...]
    untested: tuple[GateItem, ...]
    trials: int
    evidence: int
    complete: bool
    errors: tuple[str, ...]
    rules: bool = False
    imports: tuple[str, ...] = ()
    unanswered: tuple[NoEvidence, ...] = ()
    left_out: tuple[str, ...] = ()
    special: tuple[GateItem, ...] = ()
    unchanged: str = ""
    mended: tuple[GateItem, ...] = ()
    lost: tuple[RuleChange, ...] = ()
    fail_on_lost: bool = False
    unreached: tuple[tuple[str, tuple[str, ...]], ...] = ()
    regret: RegretDecision | None = None
    options: str = ""

    @property
    def over(self) -> tuple[OverBudget, ...]:
        """The redistributions that are over budget."""
        return self.regret.over if self.regret else ()

    @property
    def _counted(self) -> str:
        return plural(self.trials, "trial or rule", "trials and rules") if self.rules else plural(self.trials, "trial")

    @property
    def unverified(self) -> str:
        """Why the run proves too little to pass; empty if it proves enough."""
        if self.errors:
            return f"the verifier itself failed, with {plural(len(self.errors), 'distinct error')}"
        if not self.trials and self.unchanged:
            return ""
        if not self.trials and self.unanswered:
            return self.unanswered[0].why
        if not self.trials:
            return f"nothing was tested: the run has no {'trials and no rules' if self.rules else 'trials'}"
        if not self.evidence:
            all_of = f"all {self._counted} are" if self.trials > 1 else f"the {self._counted} is"
            return f"nothing was tested: {all_of} unsupported or inconclusive"
        if self.unanswered:
            return self.unanswered[0].why
        if not self.complete:
            where = "every op and mesh" if self.rules else "every mesh"
            return f"the run is incomplete: it stopped before it had reached {where}"
        return ""

    @property
    def exit_status(self) -> int:
        """0 nothing new, 1 findings, lost rules that count or redistributions over budget, 2 could not verify.

        The status is always 2 after an error of ours or without any evidence, because other statements may be wrong.
        Without evidence it is 0 only if nothing had to be verified and nothing was. If
        a run is incomplete or part of the question has no evidence, new findings still give 1, because they are facts;
        without new findings the status is then 2.
        """
        if not self.trials and self.unchanged and not self.errors:
            return 0
        if self.errors or not self.evidence:
            return 2
        if self.new or self.expired or (self.lost and self.fail_on_lost) or self.over:
            return 1
        return 0 if self.complete and not self.unanswered else 2


def decide(run: RunRecord, baseline: Baseline, today: date, special_values: bool = False) -> GateDecision:
    """Return the decision on one run alone, given ``baseline``; see :func:`decide_all`."""
    return _decide(run.header.command, [run], baseline, today, special_values)


def with_budgets(decision: GateDecision, evidence: Evidence, budgets: Sequence[Budget]) -> GateDecision:
    """Return ``decision`` with what ``budgets`` say of the redistributions; it is not verified if they say nothing."""
    regret = over_budget(evidence.runs, evidence.question, budgets)
    if regret.cells:
        return replace(decision, regret=regret)
    record = " ".join(filter(None, ["python -m verifier gate", decision.options, "--fail-on regret --update"]))
    none = NoEvidence("no budget is for an op that a run of these tried on a mesh", f"record budgets: {record}")
    return replace(decision, regret=regret, unanswered=(*decision.unanswered, none))


def without_special(run: RunRecord) -> RunRecord:
    """Return ``run`` without the findings that only special values show, and that do not count for that reason."""
    return replace(run, findings=[one for one in run.findings if not is_aside(one, run.header)])


def decide_all(
    evidence: Evidence, baseline: Baseline, today: date, special_values: bool = False, fail_on_lost: bool = False
) -> GateDecision:
    """Return the decision on all evidence, given ``baseline``. The same arguments always give the same decision.

    - A finding of a run is *new* if the baseline has no entry with a reason for its fingerprint that is about the rules
      which the run verified. The run's own list of known findings does not count: it may have had another baseline.
    - An entry is *known* if its finding is there, or it failed when it was tried again. It is *expired* instead if
      today is after its day. Expiry is ignored for entries that were not tried again or that are fixed.
    - An entry is *fixed* only if it was tried again and passed, and failed nowhere; otherwise it is *untested*. Entries
      of ops that the question is not about are not listed as untested.
    - An entry that would be fixed is *mended* instead if it was never seen under this version of torch: it stays, for
      the versions under which it was seen. If it fails under a version that mends it, it is new.
    - A finding that only special values show is new with ``special_values``, and else listed as *special*.
    - Rules that imports have lost fail the gate only with ``fail_on_lost``.
    """
    decision = _decide(evidence.question.describe(), evidence.runs, baseline, today, special_values)
    lacking = [one for run in evidence.runs for op, one in _without_evidence(run) if evidence.question.asks_op(op)]
    untested = tuple(item for item in decision.untested if evidence.question.asks_op(item.op))
    unanswered = tuple(dict.fromkeys((*evidence.unanswered, *lacking)))
    return replace(
        decision, untested=untested, unanswered=unanswered, left_out=evidence.left_out,
        unchanged=evidence.unchanged, lost=evidence.lost, fail_on_lost=fail_on_lost,
        unreached=tuple(_unreached(evidence)),
    )  # fmt: skip


def _unreached(evidence: Evidence) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the ops that are asked about and of whose strategy no call has reached some lines."""
    for run in evidence.runs:
        for op in run.rules.ops.values() if run.rules is not None else ():
            if op.unreached and any(map(evidence.question.asks_op, op.overloads)):
                yield ", ".join(op.overloads), tuple(op.unreached)


def _decide(
    question: str, runs: Sequence[RunRecord], baseline: Baseline, today: date, special_values: bool
) -> GateDecision:
    torch = torch_of(runs[0]) if runs else ""  # runs with another are no evidence
    new: dict[tuple[str, tuple[str, ...]], GateItem] = {}
    special: dict[tuple[str, tuple[str, ...]], GateItem] = {}
    known: list[GateItem] = []
    fixed: list[GateItem] = []
    mended: list[GateItem] = []
    expired: list[GateItem] = []
    untested: list[GateItem] = []
    for entry in baseline.entries:
        about = [run for run in runs if entry.applies(run.header.imports, run.header.own_rules)]
        finding = next((one for run in about for one in run.findings if one.fingerprint == entry.fingerprint), None)
        tried = {one.status: one for run in about for one in run.baseline if one.fingerprint == entry.fingerprint}
        if finding or "known" in tried:
            if not entry.explained:
                place = (entry.fingerprint, entry.imports)
                new[place] = _item(finding, entry, "its baseline entry has no reason of a person's")
            elif torch in entry.mended:
                new[entry.fingerprint, entry.imports] = _item(
                    finding, entry, f"it was mended in torch {torch}, and is back"
                )
            elif entry.expires < today:
                expired.append(_item(finding, entry, f"expired on {entry.expires.isoformat()}"))
            else:
                first = f"; not seen under torch {torch} before" if torch not in entry.torch else ""
                known.append(_item(finding, entry, f"until {entry.expires.isoformat()}{first}"))
        elif "fixed" in tried and torch not in entry.torch and not any(run.header.imports for run in about):
            mended.append(_item(None, entry, f"in torch {torch}; seen under {', '.join(entry.torch)}"))
        elif "fixed" in tried:
            fixed.append(_item(None, entry, tried["fixed"].detail or "tried again, and passed"))
        else:
            why = tried["untested"].detail if "untested" in tried else ""
            new_version = f"; not checked under torch {torch} yet" if torch not in (*entry.torch, *entry.mended) else ""
            untested.append(_item(None, entry, (why or _why_untested(runs, about, entry)) + new_version))
    for run in runs:
        entries = baseline.about(run.header.imports, run.header.own_rules)
        for finding in run.findings:
            if entries.get(finding.fingerprint) is None:
                aside = not special_values and is_aside(finding, run.header)
                (special if aside else new).setdefault(
                    (finding.fingerprint, _own(finding, run.header)), _item(finding, None, _note(finding, run))
                )
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run.counts)
    errors = tuple(dict.fromkeys(error for run in runs for error in run.tool_errors))
    if not errors and counts[VerdictKind.TOOL_ERROR]:
        errors = (f"{plural(counts[VerdictKind.TOOL_ERROR], 'trial')} ended in TOOL_ERROR",)
    return GateDecision(
        question=question,
        runs=tuple(_describe(run) for run in runs),
        revision=_revision(runs),
        new=_ordered(new.values()),
        special=_ordered(special.values()),
        known=_ordered(known),
        fixed=_ordered(fixed),
        mended=_ordered(mended),
        expired=_ordered(expired),
        untested=_ordered(untested),
        trials=sum(run.trials for run in runs),
        evidence=proves(counts),
        complete=all(run.complete for run in runs),
        errors=errors,
        rules=any(run.rules is not None for run in runs),
        imports=tuple(dict.fromkeys(name for run in runs for name in run.header.imports)),
        unanswered=tuple(dict.fromkeys(one for run in runs for _, one in _without_evidence(run))),
    )


def _without_evidence(run: RunRecord) -> Iterator[tuple[str, NoEvidence]]:
    """Yield the ops of which a run is no evidence though it is complete, and why."""
    for one in run.untested:
        if one.remedy:
            yield one.what, NoEvidence(one.reason, one.remedy)


def _own(finding: FindingRecord, header: RunHeader) -> tuple[str, ...]:
    """Return the imports whose rules a finding is about; empty for torch's own."""
    return tuple(sorted(header.imports)) if concerns_own_rules(finding, header) else ()


def _note(finding: FindingRecord, run: RunRecord) -> str:
    """Return why a finding is new."""
    own = _own(finding, run.header)
    return f"not in the baseline; it is about the rules of {imports_text(own)}" if own else "not in the baseline"


def _describe(run: RunRecord) -> str:
    """Return a run on one line: its id, what it tried, and how it was made."""
    header = run.header
    tried = plural(len(run.counts_by_op), "op")
    return f"{header.id}: {tried} on {' '.join(header.meshes)}, {imports_text(header.imports)}: {header.command}"


def _revision(runs: Sequence[RunRecord]) -> str:
    """Return the versions of torch and of the verifier with which the runs were made."""
    parts = []
    for name in ("torch", "dtensor-verifier"):
        versions = dict.fromkeys(run.header.versions[name] for run in runs if name in run.header.versions)
        if versions:
            parts.append(f"{name} {', '.join(versions)}")
    return "; ".join(parts)


def _item(finding: FindingRecord | None, entry: BaselineEntry | None, note: str) -> GateItem:
    source = finding or entry
    assert source is not None, "an item has a finding or an entry"
    if finding and finding.confirmed.unsure:
        note = f"{note}; {finding.confirmed.text}"
    return GateItem(
        fingerprint=source.fingerprint,
        op=source.op,
        family=source.family,
        verdict=source.verdict,
        mesh=source.mesh,
        message=finding.message if finding else entry.summary if entry else "",
        note=note,
        reason=entry.reason if entry else "",
        link=entry.link if entry else "",
        expires=entry.expires.isoformat() if entry else "",
        imports=tuple(finding.imports if finding else entry.imports if entry else ()),
        rank_memory=finding.rank_memory if finding else "",
        strategy=finding.strategy if finding else "",
    )


def _why_untested(runs: Sequence[RunRecord], about: Sequence[RunRecord], entry: BaselineEntry) -> str:
    """Return why no run tried an entry again; ``about`` are the runs that verified the entry's rules."""
    if runs and not about:
        if entry.imports:
            return f"it is about the rules of {imports_text(entry.imports)}"
        return replaced_text(entry.op, runs[0].header.imports)
    if entry.family and not any(entry.family in run.header.families for run in about):
        return f"family {entry.family} was not selected"
    checked = [op for run in about if run.rules for op in run.rules.ops.values() if entry.op in op.overloads]
    for op in checked:
        if entry.op in op.not_testable:
            return f"{entry.op} is not testable at level 1: {op.not_testable[entry.op]}"
    if not checked and not any(entry.op in run.counts_by_op for run in about):
        return f"{entry.op} was not tried"
    return "was not tried again"


def _ordered(items: Iterable[GateItem]) -> tuple[GateItem, ...]:
    return tuple(sorted(items, key=lambda item: (item.op, item.verdict, item.fingerprint)))
