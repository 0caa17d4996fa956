"""``verify``: one call on a mesh under many combinations of placements, as an assertion. Knows nothing of pytest."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

from hypothesis import currently_in_test_context, settings

from verifier.calls.arguments import CombinationLike, PlacementsLike, cotangent_passes, make_case, make_combination
from verifier.calls.result import ERRORS, NothingVerified, ToolError, Verification
from verifier.core.arguments import combination_rows
from verifier.core.case import Backend, MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation
from verifier.core.ops import resolve
from verifier.core.verdict import Verdict, VerdictKind
from verifier.events import CaseSkipped, Event, TrialFinished
from verifier.execution.registrations import as_option, module_of_op
from verifier.findings.failures import Failure
from verifier.findings.grouping import fingerprint
from verifier.findings.record import message
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import PoolError, RulesNotInRanks
from verifier.oracle.reference import Reference, make_reference
from verifier.oracle.verdicts import judge
from verifier.planning.budgets import CAMPAIGN_PROFILES, DEFAULT_PROFILE
from verifier.planning.families import Family, installed_families
from verifier.planning.trials import CasePlan, cotangent_placements, plan_case
from verifier.records.commands import replay_text
from verifier.records.files import DEFAULT_REPORTS
from verifier.torch_internals.names import OpOverload

__all__ = ["Recorder", "Verifier", "likely_cause"]

_BATCH = 8
"""Trials that go to the ranks at a time inside a Hypothesis test."""


class Recorder(Protocol):
    """Keeps what ``verify`` did, for the run store."""

    def __call__(self, event: Event) -> None:
        """Take in an event."""

    def failed(self, failure: Failure, *, raised: bool) -> None:
        """Take in a bad verdict; ``raised`` tells the one that became the exception."""


class Verifier:
    """Callable that runs an op on a mesh, sharded in many ways, and raises for the first result that is wrong.

    Parameters
    ----------
    pools
        Where the ranks come from.
    default_mesh
        The mesh where a call names none.
    seed
        Fixes which combinations are sampled, how Partial arguments are split, and the cotangents. It is the same for
        every call, so that Hypothesis sees the same outcome when it tries an example again.
    backend
        Of meshes that are given as text without one.
    recorder
        Gets every trial, unless a call says otherwise.
    folder
        Where what is recorded will be, for the command that reproduces a failure.
    named
        Makes of what the ranks have imported what a command takes, which may start elsewhere.

    Attributes
    ----------
    imports
        What the ranks have imported so far, as a command takes it.
    """

    def __init__(
        self,
        pools: PoolSet,
        default_mesh: MeshSpec,
        seed: int = 0,
        backend: Backend = "gloo",
        recorder: Recorder | None = None,
        folder: Path = DEFAULT_REPORTS,
        named: Callable[[Sequence[str]], Sequence[str]] = tuple,
    ) -> None:
        self.pools = pools
        self.default_mesh = default_mesh
        self.seed = seed
        self.backend = backend
        self.recorder = recorder
        self.folder = folder
        self.imports: tuple[str, ...] = ()
        self._named = named

    def __call__(
        self,
        op: OpCase | Callable[..., object] | str,
        /,
        *args: object,
        mesh: MeshSpec | str | int | None = None,
        placements: CombinationLike | None = None,
        combinations: Sequence[CombinationLike] | None = None,
        cotangents: Sequence[PlacementsLike | Sequence[PlacementsLike]] | Literal["drawn"] | None = "drawn",
        cap: int | Literal["profile"] | None = "profile",
        exact: bool = False,
        trace: bool = False,
        raises: bool = False,
        record: bool = True,
        allow_nothing: bool = False,
        **kwargs: object,
    ) -> Verification:
        """Run ``op(*args, **kwargs)`` on ``mesh``, forward and backward, and compare with the same call on one process.

        Parameters
        ----------
        op
            An ``OpOverload``, an operator of several such (``torch.ops.aten.sum``), a function that was made a custom
            op, another one that the ranks can import, its dotted path, or an :class:`OpCase` with its own arguments.
        args, kwargs
            Arguments with global values. Gradients are checked of those that require one.
        mesh
            As ``"2x2"``, ``4``, ``"simulated:8"`` or a :class:`MeshSpec`.
        placements
            The one combination to try: placements of each tensor argument, as ``["S(0)", "R"]`` or
            ``{"weight": "S(0)"}``.
        combinations
            Several of these. With neither, every combination is tried.
        cotangents
            Placements of the cotangents, one entry per backward pass; an entry has one per differentiable output if
            there are several. ``None`` for the forward call only.
        cap
            At most so many combinations, sampled so that pairs of placements are covered; None for all, ``"profile"``
            for as many as a campaign of the current profile takes.
        exact
            Compare bit for bit: for small integers in ops whose results on them are exact. A difference in the last
            four places of the largest result is INCONCLUSIVE. Ignored for an OpCase.
        trace
            Count collectives, for :meth:`Verification.collectives`; slower.
        raises
            The local call is meant to raise, and the sharded one must raise as well. Ignored for an OpCase, in which
            either is fine.
        record
            False keeps the call out of the recorded run, as for rules that are wrong on purpose.
        allow_nothing
            Do not raise if nothing could be verified.

        Raises
        ------
        VerificationError
            For the first bad verdict: the subclass that stands for its kind.
        NothingVerified
            If all trials were unsupported or inconclusive, or ranks still computed when the time of one was over: it
            may have no end.
        ToolError
            If the verifier itself failed.
        ValueError
            If an argument of this call does not fit, with what would; or if this process has registered a sharding rule
            that the ranks cannot have, with the option that gives it to them.
        """
        __tracebackhide__ = True
        case = make_case(op, args, kwargs, exact)
        spec = self._mesh(mesh)
        reference = make_reference(case)
        if not isinstance(op, OpCase):
            _check_local_call(reference, raises)
        plan = self._plan(case, reference, spec, placements, combinations, cap)
        trials = [replace(trial, trace=trace) for trial in plan.trials]
        if cotangents != "drawn":
            passes = cotangent_passes(cotangents, reference, spec)
            trials = [replace(trial, cotangents=passes) for trial in trials]
        recorder = self.recorder if record else None
        result, failures = self._run(trials, reference, plan.total, recorder)
        if failures:
            first = failures[0]
            if recorder is not None:
                for failure in failures:
                    recorder.failed(failure, raised=failure is first)
            raise ERRORS[first.verdict.kind](_message(first, None if recorder is None else self.folder), first)
        slow = [observation for observation in result.observations if observation.fate is Fate.SLOW]
        if slow and not allow_nothing:
            last = result.verdicts[-1]
            places = ", ".join(f"{n}={p}" for n, p in combination_rows(slow[0].trial.case, slow[0].trial.combination))
            raise NothingVerified(f"{result.describe()}; {places}: {last.message}, {last.detail}")
        if not allow_nothing and VerdictKind.PASS not in result.counts:
            reasons = dict.fromkeys(f"{verdict.kind}: {verdict.message}" for verdict in result.verdicts)
            raise NothingVerified(f"{result.describe()}; {'; '.join(list(reasons)[:5])}")
        return result

    # ------------------------------------------------------------------------------------------------------ the trials
    def _run(
        self, trials: Sequence[Trial], reference: Reference, total: int, recorder: Recorder | None
    ) -> tuple[Verification, list[Failure]]:
        """Run the trials, not much further than a failure; return what came of them, and the bad ones."""
        case, mesh = reference.case, trials[0].mesh
        pool = self._started(mesh, case)
        imports = tuple(self._named(pool.imports))
        self.imports = tuple(dict.fromkeys((*self.imports, *imports)))
        observations: list[Observation] = []
        verdicts: list[Verdict] = []
        failures: list[Failure] = []
        slow = False  # what ranks compute too long for takes a minute, and others of the call would, too
        # Hypothesis tries a failure again and again to shrink it, so there it is not worth to go on after the first.
        batch = _BATCH if currently_in_test_context() else len(trials)
        while len(observations) < len(trials) and not failures and not slow:
            for observation in self._observe(pool, trials[len(observations) : len(observations) + batch]):
                verdict = judge(observation, reference)
                observations.append(observation)
                verdicts.append(verdict)
                slow |= observation.fate is Fate.SLOW
                if recorder is not None:
                    rows = combination_rows(case, observation.trial.combination)
                    recorder(TrialFinished(observation, verdict, rows))
                if verdict.kind is VerdictKind.TOOL_ERROR:
                    raise ToolError(f"{verdict.message}\n{verdict.detail}".rstrip())
                if verdict.kind.bad:
                    failures.append(Failure(observation.trial, observation, verdict, imports=imports))
        if recorder is not None:
            ending = "was slow" if slow else "failed"
            for count, reason in (
                (len(trials) - len(observations), f"not run: a combination before it {ending}"),
                (total - len(trials), "combinations beyond this profile's budget (pairwise sample taken)"),
                (len(observations) if reference.no_gradient else 0, f"no backward pass: {reference.no_gradient}"),
            ):
                if count:
                    recorder(CaseSkipped(f"{case.op} on mesh {mesh}", reason, count))
        return Verification(case, mesh, tuple(observations), tuple(verdicts), total), failures

    def _started(self, mesh: MeshSpec, case: OpCase) -> Pool:
        """Return the ranks of ``mesh``, with the op of ``case`` and the rules that this process has by now."""
        __tracebackhide__ = True
        pool = self.pools.of(mesh)
        try:
            pool.start(_definition(case.call))
        except RulesNotInRanks as error:
            raise ValueError(error.text("--verifier-import FILE")) from error
        except PoolError as error:
            raise ToolError(f"{error}; can every rank import what --verifier-import names?") from error
        return pool

    def _observe(self, pool: Pool, trials: Sequence[Trial]) -> Iterator[Observation]:
        """Yield the observations up to the first that brings the ranks down: each further one might do so, too.

        A trial in which a process dies is run once more, since an earlier one may have written where it should not.
        """
        try:
            for observation in pool.run(trials):
                if observation.fate is Fate.DIED:
                    died = observation
                    break
                yield observation
                if observation.fate is not Fate.COMPLETED:
                    return
            else:
                return
            (again,) = pool.run([died.trial])
            if again.fate is not Fate.DIED:
                warnings.warn(
                    f"{died.detail}; it did not when {died.trial.case.op} was run again on new processes, so that an "
                    "earlier call may have broken the memory of the one that died",
                    stacklevel=2,
                )
            yield again
        except PoolError as error:
            pool.close()
            call = trials[0].case.call
            raise ToolError(f"{error}; can every rank import {call}, and what --verifier-import names?") from error

    def _plan(
        self,
        case: OpCase,
        reference: Reference,
        mesh: MeshSpec,
        placements: CombinationLike | None,
        combinations: Sequence[CombinationLike] | None,
        cap: int | Literal["profile"] | None,
    ) -> CasePlan:
        if placements is None and combinations is None:
            return plan_case(case, reference, mesh, _profile_cap() if cap == "profile" else cap, self.seed)
        if placements is not None and combinations is not None:
            raise ValueError("give placements (one combination) or combinations (several), not both")
        wanted = [placements] if placements is not None else list(combinations or ())
        if not wanted:
            raise ValueError("combinations is empty; there is nothing to try")
        trials = tuple(
            Trial(
                case,
                mesh,
                make_combination(like, case, mesh),
                cotangent_placements(reference, mesh, self.seed + number),
                self.seed + number,
            )
            for number, like in enumerate(wanted)
        )
        return CasePlan(trials, len(trials))

    def _mesh(self, mesh: MeshSpec | str | int | None) -> MeshSpec:
        if mesh is None:
            return self.default_mesh
        if isinstance(mesh, MeshSpec):
            return mesh
        return MeshSpec.parse(str(mesh), self.backend, "cuda" if self.backend == "nccl" else "cpu")


def _profile_cap() -> int:
    name = settings.get_current_profile_name()
    return CAMPAIGN_PROFILES[name if name in CAMPAIGN_PROFILES else DEFAULT_PROFILE].combinations_per_case


@cache
def _definition(call: str) -> tuple[str, ...]:
    """Return what ranks import to have the operator of a call, if it is not torch's."""
    op = resolve(call)
    source = module_of_op(op) if isinstance(op, OpOverload) and op.namespace != "aten" else None
    option = "" if source is None else as_option(source.module, source.file, sys.path)
    return (option,) if option else ()


def _check_local_call(reference: Reference, raises: bool) -> None:
    __tracebackhide__ = True
    if raises and reference.raised is None:
        raise ValueError(f"{reference.case.op} does not raise on these arguments, but raises=True")
    if reference.raised is not None and not raises:
        raise reference.raised


# --------------------------------------------------------------------------------------------------------- the message
def likely_cause(trial: Trial, verdict: Verdict) -> str:
    """Return what the family of the trial's op guesses to be the cause; empty if there is none."""
    for family in _families():
        if trial.case.family == family.name:
            return family.likely_cause(trial, verdict)
    return ""


@cache
def _families() -> tuple[Family, ...]:
    return tuple(installed_families().values())


def _message(failure: Failure, folder: Path | None) -> str:
    """Return the message of ``failure``; ``folder`` is where it is recorded, None if it is not."""
    text = message(failure, likely_cause(failure.trial, failure.verdict))
    if folder is None:  # what is not recorded cannot be replayed
        return text
    return f"{text}\n  reproduce: {replay_text(fingerprint(failure), failure.imports, folder=folder)}"
