"""The gate on one's own strategies: verify at both levels what the imports register, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from verifier.cli.work import estimate, progress
from verifier.core.verdict import Phase
from verifier.core.wording import NO_SAMPLES, plural
from verifier.execution.imports import (
    definitions_of_rules,
    exchanged_alone,
    registered_by,
    run_imports_with_warnings,
)
from verifier.execution.patches import BETWEEN_OPS
from verifier.findings.kernels import is_dtype_of_empty_shards
from verifier.findings.keys import Anywhere, ByMeshDim
from verifier.findings.script.render import run_script, without_imports
from verifier.findings.torchs_own import mended_beside_rules
from verifier.gate.baseline import Baseline
from verifier.gate.changed import Changed, recorded_since
from verifier.gate.decision import without_special
from verifier.gate.evidence import Evidence, NoEvidence, proves
from verifier.gate.question import Question, imports_text
from verifier.meshes.torchrun.controller import Cluster
from verifier.planning.budgets import OWN_RULES
from verifier.records.files import encode_record, write_atomically
from verifier.records.schema import FAILS, INTERRUPTED, FindingRecord, RunRecord
from verifier.rules.campaign.lost import lost_rules
from verifier.rules.campaign.recorded import record_rules
from verifier.rules.campaign.request import RulesPlan, RulesRequest, make_rules_plan
from verifier.rules.campaign.table import TableBuilder
from verifier.runs.estimate import estimate_of_rules
from verifier.runs.store import RunStore

__all__ = ["explained", "is_caused_by_rule_of", "kept_off_ranks", "verify_own_rules"]

MANY = 8
"""If an import changes the rules of more ops, as by a function that their strategies share, each is checked less."""
SAMPLES_OF_MANY, CASES_OF_MANY = 3, 2
MOST_LEFT = 6
"""After so many findings that nothing but the imports explains, no others are tried without the imports."""
MOST_OF_EXCHANGED = 100
"""The same, if the imports exchange code that rules of torch run."""
_BY_RULES = (Phase.FORWARD, Phase.GATHER, Phase.INPUTS)
"""The phases of a trial that show the rules of its op, and not those of other ops."""


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
) -> Evidence:
    """Verify every op for which ``imports`` register a rule; return the two runs that were made as evidence.

    An op with a new finding at level 1 is not tried at level 2, which would show the same wrong rule again; of many ops
    none is then.
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
        return _verify(imports, ops, meshes, store, known, path, rank_memory, cluster, dry_run, detail, jobs)
    definitions = definitions_of_rules()
    differing = tuple(op for op in ops if changed.is_changed(definitions.get(op, ())))
    others = tuple(op for op in ops if op not in differing)
    recorded = recorded_since(changed, store, known, others, meshes)
    if not differing:
        return recorded
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
) -> Evidence:
    request = RulesRequest(imports=imports, command=command_line(), claims_only=True, only=ops)
    if len(ops) > MANY:
        request = replace(request, max_samples=SAMPLES_OF_MANY)
    plan = make_rules_plan(request, known)
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
        rules, of_torch = _without_those_of_torch(rules, store)
    accused = _accused(rules)
    interrupted = rules is not None and any(one.reason == INTERRUPTED for one in rules.untested)
    left = tuple(ops) if interrupted else kept_off_ranks(ops, accused)
    campaign = _without(campaign, left)
    on_meshes = record(campaign, store, progress(detail)) if campaign.selected else None
    if on_meshes is not None:
        on_meshes, also = _without_those_of_torch(on_meshes, store)
        of_torch += also
    runs = [run for run in (on_meshes, rules) if run is not None]
    left_out = [f"{op} on ranks: not tried, because level 1 shows that its rules are wrong" for op in accused]
    others = [op for op in left if op not in accused]
    if others:
        why = "level 1 was interrupted" if interrupted else "of what level 1 shows"
        left_out.append(f"{plural(len(others), 'other op' if accused else 'op')} on ranks: not tried, because {why}")
    left_out += of_torch
    question = Question(tuple(ops), tuple(map(str, campaign.meshes)), tuple(imports))
    unproved = [f"{op} {why}" for op in ops if op not in others and (why := _why_unproved(op, runs))]
    if len(unproved) == len(ops):
        remedy = "nothing that the imports register was verified"
        return Evidence(question, tuple(runs), tuple(NoEvidence(one, remedy) for one in unproved), tuple(left_out),
            lost=lost.result())  # fmt: skip
    return Evidence(question, tuple(runs), (), (*unproved, *left_out), lost=lost.result())


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


def _why_unproved(op: str, runs: Sequence[RunRecord]) -> str:
    """Return why no run proves anything about an op; empty if one does."""
    counts = [run.counts_by_op.get(op, {}) for run in runs]
    if any(map(proves, counts)):
        return ""
    tried = sum(sum(one.values()) for one in counts)
    if tried:
        return f"is not verified: all of its {tried} trials and rules are unsupported or inconclusive"
    reasons = {rules.not_testable[op]: None for run in runs if run.rules for rules in run.rules.ops.values()
               if op in rules.not_testable}  # fmt: skip
    return f"is not verified: {next(iter(reasons))}" if reasons else NO_SAMPLES


def _without_those_of_torch(run: RunRecord, store: RunStore) -> tuple[RunRecord, tuple[str, ...]]:
    """Return the run without the new findings that are torch's own, and a line on each.

    These are findings that torch alone shows, without the imports, and those of a local kernel. Torch may have the same
    wrong rule as the imports. So findings that a rule of the imports causes stay, unless the
    rule is torch's own and the imports have exchanged something that it runs.
    """
    exchanged = exchanged_alone()
    own = [op for op in run.header.own_rules if op not in exchanged]
    new = [one for one in run.findings if not one.known and not is_caused_by_rule_of(own, one)]
    most = MOST_OF_EXCHANGED if exchanged else MOST_LEFT
    why = {
        one.fingerprint: "torch's kernel gives a shard without elements another dtype, whatever the rule is"
        for one in run.findings
        if not one.known and is_dtype_of_empty_shards(one)
    }
    blamed = [one for one in run.findings if not one.known and one not in new]

    def alone(findings: Sequence[FindingRecord]) -> dict[str, str]:
        with ThreadPoolExecutor(2) as pool:
            fails = [*pool.map(_fails_alone, findings)]
        same = "torch's own rules fail in the same way"
        return {one.fingerprint: same for one, fails_too in zip(findings, fails, strict=True) if fails_too}

    def mended(beside: Sequence[FindingRecord], blamed: Sequence[FindingRecord]) -> dict[str, str]:
        remedies = {} if exchanged else mended_beside_rules(beside, blamed, run.header.imports)
        text = "remedy {} mends it, which is about torch and no rule"
        return {one: text.format(name) for one, name in remedies.items()}

    why |= explained([one for one in new if one.fingerprint not in why], most, alone, lambda left: mended(left, ()))
    why |= explained([one for one in blamed if one.fingerprint not in why], most, lambda left: mended((), left))
    left = [one for one in run.findings if one.fingerprint in why]
    if not left:
        return run, ()
    lines = tuple(f"finding {one.fingerprint}, {one.verdict} in {one.op}: {why[one.fingerprint]}" for one in left)
    kept = replace(run, findings=[one for one in run.findings if one not in left])
    # a later gate reads the record, and must not count these either
    write_atomically(store.path(run.header.id), encode_record(kept), "the record is as it was before")
    return kept, lines


def explained(
    findings: Sequence[FindingRecord], most: int, *explain: Callable[[Sequence[FindingRecord]], dict[str, str]]
) -> dict[str, str]:
    """Return why ``findings`` do not count, by fingerprint, as each of ``explain`` in turn says of some of them.

    Each takes time. So the others are not tried once ``most`` findings are left: the rules of the imports are wrong.
    """
    why: dict[str, str] = {}
    left = 0
    for start in range(0, len(findings), most):
        if left >= most:
            break
        block = findings[start : start + most]
        for one in explain:
            if rest := [finding for finding in block if finding.fingerprint not in why]:
                why |= one(rest)
        left += sum(finding.fingerprint not in why for finding in block)
    return why


def is_caused_by_rule_of(own: Collection[str], finding: FindingRecord) -> bool:
    """Return whether an op in ``own`` failed on the very placements that it was given, which only its rule can cause.

    Redistributions before the op, and ops that make gradients, run by torch's own code. So does what raises when all
    arguments are replicated, because no rule is wrong then.
    """
    op, _, where = finding.rule.partition(": ")
    if op not in own or op in BETWEEN_OPS:
        return False
    if op != finding.op:  # an op that ran while gradients were made
        return True
    given = str(ByMeshDim.of(finding.input_placements.values()))
    return finding.phase in _BY_RULES and where in (given, *Anywhere) and given != "R"


def _fails_alone(finding: FindingRecord) -> bool:
    return bool(finding.script) and run_script(without_imports(finding.script))[0] == FAILS
