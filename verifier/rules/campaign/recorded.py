"""A rule check with its record on disk."""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from verifier.core.case import MeshSpec, Trial
from verifier.core.interrupts import RunInterrupted, note_arrival, one_interrupt_at_a_time, raise_lost_interrupt
from verifier.core.observation import Observation
from verifier.core.verdict import VerdictKind
from verifier.core.wording import CORRECT_MAKER, CORRECT_SAMPLES, NO_SAMPLES
from verifier.findings.attribution import Attribution
from verifier.findings.record import SCRIPT_RAN
from verifier.meshes.flight import Hangs
from verifier.meshes.lanes import Lanes
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import RulesNotInRanks, Starter
from verifier.meshes.remedied import run_remedied
from verifier.processes.scripts import load_scripts_ahead
from verifier.records.schema import (
    INTERRUPTED,
    UNCONFIRMED,
    ConfirmationRecord,
    GraphRecord,
    OpRulesRecord,
    RulesRecord,
    RunRecord,
    UntestedRecord,
    WrongRuleRecord,
)
from verifier.rules.campaign.collect import op_record, special_rules, stale_decisions, wrong_record, wrong_rules
from verifier.rules.campaign.confirm import Confirmer
from verifier.rules.campaign.outcomes import Outcomes, earlier_outcomes
from verifier.rules.campaign.request import Progress, RulesPlan
from verifier.rules.campaign.table import TableBuilder
from verifier.rules.campaign.work import WorkItem, check_target, number_of_parts, preparation
from verifier.rules.campaign.workers import Died, Failed, Finished, GaveUp, Outcome, Part, WorkerSet
from verifier.rules.results import SampleReport, WrongRule
from verifier.runs.journal import RunWriter
from verifier.runs.store import RunStore

__all__ = [
    "record_rules",
]

ENDED = "the check ended before ranks had tried it"
FAILS_HERE = "DTensor fails when level 1 asks it for rules, and not on ranks"
TRIAL_LIMIT = 8.0


@dataclass
class _Op:
    """What has come back of one target so far: ``unfinished`` counts the parts that have more to come."""

    unfinished: int
    by_number: dict[int, SampleReport] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    not_reached: str = ""
    died: list[str] = field(default_factory=list)
    record: OpRulesRecord | None = None

    @property
    def reports(self) -> list[SampleReport]:
        """The reports of the samples, in the order of the samples whoever made them."""
        return [self.by_number[number] for number in sorted(self.by_number)]


def record_rules(
    plan: RulesPlan, store: RunStore, progress: Progress = lambda *_: None, *, table: TableBuilder | None = None
) -> RunRecord:
    """Run ``plan`` and store what came of it; the journal has a line for each op as it is done.

    ``table`` takes what came of each sample, once the run has ended. A Ctrl-C ends the run early: what has been checked
    by then is stored, as incomplete.

    Raises
    ------
    RunInterrupted
        If a second one comes while the first one ends the run; the journal is kept.
    """
    started = time.monotonic()
    with store.open_run(plan.header) as writer, one_interrupt_at_a_time():
        try:
            run = _RulesRun(plan, writer, progress, store)
            complete = True
            try:
                run.check()
            except KeyboardInterrupt:
                note_arrival()
                complete = False
            record = run.finish(complete, time.monotonic() - started)
            if table is not None:
                run.fill(table)
            writer.finish(record)
        except KeyboardInterrupt:
            kept = f"what was checked is listed in {writer.journal_path}"
            raise RunInterrupted(f"interrupted before the record was written; {kept}") from None
    return record


class _RulesRun:
    def __init__(self, plan: RulesPlan, writer: RunWriter, progress: Progress, store: RunStore) -> None:
        self.plan, self.writer, self.progress, self.store = plan, writer, progress, store
        self.parts = number_of_parts(len(plan.targets))
        self.ops = [_Op(self.parts) for _ in plan.targets]
        self.errors: list[str] = []
        self.done = 0
        self.seconds = self.starting = self.confirming = 0.0
        self.findings: Confirmer | None = None
        self.confirmed = False

    def check(self) -> None:
        """Check every target, then confirm what is wrong."""
        plan = self.plan
        items = [
            WorkItem(target, plan.samples, plan.check, part, self.parts, plan.answers)
            for target in plan.targets
            for part in range(self.parts)
        ]
        began = time.monotonic()
        if not items:
            return
        imports = plan.header.imports
        with WorkerSet(min(plan.jobs, len(items)), imports, prepare=preparation(imports)) as workers:
            workers.start()
            ready = time.monotonic()
            self.starting = ready - began
            try:
                for outcome in workers.run(items, check_target):
                    self._take(outcome)
            finally:
                self.seconds = time.monotonic() - ready
        began = time.monotonic()
        self._confirm()
        self.confirming = time.monotonic() - began

    def _take(self, outcome: Outcome[SampleReport]) -> None:
        raise_lost_interrupt()
        index, part = divmod(outcome.item, self.parts)
        op, name = self.ops[index], self.plan.targets[index].name
        match outcome:
            case Part(ordinal=ordinal, result=report):
                op.by_number[ordinal * self.parts + part] = report
                if self.plan.header.own_rules and (report.wrong or report.special):
                    load_scripts_ahead()  # a new finding has one
                return
            case Died(how=how, detail=detail, position=position):
                where = f"sample {position[0]}"
                op.died.append(f"{name}, {where}: {how}" + (f": {detail}" if detail else ""))
                return
            case GaveUp(why=why):
                op.not_reached = f"samples of {name} after the crash were not reached: {why}"
            case Failed(traceback=text):
                self.errors.append(f"{name}: {text.strip()}")
            case Finished():
                pass
        op.unfinished -= 1
        if op.unfinished:
            return
        self.done += 1
        op.record = self._op_record(op, [], [])
        self.writer.append({
            "event": "OpChecked", "op": name, "combinations": op.record.combinations,
            "confirmed": len(op.record.confirmed), "wrong": len(wrong_rules(op.reports)),
            "missing": len(op.record.missing), "seconds": op.record.seconds,
        })  # fmt: skip
        self.progress(self.done, len(self.ops), name, op.record)

    @staticmethod
    def _op_record(op: _Op, wrong: Sequence[WrongRuleRecord], special: Sequence[WrongRuleRecord]) -> OpRulesRecord:
        return op_record(op.reports, wrong, special, op.given_up, op.died)

    # ------------------------------------------------------------------------------------------------------- confirming
    def _confirm(self) -> None:
        """Run counterexamples, and the baseline's entries, on real processes."""
        tried = {report.op for op in self.ops for report in op.reports}
        header = self.plan.header
        wrong = [wrong_rules(op.reports) for op in self.ops]
        most = min(self.plan.jobs, len(os.sched_getaffinity(0)), max(map(len, self._by_dims(wrong)), default=0))
        imports, seeds = tuple(header.imports), self._hash_seeds(tried)
        starter, hangs = Starter(imports, hash_seeds=seeds), Hangs() if imports else None

        def ranks() -> PoolSet:
            return PoolSet(lambda key: Pool(key, imports, TRIAL_LIMIT, starter=starter, hangs=hangs))

        lanes = Lanes(ranks, max(1, most))
        pools = lanes.first

        def afresh(trial: Trial) -> Observation:
            with closing(ranks()) as new:
                return new.run_alone(trial)

        baseline, attribution = self.plan.baseline, None
        outcomes = Outcomes(earlier_outcomes(self.store, header), self.writer.append, header.id)
        if baseline.causes:
            attribution = Attribution.of(
                baseline, lambda trial, remedies: run_remedied(pools, trial, remedies), outcomes.of_trial
            )
        self.findings = Confirmer(
            pools.run_alone, baseline, header.families, imports, header.own_rules, attribution, lanes, outcomes, afresh
        )
        try:
            self.findings.replay_known(tried, self.plan.check.meshes if self.plan.meshes_named else ())
            records: list[list[WrongRuleRecord]] = [[] for _ in self.ops]
            for part in self._by_dims(wrong):
                raise_lost_interrupt()
                told = self.findings.confirm([(one, self.plan.targets[number].source) for number, one in part])
                for (number, _), record in zip(part, told, strict=True):
                    if record.fails and record.confirmed.unsure:
                        self.ops[number].given_up.append(FAILS_HERE)
                    elif not (record.fails and any(_is_alike(one, record) for one in records[number])):
                        records[number].append(record)
            for op, target, own in zip(self.ops, self.plan.targets, records, strict=True):
                own += self.findings.confirm_stale(stale_decisions(op.reports), target.source)
            special = [
                self.findings.confirm_special(special_rules(op.reports), target.source)
                for op, target in zip(self.ops, self.plan.targets, strict=True)
            ]
            self.findings.settle()
            for op, own, other in zip(self.ops, records, special, strict=True):
                kept = [[self._withdrawn(record) for record in each] for each in (own, other)]
                op.record = self._op_record(op, *kept)
            self.confirmed = True
        except RulesNotInRanks as error:
            self.errors.append(str(error))
        except Exception:  # noqa: BLE001 - what has been checked must not be lost; becomes an error of ours
            self.errors.append(traceback.format_exc().strip())
        finally:
            self.errors += self.findings.errors
            lanes.close()

    def _hash_seeds(self, ops: set[str]) -> int | None:
        """Return 1, which starts fastest, unless an entry of the baseline needs ranks with hash seeds of their own."""
        disagree = [one.op for one in self.plan.baseline.entries if one.verdict == VerdictKind.RANKS_DISAGREE]
        return 1 if ops.isdisjoint(disagree) else None

    @staticmethod
    def _by_dims(wrong: Sequence[Sequence[WrongRule]]) -> list[list[tuple[int, WrongRule]]]:
        """Return the wrong rules with the numbers of their targets: those of one mesh dim, then products of two."""
        parts: dict[int, list[tuple[int, WrongRule]]] = defaultdict(list)
        for number, found in enumerate(wrong):
            for one in found:
                parts[MeshSpec.parse(one.mesh).ndim].append((number, one))
        return [parts[dims] for dims in sorted(parts)]

    def _withdrawn(self, record: WrongRuleRecord) -> WrongRuleRecord:
        """Return the record without its accusation, if the script of its finding does not show the defect.

        If the script of another call shows it, that one's record takes its place.
        """
        assert self.findings is not None
        instead = self.findings.instead.get(record.fingerprint)
        if instead is not None and _rule_of(instead) == _rule_of(record):
            return instead
        if record.fingerprint not in self.findings.withdrawn:
            return record
        return replace(record, confirmed=ConfirmationRecord(UNCONFIRMED, why=SCRIPT_RAN), fingerprint="")

    # ------------------------------------------------------------------------------------------------------- the whole
    def fill(self, table: TableBuilder) -> None:
        """Give the samples of all ops to ``table``."""
        for op in self.ops:
            table.take(op.reports, op.record or self._op_record(op, [], []))

    def _leave_unconfirmed(self) -> None:
        """Show what level 1 has found wrong, though nothing was, or could be, tried on ranks."""
        why = ConfirmationRecord(UNCONFIRMED, why=ENDED)
        for op in self.ops:
            if wrong := wrong_rules(op.reports):
                op.record = self._op_record(op, [wrong_record(one, why, "", False) for one in wrong], [])

    def finish(self, complete: bool, seconds: float) -> RunRecord:
        if not self.confirmed:
            self._leave_unconfirmed()
        plan, header = self.plan, self.plan.header
        records = {
            target.name: op.record if op.record is not None else self._op_record(op, [], [])
            for target, op in zip(plan.targets, self.ops, strict=True)
            if op.reports or op.record is not None
        }
        rules = RulesRecord(
            combinations=sum(record.combinations for record in records.values()),
            seconds=round(self.seconds, 3),
            seconds_starting=round(self.starting, 3),
            seconds_confirming=round(self.confirming, 3),
            jobs=plan.jobs,
            meshes=list(header.meshes),
            dtype=header.dtypes[0],
            sizes=plan.samples.sizes,
            claims_only=plan.check.claims_only,
            ops=records,
        )
        by_op = _counts_by_op(records.values())
        counts = sum(by_op.values(), Counter[str]())
        untested = sum((Counter(record.untested) for record in records.values()), Counter[str]())
        not_reached = [target.name for target in plan.targets if target.name not in records]
        why = NO_SAMPLES if complete else INTERRUPTED
        skipped = [UntestedRecord(name, why, 1) for name in not_reached]
        skipped += [UntestedRecord(name, NO_SAMPLES, 1) for name in plan.without_samples]
        skipped += [UntestedRecord(name, wrong, 1, CORRECT_SAMPLES) for name, wrong in plan.wrong_samples.items()]
        for target, op in zip(plan.targets, self.ops, strict=True):
            if op.not_reached:
                overloads = records[target.name].overloads if target.name in records else []
                skipped.append(UntestedRecord(next(iter(overloads), target.name), op.not_reached, 1, CORRECT_MAKER))
        return RunRecord(
            header=header,
            seconds=round(seconds, 3),
            complete=complete,
            trials=sum(counts.values()),
            counts=dict(counts),
            counts_by_op={op: dict(one) for op, one in sorted(by_op.items())},
            counts_by_mesh={},
            coverage={},
            findings=self.findings.findings if self.findings is not None else [],
            baseline=self.findings.statuses if self.findings is not None else [],
            untested=[
                *(UntestedRecord("combinations at level 1", reason, count) for reason, count in untested.items()),
                *skipped,
            ],
            matrices=[],
            graph=GraphRecord([], []),
            pool_restarts=0,
            seconds_by={},
            tool_errors=self.errors,
            rules=rules,
        )


def _is_alike(one: WrongRuleRecord, other: WrongRuleRecord) -> bool:
    """Return whether two records are of one failure: each wrong rule of an op that never runs shows it."""
    return one.fails and one.fingerprint == other.fingerprint and _rule_of(one) == _rule_of(other)


def _rule_of(record: WrongRuleRecord) -> tuple[str, list[str], list[str]]:
    return record.op, record.input_placements, record.output_placements


def _counts_by_op(records: Iterable[OpRulesRecord]) -> dict[str, Counter[str]]:
    """Return for each overload the number of rules by what came of them; each rule counts once."""
    seen: dict[str, dict[str, str]] = defaultdict(dict)
    for record in records:
        for texts, kind in ((record.confirmed, VerdictKind.PASS), (record.inconclusive, VerdictKind.INCONCLUSIVE)):
            for text in texts:
                seen[text.partition(":")[0]].setdefault(text, kind)
        for wrong in [*record.wrong, *record.unconfirmed]:
            text = f"{wrong.input_placements} -> {wrong.output_placements} {wrong.mesh}"
            if wrong.verdict == VerdictKind.STALE_CACHE:
                text = wrong.message  # the rule itself is true
            seen[wrong.op][text] = VerdictKind.INCONCLUSIVE if wrong.confirmed.unsure else wrong.verdict
    return {op: Counter(rules.values()) for op, rules in seen.items()}
