"""The rule check (level 1) as a section of the page: the ops by importance, each with the rules that it unfolds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verifier.records.schema import MissingRuleRecord, OpRulesRecord, RulesRecord, RunRecord
from verifier.report.missing import by_worth
from verifier.report.rules_text import call_text, is_tested, not_tested, totals_block, untested_reasons

__all__ = ["MOST_CONFIRMED", "MOST_MISSING", "MOST_OTHERS", "OpView", "RulesView", "rules_view"]

# A page of 700 ops must open at once and stay below 3 MB; run.json has everything.
MOST_MISSING = 20
"""Most missing rules per op on the page."""
MOST_CONFIRMED = 24
"""Most confirmed rules per overload on the page."""
MOST_OTHERS = 12
"""Most unconfirmed rules per op on the page; also most caveats, and most inconclusive claims."""
_OPEN_MISSING = 40
"""Number of ops with missing rules up to which their table is unfolded."""


@dataclass(frozen=True)
class RuleGroup:
    """Rules of one call or one overload, named by ``title``. ``more`` is the number of rules left out."""

    title: str
    rules: tuple[str, ...]
    more: int


@dataclass(frozen=True)
class CallView:
    """The missing rules that one call shows."""

    call: str
    origin: str
    missing: tuple[MissingRuleRecord, ...]


@dataclass(frozen=True)
class OpView:
    """An op on the page: its record, and the parts of the record that are shown."""

    name: str
    record: OpRulesRecord
    calls: tuple[CallView, ...]
    confirmed: tuple[RuleGroup, ...]
    reasons: tuple[str, ...]

    @property
    def columns(self) -> tuple[tuple[int, str, str], ...]:
        """Return each number with its name, and its tone if it is not 0."""
        record = self.record
        return (
            (record.combinations, "combinations", ""),
            (len(record.confirmed), "confirmed", ""),
            (len(record.wrong), "wrong", "fail"),
            (len(record.unconfirmed), "unconfirmed", "open"),
            (len(record.missing), "missing", ""),
            (sum(record.untested.values()) or len(record.not_testable), "not tested", "open"),
        )

    @property
    def tested(self) -> bool:
        """Whether any rule of the op has a verdict."""
        return is_tested(self.record)

    @property
    def hidden_missing(self) -> int:
        """Number of missing rules that are not shown."""
        return len(self.record.missing) - sum(len(call.missing) for call in self.calls)


@dataclass(frozen=True)
class RulesView:
    """The section: numbers, untested combinations, and the ops in three groups, each sorted by name."""

    record: RulesRecord
    tiles: tuple[tuple[int, str], ...]
    speed: str
    wrong: tuple[OpView, ...]
    missing: tuple[OpView, ...]
    rest: tuple[OpView, ...]
    untested: dict[str, int]
    not_testable: tuple[tuple[str, str], ...]
    died: tuple[tuple[str, str], ...]
    nothing: tuple[str, ...]
    """Ops without any test."""
    anchors: frozenset[str]
    """Fingerprints of the findings on the page, so that wrong rules can link to them."""

    @property
    def missing_unfolded(self) -> bool:
        """Whether the ops with missing rules are few enough to be shown unfolded."""
        return len(self.missing) <= _OPEN_MISSING


def rules_view(run: RunRecord) -> RulesView | None:
    """Return the section of the rule check; None for a run without one."""
    rules = run.rules
    if rules is None:
        return None
    views = [_op_view(name, op) for name, op in sorted(rules.ops.items())]
    wrong = [view for view in views if view.record.wrong or view.record.unconfirmed]
    # New wrong rules come first, then known wrong rules, then unconfirmed rules.
    wrong.sort(key=lambda view: (not any(not rule.known for rule in view.record.wrong), not view.record.wrong))
    rest = [view for view in views if not (view.record.wrong or view.record.unconfirmed)]
    return RulesView(
        record=rules,
        tiles=_tiles(rules),
        speed=totals_block(rules)[1].strip(),
        wrong=tuple(wrong),
        missing=tuple(view for view in rest if view.record.missing),
        rest=tuple(view for view in rest if not view.record.missing),
        untested=dict(untested_reasons(rules)),
        not_testable=tuple((overload, why) for view in views for overload, why in view.record.not_testable.items()),
        died=tuple((view.name, text) for view in views for text in view.record.died),
        nothing=tuple(view.name for view in views if not view.tested),
        anchors=frozenset(finding.fingerprint for finding in run.findings),
    )


def _tiles(rules: RulesRecord) -> tuple[tuple[int, str], ...]:
    ops = rules.ops.values()
    return (
        (len(ops), "ops"),
        (rules.combinations, "combinations"),
        (sum(len(op.confirmed) for op in ops), "rules confirmed"),
        (sum(len(op.wrong) for op in ops), "wrong"),
        (sum(len(op.unconfirmed) for op in ops), "unconfirmed"),
        (sum(len(op.missing) for op in ops), "missing"),
        (sum(len(op.special) for op in ops), "true but for special values"),
        (sum(len(op.inconclusive) for op in ops), "inconclusive"),
        (sum(sum(op.untested.values()) for op in ops), "combinations not tested"),
    )


def _op_view(name: str, op: OpRulesRecord) -> OpView:
    calls: dict[tuple[str, str], list[MissingRuleRecord]] = {}
    for rule in by_worth(op.missing)[:MOST_MISSING]:
        calls.setdefault((call_text(rule), rule.origin), []).append(rule)
    return OpView(
        name=name,
        record=op,
        calls=tuple(CallView(call, origin, tuple(rules)) for (call, origin), rules in calls.items()),
        confirmed=tuple(_by_overload(op.confirmed, op.overloads)),
        reasons=tuple(not_tested(op)),
    )


def _by_overload(confirmed: Iterable[str], overloads: Sequence[str]) -> Iterable[RuleGroup]:
    """Yield confirmed rules by overload, without the overload's name before each rule."""
    groups: dict[str, list[str]] = {}
    for text in confirmed:
        overload, colon, rule = text.partition(": ")
        known = bool(colon) and overload in overloads
        groups.setdefault(overload if known else "", []).append(rule if known else text)
    for overload, rules in groups.items():
        yield RuleGroup(overload, tuple(rules[:MOST_CONFIRMED]), max(0, len(rules) - MOST_CONFIRMED))
