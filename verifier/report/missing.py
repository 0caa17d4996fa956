"""Missing rules, folded: those that differ in the tensor dim alone, or in the overload, are one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from verifier.records.schema import MissingRuleRecord

__all__ = ["FoldedRule", "by_worth", "folded"]

_SHARD = re.compile(r"(?<![A-Za-z])S\((\d+)\)")
_PARTIAL = re.compile(r"(?<![A-Za-z])P\((\w+)\)")


@dataclass(frozen=True)
class FoldedRule:
    """Missing rules that differ in the tensor dim alone, or in the overload.

    Parameters
    ----------
    text
        The rule, as ``S(d), S(d) -> S(d) for d = 0, 1``; a rule that is alone as it is.
    best
        The one that saves most bytes.
    rules, overloads
        How many rules there are, and of how many overloads.
    """

    text: str
    best: MissingRuleRecord
    rules: int
    overloads: int

    @property
    def worth(self) -> str:
        """Why the rule is worth having, or is not."""
        inputs, outputs = self.best.input_placements, self.best.output_placements
        kinds = {kind for text in inputs for kind in _PARTIAL.findall(text)}
        sharded = any(_SHARD.search(text) for text in inputs)
        if kinds - {"sum", "avg"}:
            return f"seldom of use: few ops leave P({min(kinds - {'sum', 'avg'})}) behind"
        if not self.best.saves:
            return "worth having: without it, users have to redistribute"
        if kinds and not sharded:
            return "puts a reduction off, which a later op may need all the same"
        if any(_PARTIAL.search(text) for text in outputs):
            return "worth having if the result, which is reduced later, is smaller than what is gathered now"
        return "worth having: what it saves grows with the tensors, and nothing is left to do later"


def by_worth(rules: Iterable[MissingRuleRecord]) -> list[MissingRuleRecord]:
    """Return missing rules by saved bytes and collectives, most first; rules of refused calls come last."""
    return sorted(rules, key=lambda rule: (-rule.bytes_saved, -rule.collectives_saved, rule.op, _text(rule)))


def folded(rules: Iterable[MissingRuleRecord]) -> list[FoldedRule]:
    """Return missing rules without those that differ from another one in the dim or the overload alone.

    Those that save most bytes come first.
    """
    groups: dict[tuple[str, str, bool], list[MissingRuleRecord]] = {}
    for rule in by_worth(rules):
        groups.setdefault((_base(rule.op), _pattern(rule), bool(rule.saves)), []).append(rule)
    found = []
    for (_, pattern, _), same in groups.items():
        dims = sorted({_dim(rule) for rule in same})
        text = f"{pattern} for d = {', '.join(map(str, dims))}" if len(dims) > 1 else _text(same[0])
        found.append(FoldedRule(text, same[0], len(same), len({rule.op for rule in same})))
    return found


def _text(rule: MissingRuleRecord) -> str:
    return f"{', '.join(rule.input_placements) or '()'} -> {', '.join(rule.output_placements) or '()'}"


def _base(op: str) -> str:
    """Return the name that variants of an op have in common.

    >>> _base("aten.add_.Tensor"), _base("aten.add.out")
    ('add', 'add')
    """
    return op.split(".")[1].strip("_") if op.count(".") else op


def _dim(rule: MissingRuleRecord) -> int:
    """Return the first tensor dim that a rule names; -1 if it names none."""
    found = _SHARD.search(_text(rule))
    return int(found[1]) if found else -1


def _pattern(rule: MissingRuleRecord) -> str:
    """Return a rule with its first tensor dim as ``d``, and others as ``d + 1``."""
    first = _dim(rule)

    def relative(match: re.Match[str]) -> str:
        step = int(match[1]) - first
        return f"S(d{f' {step:+d}'.replace('+', '+ ').replace('-', '- ') if step else ''})"

    return _SHARD.sub(relative, _text(rule))
