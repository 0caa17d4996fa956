"""Failures of a run with rules of an import that are torch's own: torch shows them alone, or a remedy mends them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from verifier.core.case import Trial
from verifier.core.verdict import Phase, VerdictKind
from verifier.execution.imports import exchanged_alone
from verifier.execution.patches import BETWEEN_OPS
from verifier.execution.remedies import installed_remedies
from verifier.findings.kernels import is_dtype_of_empty_shards, is_zeros_of_autograd
from verifier.findings.keys import Anywhere, ByMeshDim
from verifier.findings.script.render import run_script, without_imports
from verifier.meshes.crew import PoolKey
from verifier.meshes.flight import Hangs
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import Starter
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import Reference, make_reference
from verifier.oracle.verdicts import judge
from verifier.records.schema import FAILS, FindingRecord, RunRecord
from verifier.records.values import load_trial

__all__ = ["explained", "is_caused_by_rule_of", "mended_beside_rules", "shown_by_torch"]

MOST_LEFT = 6
"""After so many findings that nothing but the imports explains, no others are tried without the imports."""
MOST_OF_EXCHANGED = 100
"""The same, if the imports exchange code that rules of torch run."""
_BY_RULES = (Phase.FORWARD, Phase.GATHER, Phase.INPUTS)
"""The phases of a trial that show the rules of its op, and not those of other ops."""
_WRONG = (VerdictKind.WRONG_VALUE, VerdictKind.WRONG_GRADIENT)
_AGAIN = 2
"""How often a trial has to fail again without the remedy: a rule that keeps state may have let it pass."""
_LIMIT = 10.0
"""Seconds for a trial."""


def mended_beside_rules(
    findings: Iterable[FindingRecord], blamed: Iterable[FindingRecord], imports: Sequence[str]
) -> dict[str, str]:
    """Return which remedy mends each finding, by fingerprint; only those are tried that concern any op.

    The trials run on ranks with ``imports``. A finding that does not fail each time without a remedy is not mended.

    Parameters
    ----------
    findings
        Those that no rule of the imports can have caused.
    blamed
        Those that look as if a rule of the imports had caused them. Only two kinds of remedy tell that it has not: one
        that stands beside the rules, and, if the results are wrong, one that refuses nothing: the rule is applied as
        it was, between redistributions that are mended.
    """
    of_any = [one for one in installed_remedies().values() if "*" in one.ops or one.beside_rules]
    tried = [(one, of_any) for one in findings]
    tried += [
        (one, [remedy for remedy in of_any if remedy.beside_rules or (one.verdict in _WRONG and not remedy.refuses)])
        for one in blamed
    ]

    hangs = Hangs()

    def make(key: PoolKey) -> Pool:
        return Pool(key, imports, _LIMIT, starter=Starter(imports, None, hash_seeds=1), hangs=hangs)

    found: dict[str, str] = {}
    with closing(PoolSet(make, 1, lambda _mesh, _reason, _seconds: None)) as pools:
        for finding, remedies in tried:
            trial = load_trial(finding.trial)
            reference = make_reference(trial.case)
            if not _fails(pools, trial, reference):
                continue
            for remedy in remedies:
                if remedy.verdicts and finding.verdict not in remedy.verdicts:
                    continue
                kind = judge(run_remedied(pools, trial, (remedy.name,)), reference).kind
                if _is_mended(finding, kind, remedy.refuses):
                    if all(_fails(pools, trial, reference) for _ in range(_AGAIN)):
                        found[finding.fingerprint] = remedy.name
                    break
    return found


def _is_mended(finding: FindingRecord, kind: VerdictKind, refuses: bool) -> bool:
    """Return whether a verdict under a remedy says that what was found is gone.

    That a crash is gone also shows where there are no elements to compare.
    """
    if kind is VerdictKind.INCONCLUSIVE:
        return finding.verdict == VerdictKind.CRASH
    return kind is VerdictKind.PASS or (kind is VerdictKind.UNSUPPORTED and refuses)


def _fails(pools: PoolSet, trial: Trial, reference: Reference) -> bool:
    return judge(pools.run_alone(trial), reference).kind.bad


def shown_by_torch(run: RunRecord) -> dict[str, str]:
    """Return why new findings of a run with rules of an import are torch's own, by fingerprint.

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
    why |= {
        one.fingerprint: "autograd makes gradients of zeros as plain tensors, whatever the rule is"
        for one in run.findings
        if not one.known and is_zeros_of_autograd(one)
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
    return why


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
