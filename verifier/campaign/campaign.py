"""What to run, within a budget.

A campaign has the known findings replayed, then lets Hypothesis draw cases for each mesh and family and tries their
combinations, then has what failed investigated. It announces all of it as events.
"""

from __future__ import annotations

import time

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase

from verifier.campaign.history import Past, case_digest, case_position
from verifier.campaign.investigation import Investigation
from verifier.campaign.outcomes import Outcomes
from verifier.campaign.plan import Plan
from verifier.core.arguments import combination_rows
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Observation
from verifier.core.verdict import Verdict
from verifier.events import (
    CaseSkipped,
    CaseStarted,
    Listener,
    MeshStarted,
    PoolRestarted,
    RulesClaimed,
    RunFinished,
    RunResumed,
    RunStarted,
    TrialRepeated,
)
from verifier.findings.failures import Drawn
from verifier.findings.shrinking import current_choices
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import Spares
from verifier.oracle.reference import make_reference
from verifier.placements.alphabet import Alphabet
from verifier.planning.families import DrawContext, Family
from verifier.planning.steering import Steering
from verifier.planning.trials import plan_case
from verifier.records.schema import INTERRUPTED, OUT_OF_TIME, KnownRecord
from verifier.torch_internals.placements import Combination

__all__ = ["Campaign"]

RESERVED_FOR_FINDINGS = 0.3
"""Part of the time of a mesh that exploring leaves to minimising."""
MOST_FOR_KNOWN = 0.5
"""Part of the time that replaying known findings may take: a run is for what is not known."""
LOOK_AT_CLOCK = 16
"""Under a time limit the clock is looked at after so many trials."""


class Campaign:
    """Runs a plan and tells ``emit`` of everything that happens.

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
        self._pools = PoolSet(self._make_pool)
        self._spares = (
            Spares(plan.imports, plan.rank_memory, eager=True)
            if plan.cluster is None
            else plan.cluster.spares(plan.imports, plan.rank_memory)
        )
        self._outcomes = Outcomes(emit)
        # ranks that torchrun has started have the hash seeds that it gave them
        self._spares_alike = Spares(plan.imports, plan.rank_memory, one_hash_seed=True)
        self._alike = PoolSet(self._make_alike_pool, keep=1) if plan.cluster is None else None
        self._investigation = Investigation(
            plan, self._past, self._outcomes, self._run_one, self._run_alike if self._alike is not None else None,
            self.emit, self._recall,
        )  # fmt: skip
        self._steering = Steering(plan.combinations // 2)
        self._until = float("inf")
        self._case_number = self._drawn = 0
        self._complete = self._past.complete

    @property
    def known(self) -> list[KnownRecord]:
        """What became of the baseline."""
        return self._investigation.known

    def run(self) -> None:
        """Run the whole plan. A Ctrl-C ends it early, with everything that is known by then."""
        started = time.monotonic() - self._past.seconds
        if self.plan.time_limit is not None:
            self._until = started + self.plan.time_limit
            self._investigation.until = started + self.plan.time_limit * MOST_FOR_KNOWN
        (self._recall if self._past.resumed else self.emit)(RunStarted(self.plan.header))
        if self._past.resumed:
            self.emit(RunResumed(len(self._past.trials), self._past.in_flight, self._past.torn))
        for restart in self._past.restarts:
            self._recall(restart)
        try:
            self._investigation.replay_known()
            for number, mesh in enumerate(self.plan.meshes):
                until = self._investigation.until = _first_part(self._until, len(self.plan.meshes) - number)
                self._explore(mesh, _first_part(until, 1, RESERVED_FOR_FINDINGS))
                self._investigation.investigate()
        except KeyboardInterrupt:
            self._complete = False
            self.emit(CaseSkipped("the rest of the run", INTERRUPTED))
        except Exception:
            self._complete = False
            raise
        finally:
            self._pools.close()
            self._spares.close()
            if self._alike is not None:
                self._alike.close()
            self._spares_alike.close()
            try:
                self._investigation.settle()
            finally:
                self.emit(RunFinished(time.monotonic() - started, self._complete))

    def _make_alike_pool(self, key: PoolKey) -> Pool:
        """Return a pool whose ranks all have one hash seed."""
        return self._make_pool(key, self._spares_alike)

    def _make_pool(self, key: PoolKey, spares: Spares | None = None) -> Pool:
        mesh = MeshSpec((key.world_size,), key.backend, key.device)  # type: ignore[arg-type]

        def restarted(reason: str, seconds: float) -> None:
            self.emit(PoolRestarted(mesh, reason, seconds))

        return Pool(
            key, self.plan.imports, self.plan.trial_limit, on_restart=restarted,
            memory_limit=self.plan.rank_memory, spares=spares or self._spares,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------- exploring
    def _explore(self, mesh: MeshSpec, until: float) -> None:
        """Draw cases of all families; of a broad one, as many of each op."""
        tried, past = 0, self._past
        units_of = {name: self._units(name) for name in self.plan.selected}
        left = sum(map(len, units_of.values()))
        for name, units in units_of.items():
            family = self.plan.families[name]
            begun = past.begun(mesh, family.name)
            (self._recall if begun else self.emit)(MeshStarted(mesh, family.name, self.plan.max_examples * len(units)))
            if not begun and time.monotonic() < until:  # what is left of a mesh that was begun may be nothing
                self._pools.of(mesh).start()
            for unit in units:
                last = self._case_number + self.plan.max_examples
                context = DrawContext(mesh, self.plan.dtypes, unit)
                # A broad family may take minutes to draw. Of a shard all is drawn, as the others plan on from it,
                # and of a resumed run, which cannot tell what had no time from what has no cases.
                if time.monotonic() >= until and self.plan.shard is None and not (past.resumed or past.explored):
                    self._tell_left(family, context, self.plan.max_examples)
                else:
                    tried += self._draw(family, context, _first_part(until, left), until)
                self._case_number = last  # a number means the same in every run, whatever becomes of the case
                left -= 1
        if not tried and time.monotonic() >= until:
            self._complete = False

    def _units(self, name: str) -> list[tuple[str, ...]]:
        """Return the ops that are selected of a family, those together of which cases are drawn together."""
        ops = self.plan.selected[name]
        return [(op,) for op in ops] if self.plan.families[name].broad else [ops]

    def _tell_left(self, family: Family, context: DrawContext, count: int) -> None:
        of = f" of {context.ops[0]}" if family.broad else ""
        self.emit(CaseSkipped(f"cases{of} on mesh {context.mesh}", OUT_OF_TIME, count))

    def _draw(self, family: Family, context: DrawContext, until: float, first_until: float) -> int:
        """Let Hypothesis draw cases for ``context`` and try them; return how many there was time for.

        The first one has until ``first_until``, or an op whose part is as short as its samples take would get nothing.
        """
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
        reached = max(past.cases, default=0)  # nothing but a time limit left out a case before this one
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
            self._case_number += 1
            self._drawn += 1
            if stopped:
                return
            if self.plan.shard is not None and not self.plan.shard.has(self._drawn):
                elsewhere += 1
                self._wanted(case, mesh)  # what other shards plan decides what this one plans next
                return
            given_up = over or self._case_number < reached or time.monotonic() >= (until if tried else first_until)
            if self._case_number not in past.cases and given_up:
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
            self._tell_left(family, context, max(1, self.plan.max_examples - tried - elsewhere))
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
            elif self._outcomes.affordable(trial, tell):
                waiting.append((position, trial))
        for position, observation, verdict in recalled:
            self._outcomes.keep(observation, verdict, drawn, position, self._recall)
        if waiting and (reason := self._outcomes.too_slow(waiting[0][1])):
            tell(CaseSkipped(f"{case.op} on mesh {mesh}", reason, len(waiting)))
            return
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
            killed = []
            for index, ((position, trial), observation) in enumerate(zip(now, observations, strict=True), 1):
                if observation.killed:
                    killed.append((position, trial))
                    continue
                self._outcomes.take(observation, reference, drawn, position)
                if reason := self._outcomes.too_slow(trial):
                    if left := len(now) - index + len(waiting):
                        self.emit(CaseSkipped(f"{case.op} on mesh {mesh}", reason, left))
                    waiting = []
                    break
            for position, trial in killed:
                self.emit(TrialRepeated(trial, combination_rows(case, trial.combination), position))
                self._outcomes.take(self._run_one(trial), reference, drawn, position)
            if waiting and time.monotonic() >= until:
                self.emit(CaseSkipped(f"{case.op} on mesh {mesh}", OUT_OF_TIME, len(waiting)))
                return

    def _wanted(self, case: OpCase, mesh: MeshSpec) -> tuple[list[Combination], Alphabet]:
        """Return what is wanted of a case, of which steering takes note, and what its tensors may begin with."""
        alphabet = self.plan.families[case.family].alphabet(case, mesh)
        return self._steering.wanted(case, mesh, alphabet), alphabet

    def _run_one(self, trial: Trial) -> Observation:
        (observation,) = self._pools.of(trial.mesh).run([trial], fresh=True)
        return observation

    def _run_alike(self, trial: Trial) -> Observation:
        assert self._alike is not None
        (observation,) = self._alike.of(trial.mesh).run([trial], fresh=True)
        return observation


def _first_part(until: float, parts: int, reserved: float = 0.0) -> float:
    """Return when the first of so many equal parts of what is left until ``until`` is over, less what is reserved."""
    now = time.monotonic()
    return now + max(0.0, until - now) / parts * (1 - reserved)
