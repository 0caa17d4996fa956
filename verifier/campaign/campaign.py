"""Runs a plan within a budget, and announces everything as events.

A campaign replays the known findings. For each mesh it then draws cases of each family with Hypothesis, tries
combinations of placements, and investigates the failures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import hypothesis

from verifier.campaign.hash_seed import HashSeed
from verifier.campaign.history import Past, case_digest, case_position
from verifier.campaign.investigation import Investigation
from verifier.campaign.outcomes import Outcomes
from verifier.campaign.plan import Plan
from verifier.campaign.remembering import RememberingPool
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.wording import NO_SAMPLES
from verifier.events import CaseSkipped, CaseStarted, Listener, MeshStarted, RulesClaimed, RunFinished
from verifier.findings.attribution import Attribution
from verifier.findings.failures import Drawn
from verifier.findings.shrinking import DRAWING, current_choices
from verifier.meshes.pool import PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import Reference, make_reference
from verifier.placements.alphabet import Alphabet
from verifier.planning.families import DrawContext, Family, budget_of
from verifier.planning.steering import Steering
from verifier.planning.trials import plan_case
from verifier.records.schema import INTERRUPTED, OUT_OF_TIME, KnownRecord
from verifier.torch_internals.placements import Combination

__all__ = ["Campaign"]

RESERVED_FOR_FINDINGS = 0.3
"""The share of a mesh's time that is reserved for minimising."""
MOST_FOR_KNOWN = 0.5
"""The largest share of the time for replaying known findings, because a run is meant to find new ones."""
LOOK_AT_CLOCK = 16
"""Number of trials between two looks at the clock, under a time limit."""


class Campaign:
    """Runs a plan and tells ``emit`` of everything that happens.

    Parameters
    ----------
    pools
        The ranks, by mesh; the campaign closes them at its end.
    past
        The part of the plan that was already run; only the rest is run.
    alike
        Ranks that all have one hash seed, closed with ``pools``; None if there are none.
    clock
        Returns seconds, as ``time.monotonic`` does.
    """

    def __init__(
        self,
        plan: Plan,
        pools: PoolSet,
        emit: Listener,
        past: Past | None = None,
        alike: PoolSet | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.emit = emit
        self._past = past or Past()
        self._pools, self._alike, self._clock = pools, alike, clock
        self._pool = RememberingPool(pools, self._past, emit)
        self._outcomes = Outcomes(emit)
        diagnoses = [] if alike is None else [HashSeed(pools.run_alone, alike.run_alone)]
        attribution = None
        if plan.baseline.causes:
            attribution = Attribution.of(plan.baseline, lambda trial, remedies: run_remedied(pools, trial, remedies))
        self._investigation = Investigation(
            plan, self._past, self._outcomes, pools.run_alone, emit, diagnoses, clock, attribution
        )
        self._steering = Steering(plan.combinations // 2)
        self._until = float("inf")
        self._case_number = self._drawn = 0
        self._complete = self._past.complete

    @property
    def known(self) -> list[KnownRecord]:
        """The outcome of each entry of the baseline."""
        return self._investigation.known

    def run(self) -> None:
        """Run the whole plan. A Ctrl-C ends it early, and all results up to then are kept."""
        started = self._clock() - self._past.seconds
        if self.plan.time_limit is not None:
            self._until = started + self.plan.time_limit
            self._investigation.until = started + self.plan.time_limit * MOST_FOR_KNOWN
        for event in self._past.opening(self.plan.header):
            self.emit(event)
        for op in self.plan.without_samples:
            self.emit(CaseSkipped(op, NO_SAMPLES, recalled=self._past.resumed))
        try:
            self._investigation.replay_known()
            for number, mesh in enumerate(self.plan.meshes):
                until = self._investigation.until = self._first_part(self._until, len(self.plan.meshes) - number)
                self._explore(mesh, self._first_part(until, 1, RESERVED_FOR_FINDINGS))
                self._investigation.investigate()
        except KeyboardInterrupt:
            self._complete = False
            self.emit(CaseSkipped("the rest of the run", INTERRUPTED))
        except Exception:
            self._complete = False
            raise
        finally:
            self._pools.close()
            if self._alike is not None:
                self._alike.close()
            try:
                self._investigation.settle()
            finally:
                self.emit(RunFinished(self._clock() - started, self._complete))

    def _first_part(self, until: float, parts: int, reserved: float = 0.0) -> float:
        """Return the end of the first of ``parts`` equal parts of the time until ``until``, less the reserved share."""
        now = self._clock()
        return now + max(0.0, until - now) / parts * (1 - reserved)

    def _skip(self, case: OpCase, mesh: MeshSpec, reason: str, count: int = 1, recalled: bool = False) -> None:
        self.emit(CaseSkipped(f"{case.op} on mesh {mesh}", reason, count, recalled=recalled))

    # ------------------------------------------------------------------------------------------------------- exploring
    def _explore(self, mesh: MeshSpec, until: float) -> None:
        """Draw cases of all families; a broad family gets the same number of cases for each op."""
        tried = 0
        units_of = {name: self._units(name) for name in self.plan.selected}
        left = sum(map(len, units_of.values()))
        for name, units in units_of.items():
            family = self.plan.families[name]
            most, _ = self._budget(family)
            begun = self._past.begun(mesh, family.name)
            self.emit(MeshStarted(mesh, family.name, most * len(units), recalled=begun))
            if not begun and self._clock() < until:  # a mesh that was begun may have nothing left
                self._pools.of(mesh).start()
            for unit in units:
                last = self._case_number + most
                context = DrawContext(mesh, self.plan.dtypes, unit)
                # Drawing a broad family may take minutes. A shard draws everything even so, because the other shards
                # plan on from it, and so does a resumed run, which cannot distinguish no time from no cases.
                if self._clock() >= until and self.plan.shard is None and not self._past.resumed:
                    self._tell_left(family, context, most)
                else:
                    tried += self._draw(family, context, self._first_part(until, left), until)
                self._case_number = last  # a number means the same case in every run, tried or not
                left -= 1
        if not tried and self._clock() >= until:
            self._complete = False

    def _budget(self, family: Family) -> tuple[int, int]:
        return budget_of(family, self.plan.max_examples, self.plan.combinations)

    def _units(self, name: str) -> list[tuple[str, ...]]:
        """Return the selected ops of a family, in groups for which cases are drawn together."""
        ops = self.plan.selected[name]
        return [(op,) for op in ops] if self.plan.families[name].broad else [ops]

    def _tell_left(self, family: Family, context: DrawContext, count: int) -> None:
        of = f" of {context.ops[0]}" if family.broad else ""
        self.emit(CaseSkipped(f"cases{of} on mesh {context.mesh}", OUT_OF_TIME, count))

    def _draw(self, family: Family, context: DrawContext, until: float, first_until: float) -> int:
        """Let Hypothesis draw cases for ``context``, try them until ``until``, and return how many were tried.

        The first case may begin until ``first_until``: making an op's samples may take the op's whole share of time.
        """
        mesh = context.mesh
        most, combinations = self._budget(family)
        for what, reason in family.left_out(context):
            self.emit(CaseSkipped(f"{what} on mesh {mesh}", reason))
        generator = family.cases(context)
        if generator.is_empty:
            return 0
        tried = elsewhere = 0
        out_of_time = False
        stopped: list[Exception] = []

        @hypothesis.seed(self.plan.seed)
        @hypothesis.settings(DRAWING, max_examples=most)
        @hypothesis.given(generator)
        def explore(case: OpCase) -> None:
            nonlocal tried, elsewhere, out_of_time
            self._case_number += 1
            self._drawn += 1
            if stopped:
                return
            of_other_shard = self.plan.shard is not None and not self.plan.shard.has(self._drawn)
            begins = self._past.tried(self._case_number, mesh, family.name)
            if begins is None:
                begins = self._clock() < (until if tried else first_until)
            if of_other_shard or not begins:
                elsewhere += of_other_shard
                out_of_time |= not of_other_shard
                if self.plan.shard is not None:  # the next plans of each shard depend on all cases
                    self._wanted(case, mesh)
                return
            tried += 1
            try:
                self._try_case(case, mesh, combinations, Drawn(context.ops, current_choices()), until)
            except Exception as error:  # noqa: BLE001 - Hypothesis would run the case again to raise this
                stopped.append(error)

        explore()
        if stopped:
            raise stopped[0]
        if elsewhere:
            self.emit(CaseSkipped(f"cases on mesh {mesh}", f"left to other shards than {self.plan.shard}", elsewhere))
        if out_of_time:
            self._tell_left(family, context, max(1, most - tried - elsewhere))
        return tried

    def _try_case(self, case: OpCase, mesh: MeshSpec, combinations: int, drawn: Drawn, until: float) -> None:
        number = self._case_number
        reference = make_reference(case)
        seed = self.plan.seed + 1000 * number
        wanted, alphabet = self._wanted(case, mesh)
        plan = plan_case(case, reference, mesh, combinations, seed, wanted, alphabet)
        started = CaseStarted(number, case, mesh, len(plan.trials), case_digest(case, plan.trials, drawn.choices))
        recalled = self._past.has_case(started)
        self.emit(replace(started, recalled=recalled))
        if claimed := self._steering.news(case, mesh):
            self.emit(RulesClaimed(case.op, claimed, recalled=recalled))
        if plan.total > len(plan.trials):
            reason = "combinations beyond this profile's budget (pairwise sample taken)"
            self._skip(case, mesh, reason, plan.total - len(plan.trials), recalled)
        known: list[tuple[str, Trial]] = []
        waiting: list[tuple[str, Trial]] = []
        for index, trial in enumerate(plan.trials, 1):
            position = case_position(number, index)
            if position in self._past.trials:
                known.append((position, trial))
            elif reason := self._outcomes.unaffordable(trial):
                self._skip(case, mesh, reason, recalled=recalled)
            else:
                waiting.append((position, trial))
        for answer in self._pool.run(known):
            self._outcomes.take(answer, drawn)
        if waiting and (reason := self._outcomes.too_slow(waiting[0][1]) or self._past.why_ended(number)):
            self._skip(case, mesh, reason, len(waiting), recalled)
        else:
            if waiting and recalled:  # the run was cut short in this trial
                self._pool.repeat(*waiting[0])
            self._try_trials(waiting, drawn, reference, until)

    def _try_trials(self, waiting: list[tuple[str, Trial]], drawn: Drawn, reference: Reference, until: float) -> None:
        """Run the trials of a case until the time is over or the op is too slow."""
        at_once = len(waiting) if until == float("inf") else LOOK_AT_CLOCK
        while waiting:
            now, waiting, reason = waiting[:at_once], waiting[at_once:], ""
            for index, answer in enumerate(self._pool.run(now), 1):
                self._outcomes.take(answer, drawn, reference)
                if reason := self._outcomes.too_slow(answer.observation.trial):
                    waiting = now[index:] + waiting
                    break
            if waiting and (reason := reason or (OUT_OF_TIME if self._clock() >= until else "")):
                self._skip(reference.case, waiting[0][1].mesh, reason, len(waiting))
                return

    def _wanted(self, case: OpCase, mesh: MeshSpec) -> tuple[list[Combination], Alphabet]:
        """Return the combinations that steering wants for a case, and the placements that its tensors may have."""
        alphabet = self.plan.families[case.family].alphabet(case, mesh)
        return self._steering.wanted(case, mesh, alphabet), alphabet
