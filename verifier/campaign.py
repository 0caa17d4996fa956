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
from verifier.cases import Combination, Fate, MeshSpec, Observation, OpCase, Trial, Verdict, VerdictKind
from verifier.codec import load_trial
from verifier.events import (
    CaseSkipped,
    CaseStarted,
    EntryStarted,
    FindingReported,
    GroupSettled,
    GroupStarted,
    Listener,
    MeshStarted,
    PoolRestarted,
    RulesClaimed,
    RunFinished,
    RunResumed,
    RunStarted,
    TrialFinished,
    TrialRepeated,
)
from verifier.families import DrawContext, Family
from verifier.finding_records import finding_record
from verifier.findings import Collector, Drawn, Failure, Group, fingerprint, group_key
from verifier.meshes import Cluster, Pool, PoolKey, PoolSet, Spares
from verifier.minimising import Minimiser, confirm
from verifier.oracle import judge
from verifier.past import Past, case_digest, case_position, entry_position
from verifier.placements import Alphabet
from verifier.records import NOT_SELECTED, FindingRecord, KnownRecord, RunHeader
from verifier.reference import Reference, make_reference
from verifier.shards import Shard
from verifier.shrinking import current_choices
from verifier.steering import Steering
from verifier.trials import combination_rows, plan_case
from verifier.wording import plural

__all__ = ["Campaign", "Plan"]

RESERVED_FOR_FINDINGS = 0.3
"""Share of the time limit that exploring leaves to minimising."""
OUT_OF_TIME = "not reached within the time limit"
LOOK_AT_CLOCK = 16
"""Under a time limit the clock is looked at after so many trials."""
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
    shard
        The part of the cases to try; None for all.
    rank_memory
        Bytes that a rank may map on top of what it has when it starts, or None.
    cluster
        Where the ranks are, if torchrun started them; None for processes of this machine.
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
    shard: Shard | None = None
    rank_memory: int | None = None
    cluster: Cluster | None = None


class Campaign:
    """Runs a plan and tells ``emit`` of everything that happens; :attr:`known` is what became of the baseline.

    Parameters
    ----------
    past
        What has been done of the plan already; only the rest is run.
    recall
        Is told of what comes from the past, in its place among the events; ``emit`` if it is not given.
    """

    def __init__(self, plan: Plan, emit: Listener, past: Past | None = None, recall: Listener | None = None) -> None:
        self.plan = plan
        self.emit = emit
        self._past = past or Past()
        self._recall = recall or emit
        self.known: list[KnownRecord] = []
        self._pools = PoolSet(self._make_pool)
        self._spares = (
            Spares(plan.imports, plan.rank_memory, eager=True)
            if plan.cluster is None
            else plan.cluster.spares(plan.imports, plan.rank_memory)
        )
        self._collector = Collector()
        self._known_groups: dict[str, BaselineEntry] = {}
        self._replayed: dict[str, Failure] = {}
        self._handled: dict[str, None] = {}
        self._found: dict[str, FindingRecord] = {}
        self._costly: dict[tuple[str, str, str], str] = {}
        self._steering = Steering(plan.combinations // 2)
        self._until = float("inf")
        self._case_number = 0
        self._complete = self._past.complete

    def run(self) -> None:
        """Run the whole plan. A Ctrl-C ends it early, with everything that is known by then."""
        started = time.monotonic() - self._past.seconds
        if self.plan.time_limit is not None:
            self._until = started + self.plan.time_limit
        (self._recall if self._past.resumed else self.emit)(RunStarted(self.plan.header))
        if self._past.resumed:
            self.emit(RunResumed(len(self._past.trials), self._past.in_flight, self._past.torn))
        for restart in self._past.restarts:
            self._recall(restart)
        try:
            self._replay_known()
            for number, mesh in enumerate(self.plan.meshes):
                self._explore(mesh, len(self.plan.meshes) - number)
                self._investigate()
        except KeyboardInterrupt:
            self._complete = False
            self.emit(CaseSkipped("the rest of the run", "interrupted"))
        except Exception:
            self._complete = False
            raise
        finally:
            self._pools.close()
            self._spares.close()
            try:
                self._settle_known()
            finally:
                self.emit(RunFinished(time.monotonic() - started, self._complete))

    def _make_pool(self, key: PoolKey) -> Pool:
        mesh = MeshSpec((key.world_size,), key.backend, key.device)  # type: ignore[arg-type]

        def restarted(reason: str, seconds: float) -> None:
            self.emit(PoolRestarted(mesh, reason, seconds))

        return Pool(
            key, self.plan.imports, self.plan.trial_limit, on_restart=restarted,
            memory_limit=self.plan.rank_memory, spares=self._spares,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------- exploring
    def _explore(self, mesh: MeshSpec, meshes_left: int) -> None:
        """Draw cases of all families; of a broad one, as many of each op."""
        until = self._until
        if self.plan.time_limit is not None:
            now = time.monotonic()
            until = now + max(0.0, self._until - now) / meshes_left * (1 - RESERVED_FOR_FINDINGS)
        tried = 0
        units_of = {name: self._units(name) for name in self.plan.selected}
        left = sum(map(len, units_of.values()))
        for name, units in units_of.items():
            family = self.plan.families[name]
            begun = self._past.begun(mesh, family.name)
            (self._recall if begun else self.emit)(MeshStarted(mesh, family.name, self.plan.max_examples * len(units)))
            if not begun:  # what is left of a mesh that was begun may be nothing
                self._pools.of(mesh).start()
            for unit in units:
                share = until
                if self.plan.time_limit is not None:  # each its part of what is left
                    share = time.monotonic() + max(0.0, until - time.monotonic()) / left
                left -= 1
                tried += self._draw(family, DrawContext(mesh, self.plan.dtypes, unit), share)
        if not tried and time.monotonic() > until:
            self._complete = False

    def _units(self, name: str) -> list[tuple[str, ...]]:
        """Return the ops that are selected of a family, those together of which cases are drawn together."""
        ops = self.plan.selected[name]
        return [(op,) for op in ops] if self.plan.families[name].broad else [ops]

    def _draw(self, family: Family, context: DrawContext, until: float) -> int:
        """Let Hypothesis draw cases for ``context`` and try them; return how many there was time for."""
        mesh, past = context.mesh, self._past
        over = past.over(mesh, family.name)
        pool = self._pools.of(mesh)
        for what, reason in family.left_out(context):
            self.emit(CaseSkipped(f"{what} on mesh {mesh}", reason))
        generator = family.cases(context)
        if generator.is_empty:
            return 0
        tried = elsewhere = 0
        out_of_time = False
        stopped: list[Exception] = []

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
        @hypothesis.given(generator)
        def explore(case: OpCase) -> None:
            nonlocal tried, elsewhere, out_of_time
            self._case_number += 1  # whatever becomes of the case, so that a number means the same in every run
            if stopped:
                return
            if self.plan.shard is not None and not self.plan.shard.has(self._case_number):
                elsewhere += 1
                self._wanted(case, mesh)  # what other shards plan decides what this one plans next
                return
            if self._case_number not in past.cases and (over or time.monotonic() > until):
                out_of_time = True
                if self.plan.shard is not None or past.explored:  # other shards plan it or planned on from it
                    self._wanted(case, mesh)
                return
            tried += 1
            try:
                self._try_case(case, mesh, pool, Drawn(context.ops, current_choices()), until)
            except Exception as error:  # noqa: BLE001 - Hypothesis would try the case again, to raise this from there
                stopped.append(error)

        explore()
        if stopped:
            raise stopped[0]
        if elsewhere:
            self.emit(CaseSkipped(f"cases on mesh {mesh}", f"left to other shards than {self.plan.shard}", elsewhere))
        if out_of_time:
            of = f" of {context.ops[0]}" if family.broad else ""
            left = max(1, self.plan.max_examples - tried - elsewhere)
            self.emit(CaseSkipped(f"cases{of} on mesh {mesh}", OUT_OF_TIME, left))
        return tried

    def _try_case(self, case: OpCase, mesh: MeshSpec, pool: Pool, drawn: Drawn, until: float) -> None:
        number = self._case_number
        reference = make_reference(case)
        seed = self.plan.seed + 1000 * number
        wanted, alphabet = self._wanted(case, mesh)
        plan = plan_case(case, reference, mesh, self.plan.combinations, seed, wanted, alphabet)
        started = CaseStarted(number, case, mesh, len(plan.trials), case_digest(case, plan.trials, drawn.choices))
        begun = self._past.has_case(started)
        tell = self._recall if begun else self.emit
        tell(started)
        if claimed := self._steering.news(case, mesh):
            tell(RulesClaimed(case.op, claimed))
        if plan.total > len(plan.trials):
            reason = "combinations beyond this profile's budget (pairwise sample taken)"
            tell(CaseSkipped(f"{case.op} on mesh {mesh}", reason, plan.total - len(plan.trials)))
        waiting: list[tuple[str, Trial]] = []
        recalled: list[tuple[str, Observation, Verdict]] = []
        for index, trial in enumerate(plan.trials, 1):
            position = case_position(number, index)
            if (result := self._past.result(position, trial)) is not None:
                recalled.append((position, *result))
            elif self._affordable(trial, tell):
                waiting.append((position, trial))
        for position, observation, verdict in recalled:
            self._keep(observation, verdict, drawn, position, self._recall)
        if waiting and self._past.explored:
            self.emit(CaseSkipped(f"{case.op} on mesh {mesh}", "not reached by its shard", len(waiting)))
            return
        if waiting and begun:
            if number < max(self._past.cases):  # only a time limit ends a case before its last trial
                tell(CaseSkipped(f"{case.op} on mesh {mesh}", OUT_OF_TIME, len(waiting)))
                return
            position, trial = waiting[0]
            self.emit(TrialRepeated(trial, combination_rows(case, trial.combination), position))
        at_once = len(waiting) if until == float("inf") else LOOK_AT_CLOCK
        while waiting:
            now, waiting = waiting[:at_once], waiting[at_once:]
            observations = pool.run([trial for _, trial in now])
            for (position, _), observation in zip(now, observations, strict=True):
                self._take(observation, reference, drawn, position)
            if waiting and time.monotonic() > until:
                self.emit(CaseSkipped(f"{case.op} on mesh {mesh}", OUT_OF_TIME, len(waiting)))
                return

    def _wanted(self, case: OpCase, mesh: MeshSpec) -> tuple[list[Combination], Alphabet]:
        """Return what to try first of a case, of which steering takes note, and what its tensors may begin with."""
        alphabet = self.plan.families[case.family].alphabet(case, mesh)
        return self._steering.wanted(case, mesh, alphabet), alphabet

    def _affordable(self, trial: Trial, tell: Listener) -> bool:
        """Return False for what has brought the ranks down before: each time costs new processes."""
        fate = self._costly.get(self._cost_key(trial))
        if fate is None:
            return True
        tell(CaseSkipped(f"{trial.case.op} on mesh {trial.mesh}", f"combination that ended {fate} before"))
        return False

    def _cost_key(self, trial: Trial) -> tuple[str, str, str]:
        """Return what trials share that bring the ranks down alike: the placements, mesh dim by mesh dim."""
        case, columns = trial.case, {tuple(map(str, column)) for column in zip(*trial.combination, strict=True)}
        called = f"{case.op} by {case.call}"  # a program is called for many ops
        return called, str(trial.mesh), " x ".join(",".join(column) for column in sorted(columns))

    def _take(
        self, observation: Observation, reference: Reference, drawn: Drawn | None, position: str
    ) -> tuple[Verdict, Failure | None]:
        """Judge an observation, announce it, keep it if it is bad."""
        verdict = judge(observation, reference)
        return verdict, self._keep(observation, verdict, drawn, position, self.emit)

    def _keep(
        self, observation: Observation, verdict: Verdict, drawn: Drawn | None, position: str, tell: Listener
    ) -> Failure | None:
        trial = observation.trial
        tell(TrialFinished(observation, verdict, combination_rows(trial.case, trial.combination), position))
        if observation.fate in (Fate.HANG, Fate.DIED):
            self._costly[self._cost_key(trial)] = observation.fate
        if not verdict.kind.bad:
            return None
        failure = Failure(trial, observation, verdict, drawn)
        self._collector.add(failure)
        return failure

    # -------------------------------------------------------------------------------------------------------- findings
    def _replay_known(self) -> None:
        """Run every entry of the baseline that is in scope again, and learn what its failures look like."""
        for entry in self.plan.baseline.entries:
            if not self._is_selected(entry):
                self.known.append(KnownRecord(entry.fingerprint, "untested", f"{entry.op} {NOT_SELECTED}"))
                continue
            trial = load_trial(entry.trial())
            if trial.mesh.device != self.plan.header.device:
                self.known.append(KnownRecord(entry.fingerprint, "untested", f"needs {trial.mesh.device}"))
                continue
            if self.plan.cluster is not None and trial.mesh.world_size > self.plan.cluster.world_size:
                needed = f"needs {trial.mesh.world_size} ranks, torchrun started {self.plan.cluster.world_size}"
                self.known.append(KnownRecord(entry.fingerprint, "untested", needed))
                continue
            position = entry_position(entry.fingerprint)
            if (result := self._past.result(position, trial)) is not None:
                verdict, failure = result[1], self._keep(*result, None, position, self._recall)
            else:
                self.emit(EntryStarted(entry.fingerprint))
                verdict, failure = self._take(self._run_one(trial), make_reference(trial.case), None, position)
            if failure is not None and failure.verdict.kind == entry.verdict:
                self._known_groups |= dict.fromkeys((*entry.groups, group_key(failure)), entry)
                self._replayed[entry.fingerprint] = failure
            elif verdict.kind is VerdictKind.PASS:
                self.known.append(KnownRecord(entry.fingerprint, "fixed", "passed when it was run again"))
            else:
                detail = f"was {verdict.kind} and not {entry.verdict} when it was run again: {verdict.message}"
                self.known.append(KnownRecord(entry.fingerprint, "untested", detail))

    def _is_selected(self, entry: BaselineEntry) -> bool:
        ops = self.plan.selected.get(entry.family)
        return ops is not None and self.plan.families[entry.family].covers(ops, entry.op)

    def _settle_known(self) -> None:
        """Report each known finding that showed: as it was stored, with all groups that turned out to be it."""
        for fingerprint_, failure in self._replayed.items():
            groups = [g for key, g in self._collector.groups.items() if self._is_entry(key, fingerprint_)]
            merged = Group(group_key(failure), failure, sum(group.occurrences for group in groups))
            for group in groups:
                merged.seen.update(group.seen)
            self.known.append(KnownRecord(fingerprint_, "known", f"in {plural(merged.occurrences, 'trial')}"))
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
            if self._recall_group(key):
                continue
            self.emit(GroupStarted(key))
            until = min(self._until, time.monotonic() + MINIMISING_LIMIT)
            minimiser = Minimiser(self._run_one, self._generator(group.smallest), self.plan.seed, until)
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
                self._is_seen(entry, key, smallest)
                self.emit(GroupSettled(key, entry.fingerprint))
                continue
            self._handled[known_group] = None
            if name not in self._found:
                found = self._found[name] = self._record(group, smallest, confirmed, minimised, None)
            else:  # another way to the same defect
                found = replace(self._found[name], occurrences=group.occurrences, also=list(group.seen), groups=[key])
            self.emit(FindingReported(found, key, known_group))

    def _is_seen(self, entry: BaselineEntry, key: str, failure: Failure) -> None:
        """Take a group for a known finding, which another op may have shown than that of its entry."""
        self._known_groups[key] = entry
        if entry.fingerprint not in self._replayed:
            self._replayed[entry.fingerprint] = failure
            self.known = [known for known in self.known if known.fingerprint != entry.fingerprint]

    def _recall_group(self, key: str) -> bool:
        """Take what the group ``key`` turned out to be from the past; return whether that is known."""
        settled = self._past.groups.get(key)
        if settled is None:
            return False
        if settled.finding is None:
            entry = self.plan.baseline.get(settled.entry)
            assert entry is not None, f"{settled.entry} is not in the baseline that the run began with"
            self._is_seen(entry, key, self._collector.groups[key].smallest)
            return True
        self._handled[settled.became] = None
        self._found.setdefault(settled.finding.fingerprint, settled.finding)
        self._recall(FindingReported(settled.finding, key, settled.became))
        return True

    def _record(
        self, group: Group, smallest: Failure, confirmed: str, minimised: bool, entry: BaselineEntry | None
    ) -> FindingRecord:
        family = self.plan.families[smallest.trial.case.family]
        cause = family.likely_cause(smallest.trial, smallest.verdict)
        # the script has torch's own rules, and says nothing about those of the user's files
        worth_it = not self.plan.imports and time.monotonic() < self._until
        return finding_record(
            group, smallest, confirmed, minimised, entry, family.name, cause, worth_it, self.plan.imports,
            memory_limit=self.plan.rank_memory,
        )  # fmt: skip

    def _generator(self, failure: Failure) -> Callable[[MeshSpec], SearchStrategy[OpCase]] | None:
        """Return what draws cases like that of ``failure``; None for a family whose cases are small as drawn."""
        family = self.plan.families[failure.trial.case.family]
        if not family.shrinks:
            return None
        # the same ops as when it was drawn, so that the same choices draw the same case
        ops = self.plan.selected[family.name] if failure.drawn is None else failure.drawn.ops
        return lambda mesh: family.cases(DrawContext(mesh, self.plan.dtypes, ops))

    def _run_one(self, trial: Trial) -> Observation:
        (observation,) = self._pools.of(trial.mesh).run([trial], fresh=True)
        return observation
