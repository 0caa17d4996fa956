"""A derivation as lines of text, and as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec
from torch.distributed.tensor import Partial, Replicate

from verifier.core.wording import plural
from verifier.deriving.derive import Derived
from verifier.deriving.learning.learned import GradientPlacements, Learned, parts_text

__all__ = ["derivation_json", "derivation_lines"]

_MOST_SHOWN = 6
"""So many rules are told with the placements of gradients."""


def derivation_json(made: Derived) -> str:
    """Return a derivation as JSON: its rules, what none explains, the outcome of the checks, and the code."""
    return msgspec.json.format(msgspec.json.encode(_fields(made)), indent=2).decode()


def _fields(made: Derived) -> dict[str, object]:
    first, *others = made.learned
    return {
        "op": made.op,
        "passed": made.closed.passed,
        **_of_op(first),
        "in_gradient": [{"op": str(one.op), **_of_op(one)} for one in others],
        "not_derived": made.not_derived,
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


def _of_op(learned: Learned) -> dict[str, object]:
    """Return what was derived for one op."""
    return {
        "calls": len(learned.calls),
        "rules": [
            {
                "slots": rule.slots,
                "inputs": [str(getattr(part, "text", part)) for part in rule.inputs],
                "outputs": [str(getattr(part, "text", part)) for part in rule.outputs],
                "conditions": [test.text for test in rule.tests],
                "calls": rule.calls,
                "placements": rule.points,
            }
            for rule in learned.made.rules
        ],
        "gradients": [
            {
                "slots": one.rule.slots,
                "inputs": parts_text(one.rule.inputs),
                "outputs": parts_text(one.outputs),
                "conditions": [test.text for test in one.rule.tests],
                "cotangents": parts_text(one.cotangents),
                "gradients": _by_name(one),
            }
            for cotangent in (Replicate(), Partial())
            for one in learned.gradients(cotangent)
        ],
        "explained": learned.made.explained,
        "unexplained": [
            {"call": call.origin, "ndims": call.ndims, "inputs": [*map(str, inputs)]}
            for call, inputs in learned.made.unexplained
        ],
    }


def derivation_lines(made: Derived, out: Path | None) -> list[str]:
    """Return what came of a derivation; ``out`` is the file that the code is written to, if any."""
    closed = made.closed
    first, *others = made.learned
    gate = f"gate: exit status {closed.gate}; " if made.is_strategy else ""
    lines = [
        f"{made.op}: {_counted(first)}",
        *(f"  {one.op}, which runs in its gradient: {_counted(one)}" for one in others),
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
    lines += _gradients(first)
    left = [one for learned in made.learned for one in learned.made.unexplained]
    lines += [f"  not explained: {', '.join(map(str, i))} of {c.origin}" for c, i in left[:5]]
    if left and not made.op.startswith("aten."):
        lines.append("  more examples of these calls, with other numbers of dims, may explain what one of them shows")
    lines += [f"  missing: {one}" for one in closed.missing[:5]]
    lines += [f"  {name} runs in its gradient and has no strategy: {why}" for name, why in made.not_derived.items()]
    if not closed.passed:
        said = [f"  {line}" for line in closed.said.splitlines()]
        handler = [f"  DTensor runs code of its own in the place of {made.op}, whatever its strategy is"]
        told = [name for name in closed.without_strategy if name not in made.not_derived]
        lines += [*said, *map(_advice, told), *handler * made.has_handler]
        return [*lines, "not written: the code did not pass"]
    return [*lines, f"written: {out} and {out.with_name('test_' + out.name)}"] if out is not None else lines


def _gradients(learned: Learned) -> list[str]:
    """Return lines on how the gradients of the tensors are placed under each rule."""
    found = learned.gradients(Replicate())
    lines = []
    for one in found[:_MOST_SHOWN]:
        inputs, outputs = (", ".join(parts_text(some)) for some in (one.rule.inputs, one.outputs))
        conditions = f" if {' and '.join(test.text for test in one.rule.tests)}" if one.rule.tests else ""
        gradients = ", ".join(map(" ".join, _by_name(one).items()))
        lines.append(f"  gradients under {inputs} -> {outputs}{conditions}: {gradients}")
    left = len(found) - len(lines)
    return [*lines, *([f"  gradients under {left} more: --format json"] if left else [])]


def _by_name(one: GradientPlacements) -> dict[str, str]:
    return dict(zip(one.gradients, parts_text(tuple(one.gradients.values())), strict=True))


def _counted(learned: Learned) -> str:
    made = learned.made
    return (
        f"{plural(len(made.rules), 'rule')} from {plural(len(learned.calls), 'call')}, which explain {made.explained} "
        f"of {made.explained + len(made.unexplained)} placements that hold"
    )


def _advice(other: str) -> str:
    return f"  {other} runs as well, as in the gradient, and has no strategy: derive it first, and --import its file"
