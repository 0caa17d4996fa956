"""Makes a recorded run of the rule check: plans it, runs it in workers, confirms what is wrong, stores all of it."""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import torch

from verifier.baseline import Baseline
from verifier.cases import MeshSpec, Observation, Trial, VerdictKind
from verifier.imports import imports_beside, modules_of_rules, own_rules, run_imports_with_warnings
from verifier.interrupts import RunInterrupted, one_interrupt_at_a_time
from verifier.journal import RunWriter
from verifier.meshes import Pool, PoolKey, PoolSet
from verifier.recording import versions
from verifier.records import (
    GraphRecord,
    OpRulesRecord,
    RulesRecord,
    RunHeader,
    RunRecord,
    UntestedRecord,
    WrongRuleRecord,
)
from verifier.revision import BASELINE, revision
from verifier.rules.check import CheckOptions
from verifier.rules.collect import op_record, wrong_rules
from verifier.rules.confirm import Confirmer
from verifier.rules.results import SampleReport
from verifier.rules.samples import SampleOptions, Target, installed_sources
from verifier.rules.work import WorkItem, check_target, prepare
from verifier.rules.workers import Died, Failed, Finished, GaveUp, Outcome, Part, WorkerSet
from verifier.runs import RunStore, new_run_id
from verifier.wording import did_you_mean

__all__ = ["MAX_JOBS", "RulesPlan", "RulesRequest", "make_rules_plan", "record_rules"]

DEFAULT_WORLD_SIZES = (2, 3)
DEFAULT_MESHES = ("2x2",)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_SIZES = 5
MAX_JOBS = 256
TRIAL_LIMIT = 8.0
FEW, PARTS_OF_FEW = 24, 4
"""So few ops are shared out among the workers, each in so many parts; of more ops each worker has some to itself."""

Progress = Callable[[int, int, str, OpRulesRecord | None], None]
"""Told of each op that has been checked: how many are, of how many, its name, and what came of it."""


@dataclass(frozen=True)
class RulesRequest:
    """What a user asked for, as text; :func:`make_rules_plan` checks it."""

    patterns: Sequence[str] = ()
    world_sizes: str | None = None
    meshes: Sequence[str] = ()
    dtype: str = "float64"
    max_samples: int = 8
    sizes: int = 3
    seed: int = 0
    claims_only: bool = False
    jobs: int | None = None
    imports: Sequence[str] = ()
    command: str = ""
    products: int | None = None


@dataclass(frozen=True)
class RulesPlan:
    """Everything that decides what a rule check does, and on how many workers."""

    header: RunHeader
    targets: tuple[Target, ...]
    samples: SampleOptions
    check: CheckOptions
    jobs: int
    baseline: Baseline = field(default_factory=Baseline)


def make_rules_plan(request: RulesRequest, baseline: Baseline) -> RulesPlan:
    """Return the plan for ``request``.

    Raises
    ------
    ValueError
        If anything in it does not exist or does not fit, with the nearest valid name.
    """
    run_imports_with_warnings(request.imports)
    if request.dtype not in DTYPES:
        hint = did_you_mean(request.dtype, DTYPES)
        raise ValueError(f"dtype {request.dtype!r} is none of {', '.join(DTYPES)}{hint}")
    for name, value, least, most in (
        ("--max-samples", request.max_samples, 1, None),
        ("--sizes", request.sizes, 1, MAX_SIZES),
        ("--products", request.products if request.products is not None else 0, 0, None),
        ("--jobs", request.jobs if request.jobs is not None else 1, 0, MAX_JOBS),
    ):
        if value < least or (most is not None and value > most):
            limits = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{name} {value}: must be {limits}")
    meshes = _meshes(request)
    if request.products is not None and all(mesh.ndim == 1 for mesh in meshes):
        raise ValueError(f"--products {request.products}: no mesh has several dims; add one, as --mesh 2x2")
    check = CheckOptions(meshes, request.sizes, request.seed, request.claims_only)
    if request.products is not None:
        check = replace(check, products=request.products, samples_with_products=request.max_samples)
    with imports_beside(request.imports) as imports:
        targets = _targets(request.patterns)
    own = own_rules()
    header = RunHeader(
        id=new_run_id(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=request.seed,
        profile="rules",
        families=sorted({target.source for target in targets}),
        meshes=[str(mesh) for mesh in meshes],
        dtypes=[request.dtype],
        device="cpu",
        max_examples=request.max_samples,
        time_limit=None,
        imports=imports,
        versions=versions(),
        command=request.command,
        digests={BASELINE: baseline.digest, **revision(imports, modules_of_rules())},
        own_rules=own,
    )
    return RulesPlan(
        header=header,
        targets=targets,
        samples=SampleOptions(DTYPES[request.dtype], request.sizes, request.max_samples, request.seed),
        check=check,
        jobs=request.jobs if request.jobs is not None else len(os.sched_getaffinity(0)),
        baseline=baseline.about(imports, own),
    )


def _meshes(request: RulesRequest) -> tuple[MeshSpec, ...]:
    """Return the meshes, those of one dim first; the default mesh of two dims only where nothing was asked for."""
    sizes: tuple[int, ...] = DEFAULT_WORLD_SIZES
    if request.world_sizes is not None:
        parts = [part.strip() for part in request.world_sizes.split(",")]
        if not all(part.isdigit() for part in parts):
            raise ValueError(f"--world-size {request.world_sizes!r} is not a list of numbers such as 2,3,4")
        sizes = tuple(int(part) for part in parts)
    for size in sizes:
        if not 2 <= size <= 16:
            raise ValueError(f"--world-size {size}: level 1 checks meshes of 2 to 16 ranks")
    asked = bool(request.meshes) or request.world_sizes is not None
    meshes = [MeshSpec((size,)) for size in sizes]
    for text in request.meshes if asked else DEFAULT_MESHES:
        mesh = MeshSpec.parse(text)
        if mesh.backend != "gloo":
            raise ValueError(f"--mesh {text}: level 1 runs no collectives; give a shape such as 2x2")
        if min(mesh.shape) < 2 or mesh.world_size > 16:
            raise ValueError(f"--mesh {text}: level 1 checks meshes of 2 to 16 ranks, with 2 or more on each mesh dim")
        meshes.append(mesh)
    unique = dict.fromkeys(meshes)
    return tuple(sorted(unique, key=lambda mesh: mesh.ndim))


def _targets(patterns: Sequence[str]) -> tuple[Target, ...]:
    sources = installed_sources()
    if not sources:
        raise ValueError("no source of samples is installed; install the distribution (pip install -e .)")
    if not patterns:
        return tuple(target for source in sources.values() for target in source.select(()))
    targets: dict[Target, None] = {}
    for pattern in patterns:
        errors: dict[str, ValueError] = {}
        for name, source in sources.items():
            try:
                targets |= dict.fromkeys(source.select((pattern,)))
            except ValueError as error:
                errors[name] = error
        if len(errors) == len(sources):  # a source that has the name of a namespace knows best what is in that
            raise errors.get(pattern.partition(".")[0]) or next(iter(errors.values()))
    return tuple(targets)


# ------------------------------------------------------------------------------------------------------------ recording
@dataclass
class _Op:
    """What has come back of one target so far: ``unfinished`` counts the parts that have more to come."""

    unfinished: int
    by_number: dict[int, SampleReport] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    died: list[str] = field(default_factory=list)
    record: OpRulesRecord | None = None

    @property
    def reports(self) -> list[SampleReport]:
        """The reports of the samples, in the order of the samples whoever made them."""
        return [self.by_number[number] for number in sorted(self.by_number)]


def record_rules(plan: RulesPlan, store: RunStore, progress: Progress = lambda *_: None) -> RunRecord:
    """Run ``plan`` and store what came of it; the journal has a line for each op as it is done.

    A Ctrl-C ends the run early: what has been checked by then is stored, as incomplete.

    Raises
    ------
    RunInterrupted
        If a second one comes while the first one ends the run; the journal is kept.
    """
    started = time.monotonic()
    with store.open_run(plan.header) as writer, one_interrupt_at_a_time():
        try:
            run = _RulesRun(plan, writer, progress)
            complete = True
            try:
                run.check()
            except KeyboardInterrupt:
                complete = False
            record = run.finish(complete, time.monotonic() - started)
            writer.finish(record)
        except KeyboardInterrupt:
            kept = f"what was checked is listed in {writer.journal_path}"
            raise RunInterrupted(f"interrupted before the record was written; {kept}") from None
    return record


class _RulesRun:
    def __init__(self, plan: RulesPlan, writer: RunWriter, progress: Progress) -> None:
        self.plan, self.writer, self.progress = plan, writer, progress
        self.parts = PARTS_OF_FEW if len(plan.targets) <= FEW else 1
        self.ops = [_Op(self.parts) for _ in plan.targets]
        self.errors: list[str] = []
        self.done = 0
        self.seconds = self.starting = self.confirming = 0.0
        self.findings: Confirmer | None = None

    def check(self) -> None:
        """Check every target, then confirm what is wrong."""
        plan = self.plan
        items = [
            WorkItem(target, plan.samples, plan.check, part, self.parts)
            for target in plan.targets
            for part in range(self.parts)
        ]
        began = time.monotonic()
        with WorkerSet(min(plan.jobs, len(items)), plan.header.imports, prepare=prepare) as workers:
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
        index, part = divmod(outcome.item, self.parts)
        op, name = self.ops[index], self.plan.targets[index].name
        match outcome:
            case Part(ordinal=ordinal, result=report):
                op.by_number[ordinal * self.parts + part] = report
                return
            case Died(how=how, detail=detail, position=position):
                where = f"sample {position[0]}"
                op.died.append(f"{name}, {where}: {how}" + (f": {detail}" if detail else ""))
                return
            case GaveUp(why=why):
                op.given_up.append(f"samples after the crash were not reached: {why}")
            case Failed(traceback=text):
                self.errors.append(f"{name}: {text.strip()}")
            case Finished():
                pass
        op.unfinished -= 1
        if op.unfinished:
            return
        self.done += 1
        op.record = self._op_record(op, [])
        self.writer.append({
            "event": "OpChecked", "op": name, "combinations": op.record.combinations,
            "confirmed": len(op.record.confirmed), "wrong": len(wrong_rules(op.reports)),
            "missing": len(op.record.missing), "seconds": op.record.seconds,
        })  # fmt: skip
        self.progress(self.done, len(self.ops), name, op.record)

    @staticmethod
    def _op_record(op: _Op, wrong: Sequence[WrongRuleRecord]) -> OpRulesRecord:
        return op_record(op.reports, wrong, op.given_up, op.died)

    # ------------------------------------------------------------------------------------------------------- confirming
    def _confirm(self) -> None:
        """Run counterexamples, and the baseline's entries, on real processes."""
        tried = {report.op for op in self.ops for report in op.reports}
        pools = PoolSet(self._make_pool)

        def run(trial: Trial) -> Observation:
            (observation,) = pools.of(trial.mesh).run([trial], fresh=True)
            return observation

        header = self.plan.header
        self.findings = Confirmer(run, self.plan.baseline, header.families, tuple(header.imports))
        try:
            self.findings.replay_known(tried)
            records: list[list[WrongRuleRecord]] = [[] for _ in self.ops]
            wrong = [wrong_rules(op.reports) for op in self.ops]
            for flat in (True, False):
                for target, found, own in zip(self.plan.targets, wrong, records, strict=True):
                    own += self.findings.confirm([one for one in found if ("x" not in one.mesh) is flat], target.source)
            self.findings.settle()
            for op, own in zip(self.ops, records, strict=True):
                op.record = self._op_record(op, [self._withdrawn(record) for record in own])
        except Exception:  # noqa: BLE001 - what has been checked must not be lost; becomes an error of ours
            self.errors.append(traceback.format_exc().strip())
        finally:
            self.errors += self.findings.errors
            pools.close()

    def _withdrawn(self, record: WrongRuleRecord) -> WrongRuleRecord:
        """Return the record without its accusation, if the script of its finding does not show the defect."""
        assert self.findings is not None
        if record.fingerprint not in self.findings.withdrawn:
            return record
        return replace(record, confirmed="unconfirmed: the stand-alone script does not show it", fingerprint="")

    def _make_pool(self, key: PoolKey) -> Pool:
        return Pool(key, tuple(self.plan.header.imports), TRIAL_LIMIT)

    # ------------------------------------------------------------------------------------------------------- the whole
    def finish(self, complete: bool, seconds: float) -> RunRecord:
        plan, header = self.plan, self.plan.header
        records = {
            target.name: op.record if op.record is not None else self._op_record(op, [])
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
        counts: Counter[str] = Counter()
        for one in by_op.values():
            counts.update(one)
        untested: Counter[str] = Counter()
        for record in records.values():
            untested.update(record.untested)
        not_reached = [target.name for target in plan.targets if target.name not in records]
        skipped = [UntestedRecord(name, "no call of it reaches a rule", 1) for name in not_reached]
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


def _counts_by_op(records: Iterable[OpRulesRecord]) -> dict[str, Counter[str]]:
    """Return for each overload the number of rules by what came of them; each rule counts once."""
    seen: dict[str, dict[str, str]] = defaultdict(dict)
    for record in records:
        for text in record.confirmed:
            seen[text.partition(":")[0]].setdefault(text, VerdictKind.PASS)
        for text in record.inconclusive:
            seen[text.partition(":")[0]].setdefault(text, VerdictKind.INCONCLUSIVE)
        for wrong in record.wrong:
            seen[wrong.op][f"{wrong.input_placements} -> {wrong.output_placements} {wrong.mesh}"] = wrong.verdict
        for wrong in record.unconfirmed:
            text = f"{wrong.input_placements} -> {wrong.output_placements} {wrong.mesh}"
            seen[wrong.op][text] = VerdictKind.INCONCLUSIVE
    return {op: Counter(rules.values()) for op, rules in seen.items()}
