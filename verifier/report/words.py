"""Words and signs of all reports: names and ranks of verdicts, and texts of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from verifier.core.verdict import VerdictKind
from verifier.core.wording import plural
from verifier.records.schema import ConfirmationRecord, RunRecord
from verifier.records.special import Standing, standing_of

__all__ = [
    "OUTCOMES",
    "Outcome",
    "Totals",
    "counted",
    "evidence_text",
    "level_1_only",
    "outcome",
    "present_verdicts",
    "seconds_text",
    "totals",
    "worst_verdict",
]


@dataclass(frozen=True)
class Outcome:
    """How a verdict is shown. ``tone`` is ``pass``, ``fail``, ``open`` (no conclusion) or ``ours`` (our error)."""

    name: str
    sign: str
    tone: str
    meaning: str


OUTCOMES: dict[str, Outcome] = {
    kind.value: Outcome(kind.value, sign, tone, meaning)
    for kind, sign, tone, meaning in (
        (VerdictKind.SILENT_ERROR, "E", "fail", "the local call raises, the sharded one returns"),
        (VerdictKind.WRONG_VALUE, "V", "fail", "a rank holds other values than its placements promise"),
        (VerdictKind.WRONG_GRADIENT, "G", "fail", "a gradient is wrong"),
        (VerdictKind.WRONG_SHAPE, "S", "fail", "an output has another shape, or a view other strides"),
        (VerdictKind.WRONG_DTYPE, "T", "fail", "an output has another dtype"),
        (VerdictKind.WRONG_PLACEMENT, "L", "fail", "an output has placements that do not fit what the ranks hold"),
        (VerdictKind.MUTATED_INPUT, "M", "fail", "an input changed that must not"),
        (VerdictKind.STALE_CACHE, "K", "fail", "a call takes the decision that was cached for another call"),
        (VerdictKind.SPECIAL_VALUE, "N", "fail", "wrong only for infinities, NaN, 0 or values at a threshold"),
        (VerdictKind.RANKS_DISAGREE, "R", "fail", "ranks do not agree with one another"),
        (VerdictKind.HANG, "H", "fail", "ranks waited until the time limit"),
        (VerdictKind.DIED, "X", "fail", "the process of a rank ended"),
        (VerdictKind.CRASH, "C", "fail", "the sharded call raises, the local one does not"),
        (VerdictKind.TOOL_ERROR, "!", "ours", "an error of the verifier itself; says nothing about the op"),
        (VerdictKind.INCONCLUSIVE, "?", "open", "agreement that would prove nothing"),
        (VerdictKind.UNSUPPORTED, "u", "open", "refused in plain words; nothing was tested"),
        (VerdictKind.PASS, "✓", "pass", "every rank holds what was promised"),
    )
}
"""Every verdict, worst first."""

_RANK = {name: position for position, name in enumerate(OUTCOMES)}


def outcome(verdict: str) -> Outcome:
    """Return how ``verdict`` is shown."""
    return OUTCOMES[verdict]


def worst_verdict(counts: Mapping[str, int]) -> str | None:
    """Return the worst verdict in ``counts``, or None.

    UNSUPPORTED is worse than PASS, so that a cell with many refused trials does not look proved.

    >>> worst_verdict({"PASS": 10, "UNSUPPORTED": 2, "CRASH": 0})
    'UNSUPPORTED'
    """
    return min((name for name, count in counts.items() if count), key=_RANK.__getitem__, default=None)


def present_verdicts(tables: Iterable[Mapping[str, int]]) -> list[str]:
    """Return the verdicts that occur in ``tables``: PASS first, then the worst first."""
    present = {name for table in tables for name, count in table.items() if count}
    ranked = [name for name in OUTCOMES if name in present]
    return sorted(ranked, key=lambda name: name != VerdictKind.PASS.value)


# ------------------------------------------------------------------------------------------------------------- totals
@dataclass(frozen=True)
class Totals:
    """Numbers of trials and findings of a run; ``not_reached`` counts combinations that were never tried.

    ``special`` counts findings that are not known and that special values alone show, which ``new`` leaves out.
    """

    trials: int
    passed: int
    failed: int
    unsupported: int
    inconclusive: int
    tool_errors: int
    not_reached: int
    new: int
    known: int
    refusals: tuple[str, ...] = ()
    special: int = 0

    @property
    def concluded(self) -> int:
        """Number of trials with a conclusion about the op; only these count as tested."""
        return self.passed + self.failed

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Return each number with its word, and its tone or an empty text."""
        shown = "; ".join(self.refusals[:2]) + (f"; {len(self.refusals) - 2} more" if len(self.refusals) > 2 else "")
        unsupported = f"{self.unsupported:,} unsupported" + (f" ({shown})" if shown and self.unsupported else "")
        parts = [
            (f"{self.trials:,} run", "" if self.trials else "open"),
            (f"{self.passed:,} passed", "pass" if self.passed else ""),
            (f"{self.failed:,} failed", "fail" if self.failed else ""),
            (unsupported, "open" if self.unsupported else ""),
        ]
        if self.inconclusive:
            parts.append((f"{self.inconclusive:,} inconclusive", "open"))
        if self.tool_errors:
            parts.append((plural(self.tool_errors, "tool error"), "ours"))
        return [*parts, (f"{self.not_reached:,} not reached", "open" if self.not_reached else "")]

    @property
    def line(self) -> str:
        """Return all numbers in one line, also of untested combinations.

        >>> Totals(412, 370, 6, 36, 0, 0, 5, 1, 2, ("sparse",)).line
        '412 run, 370 passed, 6 failed, 36 unsupported (sparse), 5 not reached'
        """
        return ", ".join(text for text, _ in self.parts)


def totals(run: RunRecord) -> Totals:
    """Return the numbers of ``run``."""
    by_tone = {"pass": 0, "fail": 0, "open": 0, "ours": 0}
    for name, count in run.counts.items():
        by_tone[outcome(name).tone] += count
    standings = Counter(standing_of(finding, run.header) for finding in run.findings)
    return Totals(
        trials=run.trials,
        passed=by_tone["pass"],
        failed=by_tone["fail"],
        unsupported=run.counts.get(VerdictKind.UNSUPPORTED.value, 0),
        inconclusive=run.counts.get(VerdictKind.INCONCLUSIVE.value, 0),
        tool_errors=max(by_tone["ours"], len(run.tool_errors)),
        not_reached=sum(entry.count for entry in run.untested),
        new=standings[Standing.NEW],
        known=standings[Standing.KNOWN],
        refusals=tuple(sorted(run.unsupported, key=lambda reason: (-run.unsupported[reason], reason))),
        special=standings[Standing.ASIDE],
    )


# ------------------------------------------------------------------------------------------------------- two levels
def counted(run: RunRecord) -> tuple[str, str]:
    """Return the singular and plural noun for the counts of ``run``: trials, rules of level 1, or both."""
    if run.rules is None:
        return "trial", "trials"
    return ("trial or rule", "trials and rules") if run.matrices else ("rule", "rules")


def level_1_only(run: RunRecord) -> set[str]:
    """Return the ops in ``run.counts_by_op`` that were tried only at level 1; the table of rules shows them."""
    if run.rules is None:
        return set()
    checked = {*run.rules.ops, *(overload for op in run.rules.ops.values() for overload in op.overloads)}
    # Every trial on a mesh is in a matrix.
    return (checked & set(run.counts_by_op)) - {matrix.op for matrix in run.matrices}


def evidence_text(level: int, confirmed: ConfirmationRecord) -> str:
    """Return the level of a finding, and the backend and ranks that confirmed it.

    >>> evidence_text(2, ConfirmationRecord("confirmed", "gloo", 4))
    'found at level 2, confirmed on gloo, 4 ranks'
    """
    return f"found at level {level}, {confirmed.text}"


# ------------------------------------------------------------------------------------------------------------ numbers
def seconds_text(seconds: float) -> str:
    """Return a duration as readable text.

    >>> seconds_text(0.0042), seconds_text(2.34), seconds_text(90), seconds_text(120), seconds_text(7265)
    ('4.2 ms', '2.3 s', '1 min 30 s', '2 min', '2 h 01 min')
    """
    if seconds < 0.9995:
        return f"{seconds * 1000:.1f} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60:02} s" if whole % 60 else "")
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
