"""What to run, within a budget, and what becomes of what fails.

A campaign replays the known findings, then lets Hypothesis draw cases for each mesh and family and tries their
combinations, then minimises and confirms one failure of each group that is not known. It announces all of it as events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import hypothesis
import torch
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis.strategies import SearchStrategy

from verifier.baseline import Baseline, BaselineEntry
from verifier.cases import Fate, MeshSpec, Observation, OpCase, Trial, Verdict, VerdictKind
from verifier.codec import load_trial
from verifier.events import (
    CaseSkipped,
    FindingReported,
    Listener,
    MeshStarted,
    PoolRestarted,
    RunFinished,
    RunStarted,
    TrialFinished,
)
from verifier.families import DrawContext, Family
from verifier.finding_records import finding_record
from verifier.findings import Collector, Failure, Group, Minimiser, confirm, fingerprint, group_key
from verifier.meshes import Pool, PoolKey, PoolSet
from verifier.oracle import Reference, judge, make_reference
from verifier.records import FindingRecord, KnownRecord, RunHeader
from verifier.shrinking import current_choices
from verifier.trials import combination_rows, plan_case

__all__ = ["Campaign", "Plan"]

RESERVED_FOR_FINDINGS = 0.3
"""Share of the time limit that exploring leaves to minimising."""
MINIMISING_LIMIT = 20.0
"""Seconds after which a failure is reported as small as it is by then."""


@dataclass(frozen=True)
class Plan:
    """Everything that decides what a campaign does.

    Parameters
    ----------
    selected
        The ops to draw, by family name.
    combinations
        At most so many combinations of a case; the rest is a pairwise sample.
    time_limit
        Seconds for the whole campaign, or None.
    """

    header: RunHeader
    families: dict[str, Family]
    selected: dict[str, tuple[str, ...]]
    meshes: tuple[MeshSpec, ...]
    dtypes: tuple[torch.dtype, ...]
    seed: int
    max_examples: int
    combinations: int
    time_limit: float | None
    imports: tuple[str, ...] = ()
    baseline: Baseline = field(default_factory=Baseline)
    trial_limit: float = 20.0


class Campaign:
    """Runs a plan and tells ``emit`` of everything that happens; :attr:`known` is what became of the baseline."""

    def __init__(self, plan: Plan, emit: Listener) -> None:
        self.plan = plan
        self.emit = emit
        self.known: list[KnownRecord] = []
        self._pools = PoolSet(self._make_pool)
        self._collector = Collector()
        self._known_groups: dict[str, BaselineEntry] = {}
        self._replayed: dict[str, Failure] = {}
        self._handled: dict[str, None] = {}
        self._found: dict[str, FindingRecord] = {}
        self._costly: dict[tuple[str, str, str], str] = {}
        self._until = float("inf")
        self._case_number = 0
        self._complete = True

    def run(self) -> None:
        """Run the whole plan. A Ctrl-C ends it early, with everything that is known by then."""
        started = time.monotonic()
        if self.plan.time_limit is not None:
            self._until = started + self.plan.time_limit
        self.emit(RunStarted(self.plan.header))
        try:
            self._replay_known()
            for number, mesh in enumerate(self.plan.meshes):
                for name, ops in self.plan.selected.items():
                    self._explore(mesh, self.plan.families[name], ops, len(self.plan.meshes) - number)
                self._investigate()
        except KeyboardInterrupt:
            self._complete = False
            self.emit(CaseSkipped("the rest of the run", "interrupted"))
        finally:
            self._pools.close()
            self._settle_known()
            self.emit(RunFinished(time.monotonic() - started, self._complete))

    def _make_pool(self, key: PoolKey) -> Pool:
        mesh = MeshSpec((key.world_size,), key.backend, key.device)  # type: ignore[arg-type]

        def restarted(reason: str, seconds: float) -> None:
            self.emit(PoolRestarted(mesh, reason, seconds))

        return Pool(key, self.plan.imports, self.plan.trial_limit, on_restart=restarted)

    # ------------------------------------------------------------------------------------------------------- exploring
    def _explore(self, mesh: MeshSpec, family: Family, ops: tuple[str, ...], meshes_left: int) -> None:
        context = DrawContext(mesh, self.plan.dtypes, ops)
        self.emit(MeshStarted(mesh, family.name, self.plan.max_examples))
        pool = self._pools.of(mesh)
        pool.start()
        until = self._until
        if self.plan.time_limit is not None:
            now = time.monotonic()
            until = now + max(0.0, self._until - now) / meshes_left * (1 - RESERVED_FOR_FINDINGS)
        tried = 0
        out_of_time = False

        @hypothesis.seed(self.plan.seed)
        @settings(
            max_examples=self.plan.max_examples,
            database=None,
            deadline=None,
            phases=(HypothesisPhase.generate,),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            derandomize=False,
            print_blob=False,
        )
        @hypothesis.given(family.cases(context))
        def explore(case: OpCase) -> None:
            nonlocal tried, out_of_time
            if time.monotonic() > until:
                out_of_time = True
                return
            tried += 1
            self._try_case(case, mesh, pool, current_choices())

        explore()
        if out_of_time:
            self.emit(CaseSkipped(f"cases on mesh {mesh}", "not reached within the time limit", max(
                1, self.plan.max_examples - tried)))  # fmt: skip
            if not tried:
                self._complete = False

    def _try_case(self, case: OpCase, mesh: MeshSpec, pool: Pool, choices: bytes) -> None:
        self._case_number += 1
        reference = make_reference(case)
        seed = self.plan.seed + 1000 * self._case_number
        choose = getattr(self.plan.families[case.family], "alphabet", None)  # a family need not have it
        alphabet = choose and choose(case, mesh)
        plan = plan_case(case, reference, mesh, self.plan.combinations, seed, alphabet)
        if plan.total > len(plan.trials):
            reason = "combinations beyond this profile's budget (pairwise sample taken)"
            self.emit(CaseSkipped(f"{case.op} on mesh {mesh}", reason, plan.total - len(plan.trials)))
        trials = [trial for trial in plan.trials if self._affordable(trial)]
        for observation in pool.run(trials):
            self._take(observation, reference, choices)

    def _affordable(self, trial: Trial) -> bool:
        """Return False for what has brought the ranks down before: each time costs new processes."""
        fate = self._costly.get(self._cost_key(trial))
        if fate is None:
            return True
        self.emit(CaseSkipped(f"{trial.case.op} on mesh {trial.mesh}", f"combination that ended {fate} before"))
        return False

    def _cost_key(self, trial: Trial) -> tuple[str, str, str]:
        """Return what trials share that bring the ranks down alike: the placements, mesh dim by mesh dim."""
        columns = {tuple(map(str, column)) for column in zip(*trial.combination, strict=True)}
        return trial.case.call, str(trial.mesh), " x ".join(",".join(column) for column in sorted(columns))

    def _take(
        self, observation: Observation, reference: Reference, choices: bytes | None = None
    ) -> tuple[Verdict, Failure | None]:
        """Judge an observation, announce it, keep it if it is bad."""
        trial = observation.trial
        verdict = judge(observation, reference)
        self.emit(TrialFinished(observation, verdict, combination_rows(trial.case, trial.combination)))
        if observation.fate in (Fate.HANG, Fate.DIED):
            self._costly[self._cost_key(trial)] = observation.fate
        if not verdict.kind.bad:
            return verdict, None
        failure = Failure(trial, observation, verdict, choices)
        self._collector.add(failure)
        return verdict, failure

    # -------------------------------------------------------------------------------------------------------- findings
    def _replay_known(self) -> None:
        """Run every entry of the baseline that is in scope again, and learn what its failures look like."""
        for entry in self.plan.baseline.entries:
            if entry.op not in self.plan.selected.get(entry.family, ()):
                self.known.append(KnownRecord(entry.fingerprint, "untested", f"{entry.op} is not selected"))
                continue
            trial = load_trial(entry.trial())
            if trial.mesh.device != self.plan.header.device:
                self.known.append(KnownRecord(entry.fingerprint, "untested", f"needs {trial.mesh.device}"))
                continue
            (observation,) = self._pools.of(trial.mesh).run([trial])
            verdict, failure = self._take(observation, make_reference(trial.case))
            if failure is not None and failure.verdict.kind == entry.verdict:
                self._known_groups |= dict.fromkeys((*entry.groups, group_key(failure)), entry)
                self._replayed[entry.fingerprint] = failure
            elif verdict.kind is VerdictKind.PASS:
                self.known.append(KnownRecord(entry.fingerprint, "fixed", "passed when it was run again"))
            else:
                detail = f"was {verdict.kind} and not {entry.verdict} when it was run again: {verdict.message}"
                self.known.append(KnownRecord(entry.fingerprint, "untested", detail))

    def _settle_known(self) -> None:
        """Report each known finding that showed: as it was stored, with all groups that turned out to be it."""
        for fingerprint_, failure in self._replayed.items():
            groups = [g for key, g in self._collector.groups.items() if self._is_entry(key, fingerprint_)]
            merged = Group(group_key(failure), failure, sum(group.occurrences for group in groups))
            for group in groups:
                merged.seen.update(group.seen)
            self.known.append(KnownRecord(fingerprint_, "known", f"in {merged.occurrences} trials"))
            mesh = failure.trial.mesh
            where = f"confirmed on {mesh.backend}, {mesh.world_size} rank{'s' * (mesh.world_size != 1)}"
            entry = self.plan.baseline.get(fingerprint_)
            found = self._record(merged, failure, where, True, entry)
            self.emit(FindingReported(replace(found, groups=sorted(group.key for group in groups))))

    def _is_handled(self, failure: Failure) -> bool:
        key = group_key(failure)
        return key in self._known_groups or fingerprint(failure) in self._found

    def _is_entry(self, key: str, fingerprint_: str) -> bool:
        entry = self._known_groups.get(key)
        return entry is not None and entry.fingerprint == fingerprint_

    def _investigate(self) -> None:
        """Turn each group of failures that is not known into a finding."""
        in_order = sorted(self._collector.groups.items(), key=lambda item: (item[1].smallest.size[:2], len(item[0])))
        for key, group in in_order:  # simple ones first: what looks more complicated often turns out to be one of them
            if key in self._known_groups or key in self._handled:
                continue
            self._handled[key] = None
            family = next(f for f in self.plan.families.values() if group.smallest.trial.case.op in f.ops)
            until = min(self._until, time.monotonic() + MINIMISING_LIMIT)
            minimiser = Minimiser(self._run_one, self._generator(family), self.plan.seed, until)
            smallest, minimised = minimiser.minimise(group.smallest, self._is_handled)
            if time.monotonic() > self._until:
                self.emit(CaseSkipped("findings", "minimised no further within the time limit"))
            smallest, confirmed = confirm(smallest, minimiser)
            name = fingerprint(smallest)
            entry = self.plan.baseline.get(name)
            known_group = group_key(smallest)
            if entry is None and known_group in self._known_groups:
                entry = self._known_groups[known_group]
            if entry is not None:
                self._known_groups[key] = entry
                continue
            self._handled[known_group] = None
            if name not in self._found:
                self._found[name] = self._record(group, smallest, confirmed, minimised, None)
                self.emit(FindingReported(self._found[name]))
            else:  # another way to the same defect
                again = replace(self._found[name], occurrences=group.occurrences, also=list(group.seen), groups=[key])
                self.emit(FindingReported(again))

    def _record(
        self, group: Group, smallest: Failure, confirmed: str, minimised: bool, entry: BaselineEntry | None
    ) -> FindingRecord:
        family = next(f for f in self.plan.families.values() if smallest.trial.case.op in f.ops)
        cause = family.likely_cause(smallest.trial, smallest.verdict)
        # the script has torch's own rules, and says nothing about those of the user's files
        worth_it = not self.plan.imports and time.monotonic() < self._until
        return finding_record(
            group, smallest, confirmed, minimised, entry, family.name, cause, worth_it, self.plan.imports
        )

    def _generator(self, family: Family) -> Callable[[OpCase, MeshSpec], SearchStrategy[OpCase]]:
        ops = self.plan.selected[family.name]

        def generate(case: OpCase, mesh: MeshSpec) -> SearchStrategy[OpCase]:
            # the same ops as when it was drawn, so that the same choices draw the same case
            return family.cases(DrawContext(mesh, self.plan.dtypes, ops))

        return generate

    def _run_one(self, trial: Trial) -> Observation:
        (observation,) = self._pools.of(trial.mesh).run([trial])
        return observation
