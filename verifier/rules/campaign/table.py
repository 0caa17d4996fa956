"""Makes the rule table from what came of each sample."""

from __future__ import annotations

import os
from collections.abc import Iterable

from verifier.core.ops import resolve
from verifier.core.versions import versions
from verifier.records.rule_table import TABLE_FORMAT, ClaimedRule, OverloadTable, RuleTable
from verifier.records.schema import OpRulesRecord
from verifier.rules.campaign.request import RulesPlan
from verifier.rules.results import Rule, SampleReport
from verifier.torch_internals.amending.propagation import rule_function
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.registries import registries_of_rules

__all__ = ["TableBuilder"]

_KINDS = ("handler", "rule", "strategy", "strategy for one mesh dim")


class TableBuilder:
    """Collects what the samples of each op say of its overloads.

    Parameters
    ----------
    plan
        The rule check whose samples are collected.
    """

    def __init__(self, plan: RulesPlan) -> None:
        self._plan = plan
        self._overloads: dict[str, OverloadTable] = {}
        self._numbers: dict[tuple[str, str], int] = {}

    def take(self, reports: Iterable[SampleReport], record: OpRulesRecord | None) -> None:
        """Take the samples of one op; ``record`` says what ranks bear out, if any were asked."""
        asked = ((), ()) if record is None else (record.wrong, record.unconfirmed)
        refuted, withdrawn = ({_key(one) for one in some} for some in asked)
        for report in reports:
            if report.not_testable or not report.call:
                continue
            overload = self._overloads.get(report.op)
            if overload is None:
                overload = self._overloads[report.op] = OverloadTable(_registered(report.op), [], [], {})
            call = self._call(report.op, report.call, overload)
            overload.left_out = sorted({*overload.left_out, *(one.left_out for one in report.stale)})
            for wrong in report.wrong:
                unsure = (wrong.rule, wrong.fails) in withdrawn and (wrong.rule, wrong.fails) not in refuted
                text = _text(wrong.rule) if wrong.rule.outputs else f"{_text(wrong.rule)}fails: {wrong.message}"
                _note(overload, text, "unconfirmed" if unsure else "wrong", call)
            for rule in report.confirmed:
                _note(overload, _text(rule), "confirmed", call)
            for rule in report.inconclusive:
                _note(overload, _text(rule), "inconclusive", call)
            for special in report.special:
                _note(overload, _text(special.rule), "special", call)

    def _call(self, op: str, text: str, overload: OverloadTable) -> int:
        number = self._numbers.get((op, text))
        if number is None:
            number = self._numbers[op, text] = len(overload.calls)
            overload.calls.append(text)
        return number

    def made(self) -> RuleTable:
        """Return the table, with everything in a fixed order."""
        plan, header = self._plan, self._plan.header
        for overload in self._overloads.values():
            overload.rules = {text: overload.rules[text] for text in sorted(overload.rules)}
            for rule in overload.rules.values():
                for name in rule.__struct_fields__:
                    setattr(rule, name, sorted(set(getattr(rule, name))))
        return RuleTable(
            TABLE_FORMAT, versions()["torch"], list(header.meshes), header.dtypes[0], plan.samples.sizes,
            plan.samples.max_samples, header.seed, list(header.imports),
            {op: _registered(op) for op in sorted({str(op) for registry in registries_of_rules() for op in registry})},
            {op: self._overloads[op] for op in sorted(self._overloads)},
        )  # fmt: skip


def _key(one: object) -> tuple[Rule, bool]:
    return Rule(one.op, tuple(one.input_placements), tuple(one.output_placements)), one.fails  # type: ignore[attr-defined]


def _text(rule: Rule) -> str:
    return f"{', '.join(rule.inputs)} -> {', '.join(rule.outputs)}"


def _note(overload: OverloadTable, text: str, verdict: str, call: int) -> None:
    rule = overload.rules.setdefault(text, ClaimedRule())
    setattr(rule, verdict, [*getattr(rule, verdict), call])


def _registered(name: str) -> str:
    """Return how the rules of an overload are registered, as ``strategy softmax_strategy, _math_ops.py``."""
    op = resolve(f"torch.ops.{name}")
    assert isinstance(op, OpOverload)
    kinds = [kind for kind, registry in zip(_KINDS, registries_of_rules(), strict=True) if op in registry]
    function = rule_function(op)
    if function is None:
        return kinds[0] if kinds else "decomposed into other ops"
    code = getattr(function, "__code__", None)
    where = f", {os.path.basename(code.co_filename)}" if code is not None else ""
    return f"{kinds[-1]} {getattr(function, '__qualname__', type(function).__name__)}{where}"
