"""What changed between two rule tables: rules lost, gained, become wrong, mended, and claimed at other calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from verifier.core.wording import plural
from verifier.records.rule_table import ClaimedRule, OverloadTable, RuleTable

__all__ = [
    "Change", "Changes", "RuleChange", "changes_between", "changes_json", "changes_lines", "changes_markdown",
    "where_text",
]  # fmt: skip

_SHOWN = 3


class Change(StrEnum):
    """How a rule changed.

    Attributes
    ----------
    LOST
        It held at calls at which it is not claimed any more: DTensor communicates there, or refuses.
    WRONG
        It is wrong at calls at which it was right, or was not claimed.
    OUTPUTS
        For the same inputs, other outputs are claimed at calls at which it held: DTensor does not communicate there.
    GAINED
        It holds at calls at which it was not claimed.
    MENDED
        It was wrong at calls at which it is right now, or is not claimed any more.
    """

    LOST = "lost"
    WRONG = "wrong"
    OUTPUTS = "outputs"
    GAINED = "gained"
    MENDED = "mended"


@dataclass(frozen=True)
class RuleChange:
    """One change of one rule.

    Parameters
    ----------
    calls
        The calls at which it changed.
    elsewhere
        Whether the rule is claimed at other calls before and after, so that its condition has changed.
    """

    op: str
    rule: str
    kind: Change
    calls: tuple[str, ...]
    elsewhere: bool


@dataclass(frozen=True)
class Changes:
    """All changes between two tables, in the order of their ops.

    Parameters
    ----------
    torch
        The torch versions of the two tables.
    questions
        How the questions of the tables differ, as text; calls that only one table has are not compared.
    not_compared
        Overloads that only one table has, with the calls of which nothing was compared.
    registered
        Overloads whose rules are registered otherwise: how they were, and how they are.
    unregistered
        Overloads that had rules and have none, and of which no call was compared: how they were registered.
    newly_registered
        Overloads that had no rules and have some, and of which no call was compared: how they are registered.
    keys
        Arguments that the key of DTensor's cache leaves out: overload, argument, and whether it does so now.
    """

    torch: tuple[str, str]
    questions: tuple[str, ...]
    rules: tuple[RuleChange, ...]
    not_compared: tuple[str, ...]
    registered: tuple[tuple[str, str, str], ...]
    keys: tuple[tuple[str, str, bool], ...]
    unregistered: tuple[tuple[str, str], ...] = ()
    newly_registered: tuple[tuple[str, str], ...] = ()

    def fails(self, kinds: Collection[Change]) -> bool:
        """Return whether any change is of one of ``kinds``.

        A key that leaves out an argument now is wrong. An overload that has no rules any more has lost them.
        """
        left_out = Change.WRONG in kinds and any(now for _, _, now in self.keys)
        lost = Change.LOST in kinds and bool(self.unregistered)
        return left_out or lost or any(change.kind in kinds for change in self.rules)


def changes_between(before: RuleTable, after: RuleTable) -> Changes:
    """Return what changed from one table to another, at the calls that both have."""
    old, new = before.question(), after.question()
    questions = tuple(f"{name} {old[name]} and {new[name]}" for name in old if old[name] != new[name])
    rules: list[RuleChange] = []
    keys, alone = [], []
    compared = set[str]()
    for op in sorted(before.overloads.keys() | after.overloads.keys()):
        one, other = before.overloads.get(op), after.overloads.get(op)
        if one is None or other is None or not set(one.calls) & set(other.calls):
            alone.append(op)
            continue
        compared.add(op)
        rules += _of_overload(op, one, other)
        keys += [(op, name, name in other.left_out) for name in sorted({*one.left_out} ^ {*other.left_out})]
    was, now = (
        {**table.registered, **{op: table.overloads[op].registered for op in compared}} for table in (before, after)
    )
    return Changes(
        (before.torch, after.torch), questions, tuple(rules), tuple(alone),
        tuple((op, was[op], now[op]) for op in sorted(was.keys() & now.keys()) if was[op] != now[op]), tuple(keys),
        tuple((op, was[op]) for op in sorted(was.keys() - now.keys())),
        tuple((op, now[op]) for op in sorted(now.keys() - was.keys())),
    )  # fmt: skip


def _of_overload(op: str, before: OverloadTable, after: OverloadTable) -> Iterator[RuleChange]:
    common = set(before.calls) & set(after.calls)
    rules = sorted(before.rules.keys() | after.rules.keys())
    states = {rule: tuple(_states(table, rule, common) for table in (before, after)) for rule in rules}
    now = {(_inputs(rule), call): rule for rule, (_, new) in states.items() for call in new}
    lost = {(_inputs(rule), call) for rule, (old, new) in states.items() for call in old if call not in new}
    for rule, (old, new) in states.items():
        found: dict[tuple[Change, str], list[str]] = {}
        for call in (call for call in before.calls if call in common):
            kind, text, key = _change(old.get(call, ""), new.get(call, "")), rule, (_inputs(rule), call)
            if kind is Change.GAINED and key in lost:
                continue  # told with the rule that it takes the place of
            if kind is Change.LOST and (other := now.get(key)):
                verdict = states[other][1][call]
                kind, text = Change.OUTPUTS, f"{rule}, now {other.removeprefix(_inputs(rule)).strip()}, {verdict}"
            if kind:
                found.setdefault((kind, text), []).append(call)
        for kind, text in sorted(found, key=lambda one: [*Change].index(one[0])):
            yield RuleChange(op, text, kind, tuple(found[kind, text]), bool(old) and bool(new))


def _inputs(rule: str) -> str:
    return rule.partition(" ->")[0]


def _states(table: OverloadTable, rule: str, common: Collection[str]) -> dict[str, str]:
    """Return what came of a rule at each common call at which it is claimed; of several verdicts wrong counts."""
    claimed = table.rules.get(rule, ClaimedRule())
    states: dict[str, str] = {}
    for verdict in ("inconclusive", "special", "unconfirmed", "confirmed", "wrong"):
        states |= {table.calls[number]: verdict for number in getattr(claimed, verdict)}
    return {call: verdict for call, verdict in states.items() if call in common}


def _change(before: str, after: str) -> Change | None:
    """Return how a rule changed at one call: each state is a verdict, or empty if the rule is not claimed."""
    if (before == "wrong") != (after == "wrong"):
        return Change.WRONG if after == "wrong" else Change.MENDED
    if bool(before) != bool(after):
        return Change.LOST if before else Change.GAINED
    return None


# ---------------------------------------------------------------------------------------------------------------- text
def changes_lines(changes: Changes) -> Iterator[str]:
    """Yield the changes as lines of text, the worst kinds first, then the counts."""
    for kind in Change:
        for change in changes.rules:
            if change.kind is kind:
                yield f"{kind:<7} {change.op}: {change.rule}"
                yield f"        {where_text(change)}"
        yield from (f"{kind:<7} {op}: {text}" for op, text in _of_registration(changes, kind))
    for op, name, now in changes.keys:
        told, does = (Change.WRONG, "leaves out") if now else (Change.MENDED, "has")
        yield f"{told:<7} {op}: the key of DTensor's cache {does} {name}"
    yield from _notes(changes)


def _of_registration(changes: Changes, kind: Change) -> Iterator[tuple[str, str]]:
    """Yield each overload that has lost or gained all its rules, and what is to be said of it."""
    if kind is Change.LOST:
        yield from ((op, f"all rules; registered before: {how}") for op, how in changes.unregistered)
    elif kind is Change.GAINED:
        yield from ((op, f"its first rules; registered now: {how}") for op, how in changes.newly_registered)


def changes_markdown(changes: Changes) -> str:
    """Return the changes as a table, or one line if there are none."""
    rows = [f"| {change.kind} | `{change.op}` | `{change.rule}` | {where_text(change)} |" for change in changes.rules]
    rows += [f"| {kind} | `{op}` | | {text} |" for kind in Change for op, text in _of_registration(changes, kind)]
    table = ["| change | overload | rule | calls |", "| --- | --- | --- | --- |", *rows, ""] if rows else []
    return "\n".join([*table, *_notes(changes)]) + "\n"


def changes_json(changes: Changes) -> str:
    """Return everything that is known of the changes, as JSON."""
    return json.dumps(
        {
            "torch": changes.torch,
            "questions": changes.questions,
            "rules": [
                {"change": c.kind, "op": c.op, "rule": c.rule, "calls": c.calls, "condition": c.elsewhere}
                for c in changes.rules
            ],
            "keys": [{"op": op, "argument": name, "left_out": now} for op, name, now in changes.keys],
            "registered": [{"op": op, "before": old, "after": new} for op, old, new in changes.registered],
            "unregistered": [{"op": op, "before": how} for op, how in changes.unregistered],
            "newly_registered": [{"op": op, "after": how} for op, how in changes.newly_registered],
            "not_compared": changes.not_compared,
        },
        indent=2,
    )


def where_text(change: RuleChange) -> str:
    """Return at how many calls a rule changed, and the first of them."""
    shown = "; ".join(change.calls[:_SHOWN])
    more = f"; {len(change.calls) - _SHOWN} more" if len(change.calls) > _SHOWN else ""
    condition = ", its condition changed: claimed at other calls before and after" if change.elsewhere else ""
    return f"at {plural(len(change.calls), 'call')}{condition}: {shown}{more}"


def _notes(changes: Changes) -> Iterator[str]:
    if changes.registered:
        (op, old, new), *others = changes.registered
        more = f", and {plural(len(others), 'other overload')}" if others else ""
        yield f"registered otherwise: {op}, {old} before, {new} now{more}"
    if changes.questions:
        yield f"the tables answer different questions ({'; '.join(changes.questions)}): only common calls are compared"
    if changes.not_compared:
        shown = ", ".join(changes.not_compared[:_SHOWN])
        more = f" and {len(changes.not_compared) - _SHOWN} more" if len(changes.not_compared) > _SHOWN else ""
        yield f"in one table only, or without a common call: {shown}{more}"
    counts = Counter(change.kind for change in changes.rules)
    versions = " to ".join(dict.fromkeys(changes.torch))
    told = ", ".join(f"{counts[kind]} {kind}" for kind in Change if counts[kind]) or "no rule changed"
    for some, what in (
        (changes.unregistered, "lost all rules"),
        (changes.newly_registered, "gained rules, with none before"),
    ):
        told += f"; {plural(len(some), 'overload')} {what}" if some else ""
    yield f"torch {versions}: {told}"
