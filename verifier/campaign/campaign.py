"""Runs a plan within a budget, and announces everything as events.

A campaign replays the known findings. For each mesh it then draws cases of each family with Hypothesis, tries
combinations of placements, and investigates the failures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from verifier.campaign.blocks import Blocks
from verifier.campaign.hash_seed import HashSeed
from verifier.campaign.history import Past, case_digest
from verifier.campaign.investigation import Investigation
from verifier.campaign.outcomes import Outcomes
from verifier.campaign.plan import Plan
from verifier.campaign.trying import PlannedCase
from verifier.core.case import MeshSpec, OpCase
from verifier.core.interrupts import note_arrival
from verifier.core.wording import CORRECT_SAMPLES, NO_SAMPLES
from verifier.events import CaseSkipped, CaseStarted, Event, Listener, MeshStarted, RulesClaimed, RunFinished
from verifier.findings.attribution import Attribution
from verifier.findings.failures import Drawn
from verifier.findings.shrinking import current_choices
from verifier.meshes.pool import PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import make_reference
from verifier.placements.alphabet import Alphabet
from verifier.planning.drawing import draw_each
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
BEYOND_BUDGET = "combinations beyond this profile's budget (pairwise sample taken)"


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
    beside
        Ranks that try cases at the same time as ``pools``; the campaign closes them, too.
    """

    def __init__(
        self,
        plan: Plan,
        pools: PoolSet,
        emit: Listener,
        past: Past | None = None,
        alike: PoolSet | None = None,
        clock: Callable[[], float] = time.monotonic,
        beside: Sequence[PoolSet] = (),
    ) -> None:
        self.plan = plan
        self.emit = emit
        self._past = past or Past()
        self._pools, self._alike, self._clock, self._beside = pools, alike, clock, beside
        self._outcomes = Outcomes(emit, waits_little=bool(plan.header.imports))
        self._blocks = Blocks([pools, *beside], self._past, self._outcomes, emit, clock)
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
        for op, wrong in self.plan.wrong_samples.items():
            self.emit(CaseSkipped(op, wrong, remedy=CORRECT_SAMPLES, recalled=self._past.resumed))
        try:
            self._investigation.replay_known()
            for number, mesh in enumerate(self.plan.meshes):
                until = self._investigation.until = self._first_part(self._until, len(self.plan.meshes) - number)
                self._explore(mesh, self._first_part(until, 1, RESERVED_FOR_FINDINGS))
                self._investigation.investigate()
        except KeyboardInterrupt:
            note_arrival()
            self._complete = False
            self.emit(CaseSkipped("the rest of the run", INTERRUPTED))
        except Exception:
            self._complete = False
            raise
        finally:
            self._blocks.close()
            for pools in (self._pools, *filter(None, [self._alike]), *self._beside):
                pools.close()
            try:
                self._investigation.settle()
            finally:
                self.emit(RunFinished(self._clock() - started, self._complete))

    def _first_part(self, until: float, parts: int, reserved: float = 0.0) -> float:
        """Return the end of the first of ``parts`` equal parts of the time until ``until``, less the reserved share."""
        now = self._clock()
        return now + max(0.0, until - now) / parts * (1 - reserved)

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
            self._blocks.tell(MeshStarted(mesh, family.name, most * len(units), recalled=begun))
            if not begun and self._clock() < until and not self._beside:  # a mesh that was begun may have nothing left
                self._pools.of(mesh).start()
            for unit in units:
                last = self._case_number + most
                self._blocks.begin_unit(most, family.broad)
                context = DrawContext(mesh, self.plan.dtypes, unit)
                # Drawing a broad family may take minutes. A shard draws everything even so, because the other shards
                # plan on from it, and so does a resumed run, which cannot distinguish no time from no cases.
                if self._clock() >= until and self.plan.shard is None and not self._past.resumed:
                    self._tell_left(family, context, most)
                else:
                    tried += self._draw(family, context, self._first_part(until, left), until)
                self._case_number = last  # a number means the same case in every run, tried or not
                left -= 1
                if self._until < float("inf"):  # what is left of the time is known only then
                    self._blocks.finish()
        self._blocks.finish()
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
        self._blocks.tell(CaseSkipped(f"cases{of} on mesh {context.mesh}", OUT_OF_TIME, count))

    def _draw(self, family: Family, context: DrawContext, until: float, first_until: float) -> int:
        """Let Hypothesis draw cases for ``context``, try them until ``until``, and return how many were tried.

        The first case may begin until ``first_until``: making an op's samples may take the op's whole share of time.
        """
        mesh = context.mesh
        most, combinations = self._budget(family)
        for what, reason in family.left_out(context):
            self._blocks.tell(CaseSkipped(f"{what} on mesh {mesh}", reason))
        generator = family.cases(context)
        if generator.is_empty:
            return 0
        tried = elsewhere = 0
        out_of_time = False
        stopped: list[Exception] = []

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
                drawn = Drawn(context.ops, current_choices())
                self._blocks.add(self._planned(case, mesh, combinations, drawn, until, at_once=tried == 1))
            except Exception as error:  # noqa: BLE001 - Hypothesis would run the case again to raise this
                stopped.append(error)

        draw_each(generator, self.plan.seed, most, explore)
        if stopped:
            raise stopped[0]
        if elsewhere:
            self._blocks.tell(
                CaseSkipped(f"cases on mesh {mesh}", f"left to other shards than {self.plan.shard}", elsewhere)
            )
        if out_of_time:
            self._tell_left(family, context, max(1, most - tried - elsewhere))
        return tried

    def _planned(
        self, case: OpCase, mesh: MeshSpec, combinations: int, drawn: Drawn, until: float, at_once: bool
    ) -> PlannedCase:
        number = self._case_number
        reference = make_reference(case)
        seed = self.plan.seed + 1000 * number
        wanted, alphabet = self._wanted(case, mesh)
        every = self.plan.backward_every if mesh.ndim > 1 else 0
        plan = plan_case(case, reference, mesh, combinations, seed, wanted, alphabet, every)
        started = CaseStarted(number, case, mesh, len(plan.trials), case_digest(case, plan.trials, drawn.choices))
        recalled = self._past.has_case(started)
        announced: list[Event] = []
        if claimed := self._steering.news(case, mesh):
            announced.append(RulesClaimed(case.op, claimed, recalled=recalled))
        if (left := plan.total - len(plan.trials)) > 0:
            announced.append(CaseSkipped(f"{case.op} on mesh {mesh}", BEYOND_BUDGET, left, recalled=recalled))
        started = replace(started, recalled=recalled)
        return PlannedCase(started, plan.trials, reference, drawn, tuple(announced), until, at_once)

    def _wanted(self, case: OpCase, mesh: MeshSpec) -> tuple[list[Combination], Alphabet]:
        """Return the combinations that steering wants for a case, and the placements that its tensors may have."""
        alphabet = self.plan.families[case.family].alphabet(case, mesh)
        return self._steering.wanted(case, mesh, alphabet), alphabet
