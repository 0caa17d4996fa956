"""The gate on one's own strategies: verify at both levels what the imports register, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import typer

from verifier.campaign.plan import Plan
from verifier.campaign.recorded import load_ahead, record
from verifier.campaign.request import Request, make_plan
from verifier.cli.common import command_line, consoles, meanwhile, write_out
from verifier.cli.options import Detail
from verifier.cli.progress import RulesProgress
from verifier.cli.work import estimate, progress, without_those_of_torch
from verifier.core.errors import SamplesError
from verifier.core.verdict import VerdictKind
from verifier.core.wording import CORRECT_SAMPLES, NO_SAMPLES, plural
from verifier.execution.imports import (
    definitions_of_rules,
    registered_by,
    run_imports_with_warnings,
)
from verifier.gate.baseline import Baseline
from verifier.gate.changed import Changed, recorded_since
from verifier.gate.decision import without_special
from verifier.gate.evidence import Evidence, NoEvidence, proves
from verifier.gate.question import Question, imports_text
from verifier.meshes.torchrun.controller import Cluster
from verifier.planning.budgets import OWN_RULES
from verifier.processes.answers import ANSWERS
from verifier.records.schema import RunRecord
from verifier.rules.campaign.lost import lost_rules
from verifier.rules.campaign.recorded import record_rules
from verifier.rules.campaign.request import RulesPlan, RulesRequest, errors_of_samples, make_rules_plan
from verifier.rules.campaign.table import TableBuilder
from verifier.rules.claims import GROWS
from verifier.runs.estimate import estimate_of_rules
from verifier.runs.store import RunStore

__all__ = ["kept_off_ranks", "verify_own_rules", "why_unproved"]

MANY = 8
"""If an import changes the rules of more ops, as by a function that their strategies share, each is checked less."""
SAMPLES_OF_MANY, CASES_OF_MANY = 3, 2


def verify_own_rules(
    imports: Sequence[str],
    meshes: Sequence[str],
    store: RunStore,
    known: Baseline,
    path: Path,
    rank_memory: str | None,
    cluster: Cluster | None,
    changed: Changed | None = None,
    dry_run: bool = False,
    detail: Detail = Detail.SCREEN,
    jobs: int | None = None,
    update: bool = False,
) -> Evidence:
    """Verify every op for which ``imports`` register a rule; return the two runs that were made as evidence.

    An op with a new finding at level 1 is not tried at level 2, which would show the same wrong rule again; of many ops
    none is then. For ``update`` all are tried: when a finding of level 1 is accepted, they would be tried next.
    A finding is left out if torch alone shows it, too, and no rule of the imports can have caused it.

    Parameters
    ----------
    known
        The baseline, which was read from ``path``.
    changed
        Says which strategies differ from a revision. Only their ops are verified; for the others, the runs that still
        count are the evidence, if there are any.
    jobs
        How many trials of level 2 run at a time; None for the default.
    update
        Whether what is found is to be accepted.

    Raises
    ------
    ValueError
        If the imports register nothing.
    """
    run_imports_with_warnings(imports)
    ops = registered_by(imports)
    if not ops:
        raise ValueError(
            f"{imports_text(imports)} registers no sharding rule, so there is nothing to verify; to judge what was "
            "recorded with it, name the ops: gate OP"
        )
    if changed is None:
        with ANSWERS.sharing():
            return _verify(
                imports, ops, meshes, store, known, path, rank_memory, cluster, dry_run, detail, jobs, update
            )
    definitions = definitions_of_rules()
    changed.know_rules(start for starts in definitions.values() for start in starts)
    differing = tuple(op for op in ops if changed.is_changed(definitions.get(op, ())))
    others = tuple(op for op in ops if op not in differing)
    recorded = recorded_since(changed, store, known, others, meshes)
    if not differing:
        return recorded
    with ANSWERS.sharing():
        made = _verify(imports, differing, meshes, store, known, path, rank_memory, cluster, dry_run, detail, jobs)
    left_out = (f"{plural(len(others), 'op')} whose strategies do not differ from {changed.ref}: {', '.join(others)}",)
    return replace(
        made,
        runs=(*made.runs, *recorded.runs),
        left_out=(*made.left_out, *(left_out if others else ()), *recorded.left_out),
    )


def _verify(
    imports: Sequence[str],
    ops: Sequence[str],
    meshes: Sequence[str],
    store: RunStore,
    known: Baseline,
    path: Path,
    rank_memory: str | None,
    cluster: Cluster | None,
    dry_run: bool,
    detail: Detail,
    jobs: int | None,
    update: bool = False,
) -> Evidence:
    wrong_samples = errors_of_samples(ops)
    if len(wrong_samples) == len(ops):
        raise SamplesError("; ".join(dict.fromkeys(wrong_samples.values())))
    asked, ops = ops, tuple(op for op in ops if op not in wrong_samples)
    request = RulesRequest(imports=imports, command=command_line(), claims_only=True, only=ops, jobs=jobs)
    if len(ops) > MANY:
        request = replace(request, max_samples=SAMPLES_OF_MANY)
    plan = replace(make_rules_plan(request, known), answers=ANSWERS.folder)
    if dry_run:
        _say_estimates(plan, _plan(imports, ops, meshes, known, path, rank_memory, cluster, jobs), store)
    shown = [] if detail is Detail.QUIET else [RulesProgress(consoles()[1], plan)]
    table = TableBuilder(plan)
    campaign = _plan(imports, ops, meshes, known, path, rank_memory, cluster, jobs)
    load_ahead(campaign)  # the workers of level 1 are loading, too
    rules = record_rules(plan, store, *shown, table=table) if plan.targets else None
    lost = meanwhile(lambda: lost_rules(plan, table.made()) if rules is not None and rules.complete else ())
    of_torch: tuple[str, ...] = ()
    if rules is not None:
        rules, of_torch = without_those_of_torch(rules, store)
    accused = () if update else _accused(rules)
    interrupted = rules is not None and not rules.complete
    left = tuple(ops) if interrupted else kept_off_ranks(ops, accused)
    campaign = _without(campaign, left)
    ANSWERS.read()
    on_meshes = record(campaign, store, progress(detail)) if campaign.selected else None
    if on_meshes is not None:
        on_meshes, also = without_those_of_torch(on_meshes, store)
        of_torch += also
    runs = [run for run in (on_meshes, rules) if run is not None]
    left_out = [f"{op} on ranks: not tried, because level 1 shows that its rules are wrong" for op in accused]
    others = [op for op in left if op not in accused]
    if others:
        why = "level 1 was interrupted" if interrupted else "of what level 1 shows"
        left_out.append(f"{plural(len(others), 'other op' if accused else 'op')} on ranks: not tried, because {why}")
    growing = [] if rules is None or rules.rules is None else [
        op for op, found in rules.rules.ops.items() if GROWS in found.untested
    ]  # fmt: skip
    left_out += [f"{op} at level 1: {GROWS}" for op in growing]
    left_out += of_torch
    question = Question(tuple(asked), tuple(map(str, campaign.meshes)), tuple(imports))
    unproved = {op: why for op in ops if op not in others and (why := why_unproved(op, runs))}
    unanswered = [NoEvidence(why, CORRECT_SAMPLES) for why in wrong_samples.values()]
    if len(unproved) == len(ops):
        unanswered += [NoEvidence(f"{op} {why}", _remedy(op, why)) for op, why in unproved.items()]
    else:
        left_out = [*(f"{op} {why}" for op, why in unproved.items()), *left_out]
    return Evidence(question, tuple(runs), tuple(unanswered), tuple(left_out), lost=lost.result())


def _say_estimates(rules: RulesPlan, campaign: Plan, store: RunStore) -> NoReturn:
    targets = [target.name for target in rules.targets]
    write_out(f"{estimate_of_rules(store, targets, rules.header.meshes, rules.jobs)}\n{estimate(campaign, store)}\n")
    raise typer.Exit(0)


def kept_off_ranks(ops: Sequence[str], accused: Collection[str]) -> tuple[str, ...]:
    """Return the ops that are not tried on ranks: those that level 1 has accused, and with them all others of many."""
    return tuple(op for op in ops if op in accused or (accused and len(ops) > MANY))


def _accused(rules: RunRecord | None) -> tuple[str, ...]:
    """Return the ops with a new finding at level 1."""
    found = [] if rules is None else without_special(rules).findings
    return tuple(sorted({finding.op for finding in found if not finding.known}))


def _plan(
    imports: Sequence[str],
    ops: Sequence[str],
    meshes: Sequence[str],
    known: Baseline,
    path: Path,
    rank_memory: str | None,
    cluster: Cluster | None,
    jobs: int | None,
) -> Plan:
    request = Request(
        meshes=meshes, imports=imports, command=command_line(), baseline=str(path), profile=OWN_RULES,
        max_examples=None if len(ops) <= MANY else CASES_OF_MANY, rank_memory=rank_memory, only=ops, jobs=jobs,
    )  # fmt: skip
    return make_plan(request, known, cluster)


def _without(plan: Plan, left: Sequence[str]) -> Plan:
    """Return the plan without the ops in ``left``."""
    selected = {
        name: tuple(op for op in ops if not any(plan.families[name].covers((op,), one) for one in left))
        for name, ops in plan.selected.items()
    }
    selected = {name: ops for name, ops in selected.items() if ops}
    return replace(plan, selected=selected)


def _remedy(op: str, why: str) -> str:
    nothing = "nothing that the imports register was verified"
    if why != NO_SAMPLES:
        return nothing
    return f'{nothing}; add @verifier.samples("{op}") to the file, above a function that yields tuples of arguments'


def why_unproved(op: str, runs: Sequence[RunRecord]) -> str:
    """Return why no run proves anything about an op; empty if one does.

    A trial that fails proves something only if a finding tells of it: torch may fail in the same way without the rules.
    Where level 1 has refuted a rule that ranks did not show wrong, only what passes on ranks proves something.
    """
    refuted = any(
        rules.op == op for run in runs if run.rules for one in run.rules.ops.values() for rules in one.unconfirmed
    )
    counts = [run.counts_by_op.get(op, {}) for run in runs if not (refuted and run.rules)]
    told = any(op in (finding.op, finding.rule.partition(":")[0]) for run in runs for finding in run.findings)
    if any(one.get(VerdictKind.PASS) or (told and proves(one)) for one in counts):
        return ""
    tried = sum(sum(one.values()) for one in counts)
    if any(map(proves, counts)):
        return f"is not verified: none of its {tried} trials and rules passes, and what fails is not about its rules"
    if tried:
        return f"is not verified: all of its {tried} trials and rules are unsupported or inconclusive"
    reasons = {rules.not_testable[op]: None for run in runs if run.rules for rules in run.rules.ops.values()
               if op in rules.not_testable}  # fmt: skip
    return f"is not verified: {next(iter(reasons))}" if reasons else NO_SAMPLES
