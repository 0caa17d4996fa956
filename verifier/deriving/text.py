"""A derivation as lines of text, and as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec

from verifier.core.wording import plural
from verifier.deriving.derive import Derived

__all__ = ["derivation_json", "derivation_lines"]


def derivation_json(made: Derived) -> str:
    """Return a derivation as JSON: its rules, what none explains, the outcome of the checks, and the code."""
    return msgspec.json.format(msgspec.json.encode(_fields(made)), indent=2).decode()


def _fields(made: Derived) -> dict[str, object]:
    return {
        "op": made.op,
        "passed": made.closed.passed,
        "calls": len(made.calls),
        "rules": [
            {
                "slots": rule.slots,
                "inputs": [str(getattr(part, "text", part)) for part in rule.inputs],
                "outputs": [str(getattr(part, "text", part)) for part in rule.outputs],
                "conditions": [test.text for test in rule.tests],
                "calls": rule.calls,
                "placements": rule.points,
            }
            for rule in made.made.rules
        ],
        "explained": made.made.explained,
        "unexplained": [
            {"call": call.origin, "ndims": call.ndims, "inputs": [*map(str, inputs)]}
            for call, inputs in made.made.unexplained
        ],
        "confirmed": made.closed.confirmed,
        "wrong": made.closed.wrong,
        "missing": made.closed.missing,
        "gate": made.closed.gate,
        "mutants": None
        if made.closed.mutants is None
        else {
            "tried": made.closed.mutants.tried,
            "survivors": made.closed.mutants.survivors,
            "disagrees": made.closed.mutants.disagrees,
        },
        "seconds": made.seconds,
        "code": made.code if made.closed.passed else "",
        "test": made.test if made.closed.passed else "",
    }


def derivation_lines(made: Derived, out: Path | None) -> list[str]:
    """Return what came of a derivation; ``out`` is the file that the code is written to, if any."""
    closed, all_ = made.closed, made.made.explained + len(made.made.unexplained)
    gate = f"gate: exit status {closed.gate}; " if made.is_strategy else ""
    lines = [
        f"{made.op}: {plural(len(made.made.rules), 'rule')} from {plural(len(made.calls), 'call')}, which explain "
        f"{made.made.explained} of {all_} placements that hold",
        f"  rules: {closed.confirmed} confirmed, {closed.wrong} wrong, {len(closed.missing)} of the derived missing"
        if made.is_strategy
        else f"  tests on ranks: {closed.confirmed} passed, {closed.wrong} failed",
        f"  {gate}{made.seconds['deriving']:.1f} s deriving, {made.seconds['checking']:.1f} s checking",
    ]
    if closed.mutants is not None:
        count, survivors = closed.mutants.tried, closed.mutants.survivors
        lines.append(f"  changes of single lines: {count - len(survivors)} of {count} are refuted by the calls")
        lines += [f"  told by no call: {one}" for one in survivors[:5]]
        lines += [f"  the code does not say what was derived: {one}" for one in closed.mutants.disagrees[:5]]
    lines += [f"  not explained: {', '.join(map(str, i))} of {c.origin}" for c, i in made.made.unexplained[:5]]
    if made.made.unexplained and not made.op.startswith("aten."):
        lines.append("  more examples of these calls, with other numbers of dims, may explain what one of them shows")
    lines += [f"  missing: {one}" for one in closed.missing[:5]]
    if not closed.passed:
        said = [f"  {line}" for line in closed.said.splitlines()]
        return [*lines, *said, *map(_advice, closed.without_strategy), "not written: the code did not pass"]
    return [*lines, f"written: {out} and {out.with_name('test_' + out.name)}"] if out is not None else lines


def _advice(other: str) -> str:
    return f"  {other} runs as well, as in the gradient, and has no strategy: derive it first, and --import its file"
