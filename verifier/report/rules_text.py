"""The rule check as plain lines: a line per op, its wrong and missing rules below, and totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from verifier.core.case import MeshSpec
from verifier.core.wording import NO_SAMPLES, bytes_text, places_text, plural
from verifier.records.commands import command_text, replay_text
from verifier.records.files import DEFAULT_REPORTS
from verifier.records.schema import (
    MissingRuleRecord,
    OpRulesRecord,
    RulesRecord,
    RunRecord,
    UntestedRecord,
    WrongRuleRecord,
)
from verifier.report.missing import FoldedRule, folded
from verifier.report.words import evidence_text, seconds_text

__all__ = [
    "call_text",
    "evidence_for",
    "first_line",
    "header_line",
    "is_tested",
    "not_tested",
    "op_lines",
    "quiet_lines",
    "rule_text",
    "saves_text",
    "state_text",
    "total_lines",
    "totals_block",
    "untested_beside_rules",
    "untested_reasons",
]

_NAME_WIDTH = 34
_COLUMNS = {"combinations": 12, "confirmed": 9, "wrong": 5, "missing": 7, "not tested": 10, "seconds": 7}
_MOST_MISSING = 6
_MOST_UNCONFIRMED = 6
_MOST_REASONS = 2
_MOST_TOTAL_REASONS = 12
_MOST_NEW = 40
_MOST_BRIEF = 5
"""Reasons, ends of workers and new findings in totals that fit a screen."""


# -------------------------------------------------------------------------------------------------------------- phrases
def rule_text(rule: WrongRuleRecord | MissingRuleRecord) -> str:
    """Return a rule without its op, as ``S(0), R -> S(0)``; the placements at which DTensor fails as ``S(0), R``."""
    return _joined(rule, "->")


def _joined(rule: WrongRuleRecord | MissingRuleRecord, arrow: str) -> str:
    inputs = ", ".join(rule.input_placements) or "()"
    if isinstance(rule, WrongRuleRecord) and rule.fails:
        return inputs
    return f"{inputs} {arrow} {', '.join(rule.output_placements) or '()'}"


def call_text(rule: WrongRuleRecord | MissingRuleRecord) -> str:
    """Return the call that shows the rule, as ``aten.sum.dim_IntList([6, 4], [1])``: shapes, then other arguments."""
    arguments = [str(shape) for shape in rule.shapes] + ([rule.arguments] if rule.arguments else [])
    return _flat(f"{rule.op}({', '.join(arguments)})")


def state_text(rule: WrongRuleRecord) -> str:
    """Return the call of a wrong rule, the rule, and the mesh on which the rule is refuted."""
    return f"{call_text(rule)} with {_joined(rule, '→')} on mesh {MeshSpec.parse(rule.mesh).shape}"


def saves_text(rule: MissingRuleRecord) -> str:
    """Return the saving of a missing rule, as ``saves 1 all_gather, 480 B``, or that DTensor refuses the call."""
    if not rule.saves:
        return "DTensor refuses this call"
    kinds = Counter(transfer.collective for transfer in rule.saves)
    return f"saves {' and '.join(f'{n:,} {name}' for name, n in kinds.items())}, {bytes_text(rule.bytes_saved)}"


def evidence_for(rule: MissingRuleRecord) -> str:
    """Return the numbers of draws, sizes and samples in which a missing rule held."""
    samples = f", in {plural(rule.samples, 'sample')}" if rule.samples > 1 else ""
    return f"held in {plural(rule.draws, 'draw')} over {plural(rule.sizes, 'size')}{samples}"


def not_tested(op: OpRulesRecord) -> list[str]:
    """Return why combinations of ``op`` have no verdict, most frequent first, then the overloads that are not testable.

    Untestable samples also count among the combinations; each is named once.
    """
    named = set(op.not_testable.values())
    reasons = [f"{count:,} {reason}" for reason, count in _by_count(op.untested) if reason not in named]
    overloads: dict[str, list[str]] = {}
    for overload, reason in op.not_testable.items():
        overloads.setdefault(reason, []).append(overload)
    return reasons + [f"{', '.join(names)} ({reason})" for reason, names in overloads.items()]


def first_line(message: str) -> str:
    """Return the first line of a stored message, the difference; the other lines are written again here."""
    return message.partition("\n")[0]


def is_tested(op: OpRulesRecord) -> bool:
    """Return whether any rule of ``op`` has a verdict."""
    return bool(op.combinations or op.confirmed or op.wrong or op.unconfirmed or op.missing)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


# ------------------------------------------------------------------------------------------------------------- one op
def header_line() -> str:
    """Return the column heads of :func:`op_lines`."""
    return "op".ljust(_NAME_WIDTH) + "".join(f"  {name:>{width}}" for name, width in _COLUMNS.items())


def op_lines(name: str, op: OpRulesRecord, imports: Sequence[str] = (), folder: Path = DEFAULT_REPORTS) -> list[str]:
    """Return the lines of one op: numbers and why not more was tested, then its rules, indented.

    New wrong rules are shown in full, and those that follow from them are counted. Known wrong rules take a line each,
    and so do missing rules up to a limit, folded by dims and overloads. 0 is shown as a dash. ``imports`` are the
    imports of the run, which a replay needs; the run is recorded in ``folder``.
    """
    numbers = (op.combinations, len(op.confirmed), len(op.wrong), len(op.missing), sum(op.untested.values()))
    texts = [*(f"{number:,}" if number else "-" for number in numbers), f"{op.seconds:.2f}"]
    row = name.ljust(_NAME_WIDTH) + "".join(
        f"  {text:>{width}}" for text, width in zip(texts, _COLUMNS.values(), strict=True)
    )
    lines = [f"{row}  {'; '.join(_notes(op))}".rstrip()]
    lines += [f"  died: {_flat(text)}" for text in op.died]
    for rule in op.wrong:
        if not rule.follows:
            lines += [_known_line(rule)] if rule.known else _wrong_lines(rule, imports, folder)
    lines += _following_lines(op.wrong)
    for rule in op.unconfirmed[:_MOST_UNCONFIRMED]:
        lines += _wrong_lines(rule, imports, folder)
    if len(op.unconfirmed) > _MOST_UNCONFIRMED:
        lines.append(f"  and {len(op.unconfirmed) - _MOST_UNCONFIRMED:,} more unconfirmed in run.json")
    missing = folded(op.missing)
    lines += [_missing_line(one) for one in missing[:_MOST_MISSING]]
    if len(missing) > _MOST_MISSING:
        lines.append(f"  and {sum(one.rules for one in missing[_MOST_MISSING:]):,} more in run.json")
    return lines


def _missing_line(one: FoldedRule) -> str:
    where = f" and in {plural(one.overloads - 1, 'more overload')}" if one.overloads > 1 else ""
    return (
        f"  missing: {one.text} in {call_text(one.best)}{where}; {evidence_for(one.best)}; {saves_text(one.best)}: "
        f"{one.worth}"
    )


def _notes(op: OpRulesRecord) -> list[str]:
    notes = [] if is_tested(op) else ["nothing tested" if op.samples else NO_SAMPLES]
    counts = (
        (sum(rule.known for rule in op.wrong), "known"),
        (len(op.unconfirmed), "unconfirmed"),
        (len(op.inconclusive), "inconclusive"),
        (len(op.special), "not for special values"),
    )
    notes += [f"{count:,} {what}" for count, what in counts if count]
    if op.unreached:
        notes.append(f"no call reaches {places_text(op.unreached)}")
    reasons = not_tested(op)
    if reasons:
        more = len(reasons) - _MOST_REASONS
        shown = [_flat(reason) for reason in reasons[:_MOST_REASONS]]
        notes += ["not tested: " + "; ".join(shown) + (f"; {plural(more, 'more reason')}" if more > 0 else "")]
    return notes


def _wrong_lines(rule: WrongRuleRecord, imports: Sequence[str], folder: Path) -> list[str]:
    """Return the lines of a wrong rule, in the order of all messages: difference, call, evidence, command to replay."""
    lines = [f"  {rule.verdict} {first_line(rule.message)}", f"    in {state_text(rule)}"]
    evidence = rule.confirmed.text if rule.confirmed.unsure else evidence_text(1, rule.confirmed)
    lines.append(f"    {_flat(evidence)}")
    if rule.fingerprint:
        lines.append(f"    reproduce: {replay_text(rule.fingerprint, imports, folder=folder)}")
    return lines


def _following_lines(wrong: Iterable[WrongRuleRecord]) -> list[str]:
    """Return a line for each finding from which other rules follow: how many, and the first of them."""
    by_finding: dict[str, list[WrongRuleRecord]] = {}
    for rule in wrong:
        if rule.follows:
            by_finding.setdefault(rule.fingerprint, []).append(rule)
    return [
        f"  {name} makes {plural(len(rules), 'product')} wrong as well: {rule_text(rules[0])} on mesh {rules[0].mesh}"
        + (f", and {len(rules) - 1:,} more in run.json" if len(rules) > 1 else "")
        for name, rules in by_finding.items()
    ]


def _known_line(rule: WrongRuleRecord) -> str:
    return f"  known {rule.fingerprint} {rule.verdict} in {state_text(rule)}: {first_line(rule.message)}"


# ------------------------------------------------------------------------------------------------------------- totals
def total_lines(
    rules: RulesRecord, imports: Sequence[str] = (), folder: Path = DEFAULT_REPORTS, brief: bool = False
) -> list[str]:
    """Return the totals of the rule check, what was not tested and why, what is new, and the next steps.

    They fit a screen if they are ``brief``.
    """
    new = _new_lines(rules, _MOST_BRIEF if brief else _MOST_NEW)
    steps = [f"next: {step}" for step in _next_steps(rules, imports, folder)]
    return [*totals_block(rules, _MOST_BRIEF if brief else _MOST_TOTAL_REASONS), *new, *steps]


def quiet_lines(rules: RulesRecord, imports: Sequence[str] = (), folder: Path = DEFAULT_REPORTS) -> list[str]:
    """Return the wrong rules that are new, and one line of totals."""
    ops = rules.ops.values()
    counts = (
        (sum(len(op.confirmed) for op in ops), "confirmed"),
        (sum(len(op.wrong) for op in ops), "wrong"),
        (sum(rule.known for op in ops for rule in op.wrong), "of them known"),
        (sum(len(op.missing) for op in ops), "missing"),
    )
    new = [rule for op in ops for rule in op.wrong if not rule.known]
    lines = [line for rule in new if not rule.follows for line in _wrong_lines(rule, imports, folder)]
    return [*lines, f"{plural(len(ops), 'op')}: " + ", ".join(f"{count:,} {what}" for count, what in counts)]


def _new_lines(rules: RulesRecord, most: int) -> list[str]:
    """Return a line for each finding that is new."""
    by_name: dict[str, WrongRuleRecord] = {}
    for rule in (rule for op in rules.ops.values() for rule in op.wrong if not rule.known):
        by_name.setdefault(rule.fingerprint, rule)
    lines = [f"new: {name} {rule.verdict} in {state_text(rule)}" for name, rule in by_name.items()]
    return lines[:most] + ([f"new: {len(lines) - most:,} more, listed above"] if len(lines) > most else [])


def untested_reasons(rules: RulesRecord) -> Counter[str]:
    """Return the number of combinations without a verdict in all ops, by reason."""
    untested: Counter[str] = Counter()
    for op in rules.ops.values():
        untested.update(op.untested)
    return untested


def untested_beside_rules(run: RunRecord) -> list[UntestedRecord]:
    """Return the run's untested entries that the totals of level 1 do not already contain."""
    said = untested_reasons(run.rules) if run.rules is not None else Counter()
    return [entry for entry in run.untested if said[entry.reason] != entry.count]


def totals_block(rules: RulesRecord, most: int = _MOST_TOTAL_REASONS) -> list[str]:
    """Return the totals of the rule check, and what was not tested, with ``most`` reasons."""
    ops = list(rules.ops.values())
    meshes = ", ".join(rules.meshes) or "none"
    each = plural(rules.sizes, "size")
    lines = [f"rules of {plural(len(ops), 'op')} on mesh {meshes}, {rules.dtype}, {each}", f"  {_speed_text(rules)}"]
    flags = [rule.known for op in ops for rule in op.wrong]
    known = ", all known" if flags and all(flags) else f", {sum(flags):,} of them known" if any(flags) else ""
    counts: list[tuple[Sequence[int], str, str]] = [
        ([len(op.confirmed) for op in ops], "confirmed", ""),
        ([len(op.wrong) for op in ops], "wrong", known),
        ([len(op.unconfirmed) for op in ops], "accused, but unconfirmed", ""),
        ([len(op.missing) for op in ops], "missing", _saved_text(ops)),
        ([len(op.special) for op in ops], "true but for special values", ""),
        ([len(op.inconclusive) for op in ops], "inconclusive", ""),
    ]
    width = max(len(f"{sum(numbers):,}") for numbers, _, _ in counts)
    always = ("confirmed", "wrong") if rules.claims_only else ("confirmed", "wrong", "missing")
    for numbers, what, more in counts:
        if any(numbers) or what in always:
            where = f" in {plural(sum(map(bool, numbers)), 'op')}" if any(numbers) else ""
            lines.append(f"  {sum(numbers):>{width},} {what}{where}{more}")
    if rules.claims_only:
        lines.append("  missing rules were not looked for: claims only")
    return lines + _not_tested_lines(rules, most)


def _speed_text(rules: RulesRecord) -> str:
    rate = f", {rules.combinations / rules.seconds:,.0f} a second" if rules.seconds > 0 else ""
    return (
        f"{plural(rules.combinations, 'combination')} in {seconds_text(rules.seconds)} of checking{rate}, "
        f"{plural(rules.jobs, 'job')}; {seconds_text(rules.seconds_starting)} starting, "
        f"{seconds_text(rules.seconds_confirming)} confirming"
    )


def _saved_text(ops: Iterable[OpRulesRecord]) -> str:
    refused = sum(not rule.saves for op in ops for rule in op.missing)
    return f"; in {refused:,} of them DTensor refuses the call" if refused else ""


def _not_tested_lines(rules: RulesRecord, most: int) -> list[str]:
    ops = rules.ops
    untested = untested_reasons(rules)
    overloads = sum(len(op.not_testable) for op in ops.values())
    with_some = sum(bool(op.untested or op.not_testable) for op in ops.values())
    without = [name for name, op in ops.items() if not is_tested(op)]
    lines = []
    if untested or overloads:
        places = f" and {plural(overloads, 'overload')}" if overloads else ""
        number = plural(sum(untested.values()), "combination")
        lines.append(f"not tested: {number}{places} in {plural(with_some, 'op')}")
        reasons = _by_count(untested)
        width = max((len(f"{count:,}") for _, count in reasons), default=0)
        lines += [f"  {count:>{width},} {_flat(reason)}" for reason, count in reasons[:most]]
        if len(reasons) > most:
            lines.append(f"  and {plural(len(reasons) - most, 'more reason')} in run.json")
    if without:
        shown = ", ".join(without[:6]) + (f" and {len(without) - 6:,} more" if len(without) > 6 else "")
        lines.append(f"nothing tested in {plural(len(without), 'op')}: {shown}")
    if not ops:
        lines.append("nothing was tested: no op was checked")
    died = [(name, text) for name, op in ops.items() for text in op.died]
    if died:
        lines.append(
            f"died: {plural(len(died), 'combination')} ended a worker in {plural(len({n for n, _ in died}), 'op')}"
        )
        lines += [f"  {_flat(text if text.startswith(name) else f'{name}: {text}')}" for name, text in died[:most]]
        if len(died) > most:
            lines.append(f"  and {len(died) - most:,} more in run.json")
    return lines


def _next_steps(rules: RulesRecord, imports: Sequence[str], folder: Path) -> list[str]:
    ops = rules.ops.values()
    new = [rule for op in ops for rule in op.wrong if not rule.known]
    steps = []
    if not any(is_tested(op) for op in ops):
        steps.append("nothing was tested, so nothing is proved: see above why, then run again")
    if new:
        command = replay_text(new[0].fingerprint, imports, folder=folder)
        steps.append(
            f"{command} runs the first wrong rule again; fix it, or accept it: {command_text('gate --update', folder)}"
        )
    if any(op.unconfirmed for op in ops):
        steps.append("unconfirmed findings do not fail the gate; see the reason given for each")
    if any(op.missing for op in ops):
        steps.append(f"{command_text('report', folder)} shows every op's missing rules, and what each would save")
    elif not steps:
        steps.append("python -m verifier run, for what level 1 cannot see: redistribution, backward, the dispatcher")
    return steps
