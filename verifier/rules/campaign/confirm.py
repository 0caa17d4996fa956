"""Tries each wrong rule on real processes: only what they show as well is an accusation."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice

from torch.distributed.tensor import Replicate

from verifier.core.case import IN_INFERENCE_MODE, MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation
from verifier.core.ops import resolve
from verifier.core.verdict import CLASSES, Phase, Verdict, VerdictKind
from verifier.findings.attribution import Attribution, passed_again, unmended
from verifier.findings.failures import Failure, Runner, first_error
from verifier.findings.grouping import Group, group_key, unlike
from verifier.findings.record import finding_record, written_script
from verifier.findings.script.render import run_script
from verifier.gate.baseline import Baseline
from verifier.gate.entries import Cause
from verifier.gate.question import replaced_text
from verifier.meshes.lanes import Lanes
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.planning.boundary import refusal
from verifier.programs import second_calls
from verifier.records.schema import (
    CONFIRMED,
    GONE,
    NOT_RUN,
    NOT_SELECTED,
    NOT_TRIED,
    UNCONFIRMED,
    ConfirmationRecord,
    FindingRecord,
    KnownRecord,
    WrongRuleRecord,
)
from verifier.records.values import load_trial, trial_record
from verifier.rules.campaign.agreement import error_text, rule_of_any_call, shows
from verifier.rules.campaign.collect import wrong_record
from verifier.rules.campaign.defects import base_op, class_of, defect_key
from verifier.rules.campaign.outcomes import Outcomes
from verifier.rules.campaign.refuted import Refutations, Refuted
from verifier.rules.results import WrongRule
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.ops import is_composite

__all__ = ["Confirmer"]

_MOST_SPECIAL = 4
"""So many rules of an op are tried on real processes, until special values refute one there."""
_SPECIAL_SCRIPTS = 4
"""The scripts of so many new findings about special values are run; there may be one for most ops."""
ATTEMPTS = 16
"""Splits of the Partial arguments to try, since level 1 and level 2 split them differently."""
SPECIAL_ATTEMPTS = 4
OTHER_ATTEMPTS = 4
"""Splits to try of each further counterexample, if the smallest one is not shown."""
STALE_ATTEMPTS = 3
"""Splits to try of each stale decision; there may be many, and most do no harm."""
_RULES_AFTER_CALLS = 4
"""So many rules of an op are tried after other calls: what a strategy keeps rarely concerns one rule alone."""
_CALLS_BEFORE = 8
"""So many other calls are made before one that passes alone, each on ranks of its own."""


@dataclass
class _Defect:
    """Wrong rules that one defect explains: what shows it, and in how many draws all of them failed.

    What shows it is the smallest of the failures. For an entry of the baseline it is that of the entry; ``size`` is
    then None.
    """

    failure: Failure
    family: str
    size: tuple[int, int, int] | None
    kind: VerdictKind | None = None
    """STALE_CACHE or SPECIAL_VALUE, if the defect is one; else the verdict of the failure says what it is."""
    likely: str = ""
    """What a finding of this kind says of its cause."""
    others: list[WrongRule] = field(default_factory=list)
    """More counterexamples of the rules, from other calls."""
    occurrences: int = 0
    also: dict[str, None] = field(default_factory=dict)


class Confirmer:
    """Runs counterexamples through DTensor on real processes, and makes findings of those that fail there as well.

    Parameters
    ----------
    run
        Runs a trial on its mesh.
    baseline
        What is known.
    families
        Those whose entries in the baseline are run again.
    imports
        The user's files, for the command that reproduces a finding.
    own_rules
        The ops whose rules these register.
    attribution
        Tries the remedies of known causes; None if the baseline has none.
    outcomes
        Has the outcomes of earlier rule checks.
    afresh
        Runs a trial on ranks that have run nothing else.
    lanes
        Run the counterexamples of several wrong rules at a time; without them, ``run`` runs one after the other.
    """

    def __init__(
        self,
        run: Runner,
        baseline: Baseline,
        families: Sequence[str],
        imports: tuple[str, ...] = (),
        own_rules: Collection[str] = (),
        attribution: Attribution | None = None,
        lanes: Lanes | None = None,
        outcomes: Outcomes | None = None,
        afresh: Runner | None = None,
    ) -> None:
        self._afresh = afresh
        self._outcomes = outcomes or Outcomes()
        self._lanes, self._judging = lanes, threading.Lock()
        self.run, self.baseline, self.families, self.imports = run, baseline, families, imports
        self.own_rules, self.attribution = own_rules, attribution
        self.statuses: list[KnownRecord] = []
        self.findings: list[FindingRecord] = []
        self.errors: list[str] = []
        self.withdrawn: set[str] = set()
        """Names of what level 2 showed and the script that needs torch alone did not: no accusation."""
        self.instead: dict[str, WrongRuleRecord] = {}
        """What shows a finding, by its name, if it is another call than the smallest that failed."""
        self._defects: dict[str, _Defect] = {}
        self._causes: dict[str, tuple[Cause, ...]] = {}
        """What mended the last wrong rule with a key that anything mended."""
        self._unexplained: set[str] = set()
        """Keys of wrong rules of which one was mended by nothing."""
        self._tried_after_calls: Counter[str] = Counter()
        self._refutations = Refutations()

    def replay_known(self, ops: set[str], meshes: Collection[MeshSpec] = ()) -> None:
        """Run the baseline's entries again whose op is among ``ops``, to see which still fail.

        Entries on other ``meshes`` are left out, if any are given.
        """
        for entry in self.baseline.entries:
            if entry.family not in self.families:
                continue
            left_out = f"{entry.op} {NOT_SELECTED}" if entry.op not in ops else ""
            if not left_out and meshes and not entry.is_on(meshes):
                left_out = f"mesh {entry.mesh} {NOT_SELECTED}"
            if left_out:
                self.statuses.append(KnownRecord(entry.fingerprint, "untested", left_out, False))
                continue
            if not entry.imports and entry.is_replaced(self.own_rules):
                detail = replaced_text(entry.op, self.imports)
                self.statuses.append(KnownRecord(entry.fingerprint, "untested", detail))
                continue
            trial = load_trial(entry.trial())
            if reason := refusal(trial, self.imports):
                self.statuses.append(KnownRecord(entry.fingerprint, "untested", reason))
                continue
            failure = self._run(trial)
            if not failure.verdict.kind.bad:
                self.statuses.append(passed_again(entry, self.imports))
            elif isinstance(entry, Cause) and not (self.attribution and self.attribution.is_mended(failure, (entry,))):
                detail = f"its trial fails, and remedy {entry.remedy} does not mend it"
                self.statuses.append(KnownRecord(entry.fingerprint, "untested", detail))
            else:
                self._defects[entry.fingerprint] = _Defect(failure, entry.family, None)
                self.statuses.append(KnownRecord(entry.fingerprint, "known", "still fails"))

    def confirm(self, wrongs: Sequence[tuple[WrongRule, str]]) -> list[WrongRuleRecord]:
        """Return the record of each wrong rule, which says whether real processes show it as well.

        Findings are filed under the family beside the rule. A product of rules is not tried if an earlier call has
        shown that one of them is wrong by itself and new: it is wrong for as long as that rule is. So rules of one mesh
        dim come in a call before their products. The records do not depend on the number of lanes.
        """
        follows = [self._refutations.implying(wrong) for wrong, _ in wrongs]
        rules = [wrong for (wrong, _), refuted in zip(wrongs, follows, strict=True) if refuted is None]
        if self._lanes is None:
            attempts = iter([self._attempts(self.run, wrong) for wrong in rules])
        else:
            attempts = iter(self._lanes.map(self._attempts, rules))
        return [
            self._confirm(wrong, family, next(attempts)) if refuted is None else self._implied(wrong, refuted)
            for (wrong, family), refuted in zip(wrongs, follows, strict=True)
        ]

    def _implied(self, wrong: WrongRule, refuted: Refuted) -> WrongRuleRecord:
        """Return the record of a product that is wrong because a rule in it is."""
        defect = self._defects[refuted.name]
        defect.occurrences += wrong.draws
        defect.also[f"{wrong.rule} on mesh {wrong.mesh}"] = None
        return wrong_record(wrong, ConfirmationRecord(NOT_TRIED, why=f"{refuted.rule} is wrong"), refuted.name, False)

    def _attempts(self, run: Runner, wrong: WrongRule, most: int = ATTEMPTS) -> list[Failure]:
        """Return the outcomes of the attempts to show a wrong rule, up to and including the first that shows it.

        Another split takes no less time, so that none follows a trial that was too slow.
        """
        tried: list[Failure] = []
        for trial in self._ways(_on_gloo(load_trial(wrong.trial))):
            for attempt in range(most):
                tried.append(self._outcome(run, replace(trial, seed=trial.seed + 7919 * attempt)))
                if shows(wrong, tried[-1]):
                    return tried
                if tried[-1].observation.fate is Fate.SLOW:
                    break
        return tried

    def _ways(self, trial: Trial) -> list[Trial]:
        """Return a trial, and where it may differ the same in inference mode, which records no gradients, like level 1.

        Autograd decomposes a composite op before DTensor sees it. A strategy of the user's may ask for the mode.
        """
        if not (_is_composite(trial.case) or trial.case.op in self.own_rules):
            return [trial]
        return [trial, replace(trial, case=replace(trial.case, tags=trial.case.tags | {IN_INFERENCE_MODE}))]

    def _confirm(self, wrong: WrongRule, family: str, tried: Sequence[Failure]) -> WrongRuleRecord:
        for failure in tried:
            self._note_error(failure)
        failure = tried[-1]
        ranks = failure.trial.mesh.world_size
        if shows(wrong, failure):
            return self._accuse(wrong, family, failure, self._confirmation(failure))
        if not _is_composite(failure.trial.case):
            failure = [one for one in tried if not one.trial.case.in_inference_mode][-1]
        for other in wrong.others:
            if (shown := self._shown(other)) is not None:
                return self._accuse(replace(other, draws=wrong.draws), family, shown, self._confirmation(shown))
        if (whole := self._never_runs(failure)) is not None:
            return self._accuse(rule_of_any_call(wrong, whole), family, whole, self._confirmation(whole))
        if (kept := self._kept_from_another_call(wrong, failure)) is not None:
            return self._accuse(kept[0], family, kept[1], self._confirmation(kept[1]))
        seen = f"{failure.verdict.kind} {failure.verdict.message}".strip()
        return wrong_record(
            wrong, ConfirmationRecord(UNCONFIRMED, "gloo", ranks, f"on {ranks} gloo ranks it is {seen}"), "", False
        )

    def _never_runs(self, failure: Failure) -> Failure | None:
        """Return how the call of ``failure`` fails on replicated tensors; None if it does not, or in another way.

        DTensor then cannot run the op at all, so that it is no rule of the op that is wrong.
        """
        trial, raised = failure.trial, first_error(failure.observation)
        if failure.verdict.kind is not VerdictKind.CRASH or failure.verdict.phase is not Phase.FORWARD:
            return None
        replicated = (Replicate(),) * trial.mesh.ndim
        whole = self._run(replace(trial, combination=(replicated,) * len(trial.combination)))
        again = first_error(whole.observation)
        if raised is None or again is None or whole.verdict.kind is not VerdictKind.CRASH:
            return None
        return whole if error_text(raised) == error_text(again) else None

    def _kept_from_another_call(self, wrong: WrongRule, failure: Failure) -> tuple[WrongRule, Failure] | None:
        """Return how a call goes wrong after another one, if its strategy is the user's and it passes alone.

        At level 1 many calls come before it. A strategy that keeps something of its own answers what it answered then.
        """
        trial = failure.trial
        op = wrong.rule.op
        if self._afresh is None or op not in self.own_rules or failure.verdict.kind is not VerdictKind.PASS:
            return None
        self._tried_after_calls[op] += 1
        if self._tried_after_calls[op] > _RULES_AFTER_CALLS:
            return None
        for again in islice(second_calls(trial.case), _CALLS_BEFORE):
            both, *controls = (replace(trial, case=one) for one in (again.program, *again.controls))
            made = replace(
                wrong, verdict=VerdictKind.STALE_CACHE, left_out=again.changed, trial=trial_record(both),
                controls=tuple(map(trial_record, controls)), others=(),
                message=f"after a call with another {again.changed} the strategy decides as for that call",
            )  # fmt: skip
            if (harm := self._harm(made, self._afresh)) is not None:
                return made, harm
        return None

    def _shown(self, other: WrongRule) -> Failure | None:
        """Return the failure of a further counterexample on real processes; None if they do not show it."""
        tried = self._attempts(self.run, other, OTHER_ATTEMPTS)
        for failure in tried:
            self._note_error(failure)
        return tried[-1] if shows(other, tried[-1]) else None

    def confirm_stale(self, stale: Sequence[WrongRule], family: str) -> list[WrongRuleRecord]:
        """Return the record of each stale decision that does harm on real processes, one for each argument left out.

        Most do none: two decisions may differ and both be right for both calls. These are no accusations, so they have
        no record.
        """
        records: dict[tuple[str, str], WrongRuleRecord] = {}
        for wrong in stale:
            key = wrong.rule.op, wrong.left_out
            if key not in records and (failure := self._harm(wrong)) is not None:
                records[key] = self._accuse(wrong, family, failure, self._confirmation(failure))
        return list(records.values())

    def confirm_special(self, special: Sequence[WrongRule], family: str) -> list[WrongRuleRecord]:
        """Return the record of each rule that special values refute, of which a few of each op are tried on ranks."""
        tried: Counter[str] = Counter()
        shown: set[str] = set()
        records = []
        for wrong in special:
            op = base_op(wrong.rule.op)
            if op in shown or tried[op] >= _MOST_SPECIAL:
                confirmed = ConfirmationRecord(NOT_TRIED, why="special values")
                records.append(wrong_record(wrong, confirmed, "", False))
                continue
            tried[op] += 1
            records.append(self._confirm(wrong, family, self._attempts(self.run, wrong, SPECIAL_ATTEMPTS)))
            if records[-1].fingerprint:
                shown.add(op)
        return records

    def _harm(self, wrong: WrongRule, run: Runner | None = None) -> Failure | None:
        """Return the failure of two calls in a row that do not fail if each of them is made twice; None if they pass.

        One of the two may show nothing, such as a product with 0.
        """
        both, *controls = (_on_gloo(load_trial(record)) for record in (wrong.trial, *wrong.controls))
        for attempt in range(STALE_ATTEMPTS):
            seed = both.seed + 7919 * attempt
            failure = self._run(replace(both, seed=seed), run)
            if failure.verdict.kind.bad:
                alone = {self._run(replace(one, seed=seed), run).verdict.kind for one in controls}
                fine = VerdictKind.PASS in alone and alone <= {VerdictKind.PASS, VerdictKind.INCONCLUSIVE}
                return failure if fine else None
        return None

    def _run(self, trial: Trial, run: Runner | None = None) -> Failure:
        """Run ``trial`` and return what came of it, which need not be a failure."""
        failure = self._outcome(run or self.run, trial)
        self._note_error(failure)
        return failure

    def _outcome(self, run: Runner, trial: Trial) -> Failure:
        def make() -> tuple[Observation, Verdict]:
            observation = run(trial)
            with self._judging:  # references are local calls, some of which change what all threads share
                return observation, judge(observation, make_reference(trial.case))

        return Failure(trial, *self._outcomes.of_trial(trial, (), make))

    def _note_error(self, failure: Failure) -> None:
        verdict, trial = failure.verdict, failure.trial
        if verdict.kind is VerdictKind.TOOL_ERROR:
            self.errors.append(f"{trial.case.op} on mesh {trial.mesh}: {verdict.message}\n{verdict.detail}".strip())

    def _accuse(
        self, wrong: WrongRule, family: str, failure: Failure, confirmed: ConfirmationRecord
    ) -> WrongRuleRecord:
        name, size = self._name(wrong, failure), _size(wrong, failure)
        kind, likely = class_of(wrong)
        if isinstance(self.baseline.get(name), Cause):  # what one change to torch mends is that cause
            kind, likely = None, ""
        defect = self._defects.setdefault(name, _Defect(failure, family, size, kind, likely))
        if defect.size is not None and size < defect.size:
            defect.failure, defect.size = failure, size
        defect.occurrences += wrong.draws
        defect.also[f"{wrong.rule} on mesh {wrong.mesh}"] = None
        defect.others += [other for other in wrong.others if other.verdict is wrong.verdict]
        if self.baseline.get(name) is None:
            self._refutations.add(wrong, failure.trial.mesh.ndim, name)
        return wrong_record(wrong, confirmed, name, self.baseline.get(name) is not None)

    def _name(self, wrong: WrongRule, failure: Failure) -> str:
        """Return the fingerprint of the cause whose remedy mends the rule, or else of the defect that it looks like.

        A product looks like a rule in it that is wrong by itself.
        """
        key = defect_key(wrong)
        if causes := self._mending(key.fingerprint, failure):
            return causes[0].fingerprint
        names = [key.fingerprint, *(replace(key, rules=(rule,)).fingerprint for rule in key.rules)]
        names = [self._own(unmended(name, self.baseline), wrong.rule.op) for name in names]
        return next((name for name in names if name in self._defects), names[0])

    def _own(self, name: str, op: str) -> str:
        """Return ``name``, or another one if an entry about torch's rules of another overload has it.

        Overloads of one op have one name. The rules of one may be the user's, and those of another torch's.
        """
        while op in self.own_rules and (entry := self.baseline.get(name)) is not None and not entry.imports:
            name = unlike(name)
        return name

    def _mending(self, key: str, failure: Failure) -> tuple[Cause, ...]:
        """Return the causes that explain ``failure``; those that explained the last one with its key come first.

        If none explained an earlier one, that is a new finding, and this rule is part of it unless one cause alone
        mends it: rules of an op may be wrong for several reasons that look alike.
        """
        if self.attribution is None:
            return ()
        before = self._causes.get(key, ())
        if before and self.attribution.is_mended(failure, before):
            return before
        if key in self._unexplained:
            causes = self.attribution.explain(failure, alone=True)
        elif not (causes := self.attribution.explain(failure)):
            self._unexplained.add(key)
        if causes:
            self._causes[key] = causes
        return causes

    def settle(self) -> None:
        """Make a finding of each defect: those of the baseline that still fail, and what is new."""
        new = [name for name in self._defects if self.baseline.get(name) is None]
        special = [name for name in new if self._defects[name].kind is VerdictKind.SPECIAL_VALUE]
        left_out = {*special[_SPECIAL_SCRIPTS:]}
        new = [name for name in new if name not in left_out]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failures = [self._defects[name].failure for name in new]
            statuses = dict(zip(new, pool.map(self._script_status, failures), strict=True))
        for name, defect in self._defects.items():
            status = statuses.get(name, "" if defect.size is None else NOT_RUN)
            if status == GONE:
                status = self._shown_otherwise(name, defect)
            if status == GONE:
                self.withdrawn.add(name)
                continue
            self.findings.append(self._record(name, defect, status))
        self.findings.sort(key=lambda finding: (finding.op, finding.fingerprint))

    def _shown_otherwise(self, name: str, defect: _Defect) -> str:
        """Return the status of the script of another call that shows the defect; GONE if none does.

        How NaN and other results are reduced may differ between ranks and the script, and the smallest call that fails
        may be one where it does.
        """
        for other in defect.others[:OTHER_ATTEMPTS]:
            failure = self._shown(other)
            if failure is None or self._name(other, failure) != name:
                continue
            status = self._script_status(failure)
            if status != GONE:
                defect.failure = failure
                self.instead[name] = wrong_record(other, self._confirmation(failure), name, False)
                return status
        return GONE

    def _record(self, name: str, defect: _Defect, status: str) -> FindingRecord:
        failure = defect.failure
        seen = dict.fromkeys(list(defect.also)[:12])
        group = Group(group_key(failure), failure, max(1, defect.occurrences), seen)
        confirmed = self._confirmation(failure)
        entry = self.baseline.get(name)
        record = finding_record(
            group, failure, confirmed, False, entry, defect.family, defect.likely, False, self.imports,
            level=1, name=name, script_status=status,
        )  # fmt: skip
        kind = defect.kind
        if kind is None and entry is not None and entry.verdict in CLASSES:
            kind = VerdictKind(entry.verdict)
        return record if kind is None else replace(record, verdict=kind)

    def _script_status(self, failure: Failure) -> str:
        source, no_script = written_script(failure, imports=self.imports)
        return no_script or self._outcomes.of_script(source, lambda: run_script(source)[0])

    def _confirmation(self, failure: Failure) -> ConfirmationRecord:
        """Return that ranks showed ``failure``, and in which run if it was an earlier one."""
        earlier = self._outcomes.run_of(failure.trial)
        return ConfirmationRecord(CONFIRMED, "gloo", failure.trial.mesh.world_size, earlier and f"in run {earlier}")


def _is_composite(case: OpCase) -> bool:
    op = resolve(case.call)
    return isinstance(op, OpOverload) and is_composite(op)


def _on_gloo(trial: Trial) -> Trial:
    return replace(trial, mesh=replace(trial.mesh, backend="gloo"))


def _size(wrong: WrongRule, failure: Failure) -> tuple[int, int, int]:
    """Smaller is simpler: ranks, mesh dims, elements."""
    return failure.trial.mesh.world_size, failure.trial.mesh.ndim, wrong.elements
