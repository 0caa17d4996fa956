"""The rules that torch's own strategies claim, and that hold, and that those of imports claim no more."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from verifier.gate.rule_changes import Change, RuleChange, changes_between
from verifier.records.rule_table import ClaimedRule, RuleTable
from verifier.rules.campaign.request import RulesPlan
from verifier.rules.campaign.table import TableBuilder
from verifier.rules.campaign.work import WorkItem, check_target, number_of_parts, preparation
from verifier.rules.campaign.workers import Finished, Part, WorkerSet
from verifier.rules.claims import GROWS
from verifier.rules.results import SampleReport
from verifier.rules.samples import Target

__all__ = ["lost_rules"]

OF_TORCH = ("aten.", "prims.")
"""The namespaces of ops that torch has without any import."""


def lost_rules(plan: RulesPlan, now: RuleTable) -> tuple[RuleChange, ...]:
    """Return the rules that torch alone claims at the calls of ``plan``, and that hold, and that are claimed no more.

    Workers without the imports say what torch claims, at one size of each call. Where a rule seems lost, the op is
    asked again, at the inputs of torch's rules, because ``now`` may have asked a strategy that lists no rules at some
    inputs only. What is still lost is then tried, because what torch claims may be wrong. An op whose check does not
    end, or whose strategy is not asked, is not compared. Rules are those of one mesh dim: products of them on two are
    sampled, and follow. Calls with a dim that leaves a rank empty are not compared, because DTensor itself takes shards
    of such dims away from some ways to register a strategy, ``register_sharding`` among them.

    Parameters
    ----------
    now
        What the check of ``plan`` found with the imports.
    """
    flat = tuple(mesh for mesh in plan.check.meshes if mesh.ndim == 1)
    check = replace(plan.check, meshes=flat, beyond=(), sizes=1, samples_called_again=0, tried=False)
    plan = replace(plan, check=check)
    targets = [target for target in plan.targets if _op(target).startswith(OF_TORCH) and _op(target) in now.overloads]
    before = _claimed(plan, targets, alone=True)
    seem = {change.op for change in _lost(before, now)}
    again = [target for target in targets if _op(target) in seem]
    if not again:
        return ()
    every = frozenset(_inputs_of(rule) for op in seem for rule in before.overloads[op].rules)
    after = _claimed(_asking(plan, every), again, alone=False)
    lost = {(one.op, one.rule) for one in _lost(before, after) if one.op in seem}
    if not lost:
        return ()
    left = [target for target in again if _op(target) in {op for op, _ in lost}]
    tried = _asking(plan, frozenset(_inputs_of(rule) for _, rule in lost))
    held = _claimed(replace(tried, check=replace(tried.check, tried=True)), left, alone=True)
    return tuple(one for one in _lost(held, after) if (one.op, one.rule) in lost)


def _asking(plan: RulesPlan, inputs: frozenset[tuple[str, ...]]) -> RulesPlan:
    """Return the plan that asks at these inputs alone."""
    return replace(plan, check=replace(plan.check, asked=inputs))


def _inputs_of(rule: str) -> tuple[str, ...]:
    """Return the input placements of a rule's text; indices that DTensor masks are replicated before.

    >>> _inputs_of("S(0), _S(1, 2), MaskP(sum) -> S(0)")
    ('S(0)', '_S(1, 2)', 'R')
    """
    inputs = re.split(r", (?![^(]*\))", rule.partition(" -> ")[0])
    return tuple("R" if one.startswith("MaskP") else one for one in inputs)


def _op(target: Target) -> str:
    """Return the overload of which the target has calls: one that an import registers is named as overload."""
    return target.overload or target.name


def _lost(before: RuleTable, after: RuleTable) -> list[RuleChange]:
    """Return the rules that hold before, and that are not claimed after."""
    held = copy(before)
    held.overloads = {op: copy(overload) for op, overload in before.overloads.items()}
    for overload in held.overloads.values():
        kept = {text: ClaimedRule(confirmed=rule.confirmed) for text, rule in overload.rules.items()}
        overload.rules = {text: rule for text, rule in kept.items() if rule.confirmed}
    return [change for change in changes_between(held, after).rules if change.kind is Change.LOST]


def _claimed(plan: RulesPlan, targets: Sequence[Target], alone: bool) -> RuleTable:
    """Return what DTensor claims in workers with the imports of ``plan``, or ``alone`` without any."""
    builder = TableBuilder(plan)
    parts = number_of_parts(len(targets))
    reports: list[dict[int, SampleReport]] = [{} for _ in targets]
    finished = Counter[int]()
    died = set[int]()
    if targets:
        answers = "" if alone else plan.answers
        items = [
            WorkItem(target, plan.samples, plan.check, part, parts, answers)
            for target in targets
            for part in range(parts)
        ]
        imports = () if alone else plan.header.imports
        jobs = max(1, min(plan.jobs, len(items)))
        with WorkerSet(jobs, imports, prepare=preparation(imports), alone=alone) as workers:
            for outcome in workers.run(items, check_target):
                index, part = divmod(outcome.item, parts)
                if isinstance(outcome, Part):
                    reports[index][outcome.ordinal * parts + part] = outcome.result
                elif isinstance(outcome, Finished):
                    finished[index] += 1
                else:
                    died.add(index)
    for index, found in enumerate(reports):
        asked = not any(GROWS in report.untested for report in found.values())
        if finished[index] == parts and index not in died and asked:
            builder.take((found[number] for number in sorted(found) if not found[number].short), None)
    return builder.made()
