"""Tries mutants on ranks (level 2), as the trials of a run do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from verifier.campaign.plan import Plan
from verifier.core.arguments import combination_rows
from verifier.core.call_text import describe_call
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.errors import ReportedError
from verifier.core.observation import Fate
from verifier.core.verdict import Verdict
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.tasks import Task
from verifier.mutation.mutants import Mutant, installed
from verifier.oracle.reference import Reference, make_reference
from verifier.oracle.verdicts import judge
from verifier.planning.drawing import draw_each
from verifier.planning.families import DrawContext, Family, budget_of, select_ops
from verifier.planning.steering import Steering
from verifier.planning.trials import plan_case
from verifier.torch_internals.recording import forget_calls

__all__ = ["OnRanks", "RankTrials", "put_in_force"]

_PUT_IN_FORCE = f"{__name__}.put_in_force"
_AT_ONCE = 64
"""So many trials are run before their outcomes are looked at."""
_KEPT = 64
"""So many draws of an op are kept, for other mutants of its strategy."""

_Case = tuple[OpCase, Reference]
_Planned = tuple[Trial, Reference]


@dataclass(frozen=True)
class OnRanks:
    """What came of a mutant on ranks.

    Parameters
    ----------
    verdict, why
        Of the first trial that fails with the mutant and passes without it; empty if there is none.
    trials
        How many trials ran with the mutant.
    """

    verdict: str
    why: str
    trials: int


class RankTrials:
    """Tries mutants on the cases that a run draws, on ranks that live on from mutant to mutant.

    Parameters
    ----------
    plan
        Says which families, meshes, dtypes and imports there are, the seed and the budget. Its ops do not matter.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pools = PoolSet(lambda key: Pool(key, plan.imports, plan.trial_limit, imported_here=True))
        self._drawn: dict[tuple[MeshSpec, str, tuple[str, ...]], list[_Case]] = {}

    def close(self) -> None:
        self._pools.close()

    def attempt(self, mutant: Mutant, patterns: Sequence[str]) -> OnRanks:
        """Run trials of the ops that ``patterns`` select, as ``run`` does, with the mutant in force.

        Trials that fail are run again without the mutant.

        Raises
        ------
        NotInstallableError
            If this process cannot run the mutant.
        ReportedError
            If a rank cannot run the mutant.
        ValueError
            If a pattern selects no op.
        """
        tried = 0
        for mesh in self._plan.meshes:
            for family, unit in self._units(patterns):
                with installed(mutant):  # rules that the mutant claims decide which trials there are
                    trials = self._planned(family, mesh, self._cases(family, mesh, unit))
                while trials:
                    failing, done = self._failing(mutant, mesh, trials[:_AT_ONCE])
                    trials, tried = trials[done:], tried + done
                    for one, verdict in failing:
                        if not self._failing(None, mesh, [one])[0]:
                            rows = combination_rows(one[0].case, one[0].combination)
                            call = describe_call(one[0].case, rows)
                            return OnRanks(
                                str(verdict.kind), f"{one[0].case.op}, {call}, on mesh {mesh}: {verdict.message}", tried
                            )
        return OnRanks("", "", tried)

    def _units(self, patterns: Sequence[str]) -> list[tuple[Family, tuple[str, ...]]]:
        families = self._plan.families
        return [
            (families[name], unit)
            for name, ops in select_ops(patterns, families).items()
            for unit in ([(op,) for op in ops] if families[name].broad else [ops])
        ]

    def _cases(self, family: Family, mesh: MeshSpec, unit: tuple[str, ...]) -> list[_Case]:
        key = mesh, family.name, unit
        if key not in self._drawn:
            while len(self._drawn) >= _KEPT:
                del self._drawn[next(iter(self._drawn))]
            self._drawn[key] = [(case, make_reference(case)) for case in self._draw(family, mesh, unit)]
        return self._drawn[key]

    def _draw(self, family: Family, mesh: MeshSpec, unit: tuple[str, ...]) -> list[OpCase]:
        cases: list[OpCase] = []
        generator = family.cases(DrawContext(mesh, self._plan.dtypes, unit))
        if generator.is_empty:
            return cases
        most, _ = budget_of(family, self._plan.max_examples, self._plan.combinations)

        draw_each(generator, self._plan.seed, most, cases.append)
        return cases

    def _planned(self, family: Family, mesh: MeshSpec, cases: Sequence[_Case]) -> list[_Planned]:
        _, most = budget_of(family, self._plan.max_examples, self._plan.combinations)
        steering = Steering(self._plan.combinations // 2)
        trials: list[_Planned] = []
        for number, (case, reference) in enumerate(cases, 1):
            alphabet = family.alphabet(case, mesh)
            wanted = steering.wanted(case, mesh, alphabet)
            plan = plan_case(case, reference, mesh, most, self._plan.seed + 1000 * number, wanted, alphabet)
            trials += [(trial, reference) for trial in plan.trials]
        return trials

    def _failing(
        self, mutant: Mutant | None, mesh: MeshSpec, trials: Sequence[_Planned]
    ) -> tuple[list[tuple[_Planned, Verdict]], int]:
        """Return the trials that fail, and how many ran: ranks that replace dead ones do not have the mutant."""
        pool = self._pools.of(mesh)
        if mutant is not None:
            self._put(pool, mutant, mesh)
        failing: list[tuple[_Planned, Verdict]] = []
        done = 0
        try:
            observations = pool.run([trial for trial, _ in trials], fresh=True)
            for one, observation in zip(trials, observations, strict=True):
                done += 1
                if (verdict := judge(observation, one[1])).kind.bad:
                    failing.append((one, verdict))
                if observation.fate is not Fate.COMPLETED:
                    break
        finally:
            if mutant is not None:
                self._put(pool, None, mesh)
        return failing, done

    def _put(self, pool: Pool, mutant: Mutant | None, mesh: MeshSpec) -> None:
        if failure := pool.call(Task(_PUT_IN_FORCE, (mutant,), mesh)).failure():
            raise ReportedError(f"rank {failure[0]} cannot run a mutant: {failure[1].message}")


_in_force = ExitStack()


def put_in_force(mesh: DeviceMesh, mutant: Mutant | None) -> None:
    """Have this rank decide as ``mutant`` does until the next call, or as it is written; a task of ranks calls this."""
    _in_force.close()
    if mutant is not None:
        _in_force.enter_context(installed(mutant))
    forget_calls()
