"""Minimises a failure and confirms it by another run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hypothesis.strategies import SearchStrategy

from verifier.core.arguments import tensor_arguments
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate
from verifier.core.verdict import VerdictKind
from verifier.findings.failures import Drawn, Failure, Runner
from verifier.findings.grouping import symptom
from verifier.findings.shrinking import shrink
from verifier.findings.variants import (
    call_by_itself,
    on_kept_mesh_dims,
    placements_of_results,
    plain_trials,
    plainer_cases,
    same_metadata,
    simpler_combinations,
    simpler_cotangents,
    smaller_meshes,
)
from verifier.oracle.comparison import compare, is_comparable
from verifier.oracle.reference import Reference, make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.alphabet import Alphabet
from verifier.programs import SimplerCall, joined, simpler_calls, targets
from verifier.records.schema import CONFIRMED, UNCONFIRMED, ConfirmationRecord
from verifier.torch_internals.placements import Combination, Placements

__all__ = [
    "Minimiser",
    "confirm",
]

_MOST_PAIRS = 32
"""The most pairs of calls that are tried for a call that fails only after another; each pair costs a trial."""


@dataclass
class Minimiser:
    """Makes failures small: fewer ranks, fewer sharded arguments, then the smallest case that Hypothesis finds.

    Parameters
    ----------
    run
        Runs one trial.
    generate
        Returns a generator of cases for a mesh; None if new draws find nothing smaller than the case itself.
    seed
        The seed of the campaign.
    until
        When minimising stops with the smallest failure so far, by the clock.
    clock
        Returns seconds, as ``time.monotonic`` does.
    """

    run: Runner
    generate: Callable[[MeshSpec], SearchStrategy[OpCase]] | None
    seed: int
    until: float
    clock: Callable[[], float] = time.monotonic
    restarts: int = 4
    """How many more attempts may hang or end ranks, because each costs a restart of the ranks; counts down."""

    def minimise(self, failure: Failure, is_known: Callable[[Failure], bool]) -> tuple[Failure, bool]:
        """Return the smallest failure of the same kind, and whether there was time to look for one.

        Minimising stops as soon as ``is_known`` holds for the smallest failure so far.
        """
        if (alone := self._without_program(failure)) is not None and is_known(alone):
            return alone, True
        best = self._simpler(self._fewer_cotangents(alone or failure))
        if is_known(best):
            return best, True
        if failure.costly:  # Hypothesis would need new processes for each of its attempts
            return best, False
        for mesh, kept in smaller_meshes(best.trial):
            projected = on_kept_mesh_dims(best.trial, mesh, kept)
            found = self._shrink(projected, best, failure.drawn, 60)
            if found is None and targets(best.trial.case):  # the projected targets fit this mesh; others may be drawn
                found = self.attempt(projected, best)
            if found is not None:
                best = found
                break
        else:
            found = self._shrink(best.trial, best, failure.drawn, 200) if self.generate is not None else best
        if found is None or found.size > best.size:
            return best, False
        return self._simpler(found), self.clock() < self.until

    def attempt(self, trial: Trial, like: Failure) -> Failure | None:
        """Return the failure if ``trial`` fails in the same way as ``like``, else None.

        A trial that may take as long as a hang is not run after the time is over.
        """
        if self.restarts <= 0 or (like.costly and self.clock() > self.until):
            return None
        return self.replay(trial, like)

    def replay(self, trial: Trial, like: Failure) -> Failure | None:
        """Return the failure if ``trial`` fails in the same way as ``like``, else None, whatever the cost.

        Calls with nondeterministic results are rejected: without an option, as ``p=0`` of dropout, some are random.
        """
        reference: Reference = make_reference(trial.case)
        observation = self.run(trial)
        self.restarts -= observation.fate in (Fate.HANG, Fate.SLOW, Fate.DIED)
        found = Failure(trial, observation, judge(observation, reference), by_hash_seed=like.by_hash_seed)
        if not found.verdict.kind.bad or symptom(found) != symptom(like):
            return None
        return found if _is_determined(reference) else None

    def after_another(self, failure: Failure, others: Iterable[Trial]) -> Failure | None:
        """Return the failure of two calls in a row: one of ``others``, then the call that failed.

        This is for calls that do not fail alone: DTensor caches its decision on a call, and may use it for a later call
        that is not the same. The result is None if no such pair fails in the same way.
        """
        seconds, tried = plain_trials(failure.trial, placements_of_results(failure.observation)), 0
        for first in (plain.case for other in others for plain in plain_trials(other, {})):
            for second in seconds:
                if not same_metadata(first, second.case) or (program := joined(first, second.case)) is None:
                    continue
                # both calls have the same number of results; the second's keep the cotangents that they had alone
                cotangents = tuple((*one, *one) for one in second.cotangents)
                pair = replace(second, case=program, cotangents=cotangents)
                if (found := self.attempt(pair, failure)) is not None:
                    return found
                if (tried := tried + 1) >= _MOST_PAIRS or self.clock() > self.until:
                    return None
        return None

    def _without_program(self, failure: Failure) -> Failure | None:
        """Return the failure of one call that the program makes; None if no call fails so alone.

        If the program raised, nothing is known of the results that it made before. The calls that make them are then
        run alone, for the placements that the calls after them are given.
        """
        placed = placements_of_results(failure.observation)
        tried: set[tuple[int, Combination]] = set()
        while True:
            calls = simpler_calls(failure.trial, placed)
            for number, simpler in enumerate(calls):
                if (number, simpler.combination) in tried:
                    continue
                tried.add((number, simpler.combination))
                if (found := self.attempt(call_by_itself(simpler, failure), failure)) is not None:
                    return found
            made = self._placed_by([call for call in calls if not placed.keys() >= {*call.outputs}], failure)
            if made.keys() <= placed.keys():
                return None
            placed = made | placed

    def _placed_by(self, calls: Iterable[SimplerCall], failure: Failure) -> dict[int, Placements]:
        """Return the placements of the results of ``calls``, by the number that each has in their program."""
        placed: dict[int, Placements] = {}
        for call in calls:
            if self.restarts <= 0 or self.clock() > self.until:
                break
            observation = self.run(replace(call_by_itself(call, failure), cotangents=()))
            self.restarts -= observation.fate in (Fate.HANG, Fate.SLOW, Fate.DIED)
            made = placements_of_results(observation)
            placed |= {call.outputs[number]: found for number, found in made.items() if number < len(call.outputs)}
        return placed

    def _fewer_cotangents(self, failure: Failure) -> Failure:
        if len(failure.trial.cotangents) < 2:
            return failure
        trial, index = failure.trial, failure.verdict.backward
        # the seed of pass n is the trial's plus n, so the pass keeps its cotangent when others are dropped
        single = [replace(trial, cotangents=(one,), seed=trial.seed + n) for n, one in enumerate(trial.cotangents)]
        tried = [single[index]] if index is not None else [replace(trial, cotangents=())]
        if index is None and failure.verdict.kind in (VerdictKind.DIED, VerdictKind.HANG):
            tried += single  # no rank has reported in which pass it was
        return next((found for fewer in tried if (found := self.attempt(fewer, failure)) is not None), failure)

    def _simpler(self, failure: Failure) -> Failure:
        progress = True
        while progress and self.clock() < self.until:
            progress = False
            simpler = (plainer_cases, simpler_combinations, simpler_cotangents)
            for trial in (variant for variants in simpler for variant in variants(failure.trial)):
                found = self.attempt(trial, failure)
                if found is not None:
                    failure, progress = found, True
                    break
        return failure

    def _shrink(self, template: Trial, like: Failure, drawn: Drawn | None, examples: int) -> Failure | None:
        """Return the failure that Hypothesis shrinks to under the mesh and combination of ``template``."""
        if self.generate is None:
            return self.attempt(template, like)
        ndims = [tensor.ndim for tensor in tensor_arguments(template.case.args, template.case.kwargs)]

        def fails(case: OpCase) -> bool:
            if self.clock() > self.until or case.call != template.case.call or case.op != template.case.op:
                return False
            tensors = tensor_arguments(case.args, case.kwargs)
            if len(tensors) != len(ndims) or not _fits(template, case):
                return False
            return self.attempt(replace(template, case=case), like) is not None

        generator = self.generate(template.mesh)
        case = shrink(generator, fails, None if drawn is None else drawn.choices, examples, self.seed)
        return None if case is None else self.attempt(replace(template, case=case), like)


def _is_determined(reference: Reference) -> bool:
    """Return whether a second local call gives the same results."""
    again = make_reference(reference.case)
    return len(again.outputs) == len(reference.outputs) and all(
        compare(other, output, 0.0) is None
        for other, output in zip(again.outputs, reference.outputs, strict=True)
        if is_comparable(output)
    )


def _fits(template: Trial, case: OpCase) -> bool:
    """Return whether the template's placements can be used for the tensors of ``case``."""
    for tensor, placements in zip(tensor_arguments(case.args, case.kwargs), template.combination, strict=True):
        if not all(Alphabet.admits(placement, tensor.ndim, tensor.dtype) for placement in placements):
            return False
    if template.cotangents:
        reference = make_reference(case)
        outputs = [reference.outputs[i] for i in reference.differentiable]
        for cotangents in template.cotangents:
            if len(cotangents) != len(outputs):
                return False
            for output, placements in zip(outputs, cotangents, strict=True):
                if not all(Alphabet.admits(placement, output.ndim, output.dtype) for placement in placements):
                    return False
    return True


def confirm(failure: Failure, minimiser: Minimiser) -> tuple[Failure, ConfirmationRecord]:
    """Run ``failure`` again on real processes; return the new failure, and where it was confirmed.

    DTensor's caches are empty then, so a failure that only an earlier trial caused is not confirmed.
    """
    trial = failure.trial
    if trial.mesh.backend == "simulated":
        trial = replace(trial, mesh=replace(trial.mesh, backend="gloo"))
    again = minimiser.replay(trial, failure)
    if again is None:
        why = (
            "real processes do not show it"
            if failure.trial.mesh != trial.mesh
            else "did not fail a second time, with DTensor's caches empty"
        )
        return failure, ConfirmationRecord(UNCONFIRMED, why=why)
    return again, ConfirmationRecord(CONFIRMED, trial.mesh.backend, trial.mesh.world_size)
