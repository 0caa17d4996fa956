"""The pre-merge decision: what a run says of a change, given the findings that are known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date

import msgspec

from verifier.baseline import Baseline, BaselineEntry
from verifier.cases import VerdictKind
from verifier.records import FORMAT_VERSION, FindingRecord, RunRecord
from verifier.wording import plural

__all__ = ["GateDecision", "GateItem", "as_json", "decide", "render"]

_NO_EVIDENCE = (VerdictKind.UNSUPPORTED, VerdictKind.INCONCLUSIVE, VerdictKind.TOOL_ERROR)


@dataclass(frozen=True)
class GateItem:
    """One finding of the run, or one entry of the baseline, as the gate sees it.

    ``message`` is the finding's, or the entry's summary where the run has no finding; ``note`` says why the item is
    where it is. ``reason``, ``link`` and ``expires`` (an ISO date) come from the baseline and are empty without an
    entry.
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


@dataclass(frozen=True)
class GateDecision:
    """What is ``new``, ``known``, ``fixed``, ``expired`` (known, still there, past its day) and ``untested``.

    ``trials`` counts all trials, and the rules of level 1 if ``rules`` is true; ``evidence`` those that said something:
    an unsupported or inconclusive trial, or an error of ours, proves nothing. ``errors`` are our own errors.
    ``imports`` are what the run imported: what is fixed is fixed with these.
    """

    run: str
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

    @property
    def _counted(self) -> str:
        return plural(self.trials, "trial or rule", "trials and rules") if self.rules else plural(self.trials, "trial")

    @property
    def unverified(self) -> str:
        """Why the run proves too little to pass; empty if it proves enough."""
        if self.errors:
            return f"the verifier itself failed, with {plural(len(self.errors), 'distinct error')}"
        if not self.trials:
            return f"nothing was tested: the run has no {'trials and no rules' if self.rules else 'trials'}"
        if not self.evidence:
            all_of = f"all {self._counted} are" if self.trials > 1 else f"the {self._counted} is"
            return f"nothing was tested: {all_of} unsupported or inconclusive"
        if not self.complete:
            where = "every op and mesh" if self.rules else "every mesh"
            return f"the run is incomplete: it stopped before it had reached {where}"
        return ""

    @property
    def exit_status(self) -> int:
        """0 nothing new, 1 new or expired findings, 2 could not verify.

        An error of ours, or a run without evidence, is always 2: what else it says may be wrong. An incomplete run with
        new findings is 1, because what it found is a fact whatever it had still to do; without any it is 2.
        """
        if self.errors or not self.evidence:
            return 2
        if self.new or self.expired:
            return 1
        return 0 if self.complete else 2


def decide(run: RunRecord, baseline: Baseline, today: date) -> GateDecision:
    """Return what ``run`` says, given ``baseline``. The same arguments always give the same decision.

    - A finding of the run is *new* if the baseline has no entry for its fingerprint, or one with an empty reason.
      What the run itself thought known does not count: it may have had another baseline.
    - An entry is *known* if its finding is there, or it failed when it was tried again. It is *expired* instead if
      today is after its day. The day of an entry that was not tried or that is fixed accuses nobody.
    - An entry is *fixed* only if the run tried it again and it passed; else it is *untested*.
    """
    found = {finding.fingerprint: finding for finding in run.findings}
    status = {known.fingerprint: known for known in run.baseline}
    new = [_item(finding, None, "not in the baseline") for name, finding in found.items() if baseline.get(name) is None]
    known: list[GateItem] = []
    fixed: list[GateItem] = []
    expired: list[GateItem] = []
    untested: list[GateItem] = []
    for entry in baseline.entries:
        finding = found.get(entry.fingerprint)
        tried = status.get(entry.fingerprint)
        if finding or (tried and tried.status == "known"):
            if not entry.reason.strip():
                new.append(_item(finding, entry, "its baseline entry has no reason"))
            elif entry.expires < today:
                expired.append(_item(finding, entry, f"expired on {entry.expires.isoformat()}"))
            else:
                known.append(_item(finding, entry, f"until {entry.expires.isoformat()}"))
        elif tried and tried.status == "fixed":
            fixed.append(_item(None, entry, tried.detail or "tried again, and passed"))
        else:
            untested.append(_item(None, entry, (tried.detail if tried else "") or _why_untested(run, entry)))
    counts = {VerdictKind(name): count for name, count in run.counts.items()}
    errors = tuple(run.tool_errors)
    if not errors and counts.get(VerdictKind.TOOL_ERROR):
        errors = (f"{plural(counts[VerdictKind.TOOL_ERROR], 'trial')} ended in TOOL_ERROR",)
    return GateDecision(
        run=run.header.id,
        new=_ordered(new),
        known=_ordered(known),
        fixed=_ordered(fixed),
        expired=_ordered(expired),
        untested=_ordered(untested),
        trials=run.trials,
        evidence=sum(count for kind, count in counts.items() if kind not in _NO_EVIDENCE),
        complete=run.complete,
        errors=errors,
        rules=run.rules is not None,
        imports=tuple(run.header.imports),
    )


def _item(finding: FindingRecord | None, entry: BaselineEntry | None, note: str) -> GateItem:
    source = finding or entry
    assert source is not None, "an item has a finding or an entry"
    if finding and finding.confirmed.startswith("unconfirmed"):
        note = f"{note}; {finding.confirmed}"
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
    )


def _why_untested(run: RunRecord, entry: BaselineEntry) -> str:
    if entry.family and entry.family not in run.header.families:
        return f"family {entry.family} was not selected"
    checked = [op for op in run.rules.ops.values() if entry.op in op.overloads] if run.rules else []
    for op in checked:
        if entry.op in op.not_testable:
            return f"{entry.op} is not testable at level 1: {op.not_testable[entry.op]}"
    if entry.op not in run.counts_by_op and not checked:
        return f"{entry.op} was not tried"
    return "was not tried again"


def _ordered(items: Iterable[GateItem]) -> tuple[GateItem, ...]:
    return tuple(sorted(items, key=lambda item: (item.op, item.verdict, item.fingerprint)))


# ------------------------------------------------------------------------------------------------------------ writing
def as_json(decision: GateDecision) -> str:
    """Return the decision as JSON: ``format_version``, ``exit_status``, ``unverified``, then its fields."""
    fields = {
        "format_version": FORMAT_VERSION,
        "exit_status": decision.exit_status,
        "unverified": decision.unverified,
        **asdict(decision),
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode() + "\n"


def render(decision: GateDecision) -> str:
    """Return the decision as text for a terminal; its last lines say what to do next."""
    lines = [f"gate on run {decision.run}"]
    for title, items in (("NEW", decision.new), ("EXPIRED", decision.expired)):
        for item in items:
            lines += ["", f"{title} {item.fingerprint} {item.verdict}: {item.note}"]
            lines += [f"  {line}" for line in item.message.splitlines()]
            lines += [f"  {name}: {text}" for name, text in (("reason", item.reason), ("link", item.link)) if text]
            if "reproduce:" not in item.message:
                lines.append(f"  reproduce: python -m verifier replay {item.fingerprint}")
    for title, items in (("known", decision.known), ("fixed", decision.fixed), ("untested", decision.untested)):
        if items:
            lines.append("")
        for item in items:
            reason = f"; {item.reason}" if title == "known" else ""
            lines.append(
                f"{title} {item.fingerprint} {item.verdict} in {item.op} on mesh {item.mesh}: {item.note}{reason}"
            )
    if decision.errors:
        lines += ["", *(f"TOOL_ERROR {error}" for error in decision.errors)]
    lines += [
        "",
        f"{decision._counted}, {decision.trials - decision.evidence} of them without evidence; "
        f"{len(decision.new)} new, {len(decision.expired)} expired, {len(decision.known)} known, "
        f"{len(decision.fixed)} fixed, {len(decision.untested)} untested",
        *_next_steps(decision),
    ]
    return "\n".join(lines) + "\n"


def _next_steps(decision: GateDecision) -> list[str]:
    """Return what the reader is to do, the most pressing first, and the exit status."""
    steps = []
    if decision.errors:
        steps.append("report the error of the verifier; until it is gone the run decides nothing")
    elif decision.unverified:
        steps.append(f"{decision.unverified}; run again with more time, or another selection of ops")
    if decision.new:
        steps.append("fix what is new, or accept it: `python -m verifier gate --update`, then give each a reason")
    if decision.expired:
        steps.append("fix what has expired, or move its `expires` in the baseline, with a reason that still holds")
    if decision.fixed:
        update = "`python -m verifier gate --update`"
        if decision.imports:
            options = " ".join(f"--import {name}" for name in decision.imports)
            steps.append(f"what is fixed is so with {options}; if all runs have that from now on, drop it: {update}")
        else:
            steps.append(f"drop what is fixed from the baseline: {update}")
    verdict = {0: "passed: nothing new", 1: "failed: new or expired findings", 2: "could not verify"}
    return [
        *(f"next: {step}" for step in steps),
        f"gate {verdict[decision.exit_status]} (exit status {decision.exit_status})",
    ]
