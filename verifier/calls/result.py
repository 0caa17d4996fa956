"""What one call of ``verify`` gives: a :class:`Verification`, or an exception of one class per kind of failure."""

# A failure is named for what is wrong ("WrongGradient: ..."), as the verdicts are.
# ruff: noqa: N818

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from verifier.core.arguments import combination_rows
from verifier.core.case import MeshSpec, OpCase
from verifier.core.observation import Observation, Redistribution
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.core.wording import plural
from verifier.findings.failures import Failure, first_report

__all__ = [
    "ERRORS",
    "Crash",
    "Died",
    "Hang",
    "MutatedInput",
    "NothingVerified",
    "RanksDisagree",
    "SilentError",
    "ToolError",
    "Verification",
    "VerificationError",
    "WrongDtype",
    "WrongGradient",
    "WrongPlacement",
    "WrongShape",
    "WrongValue",
]


# ---------------------------------------------------------------------------------------------------------- exceptions
class VerificationError(AssertionError):
    """A trial with a bad verdict; ``failure`` holds the trial, the observation and the verdict.

    There is one subclass for each bad verdict, because Hypothesis tells failures apart by class: it shrinks each on its
    own, and a wrong value does not turn into a crash on the way.
    """

    kind: ClassVar[VerdictKind]

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure

    def __init_subclass__(cls, kind: VerdictKind) -> None:
        assert kind.bad, f"{kind} accuses nobody"
        cls.kind = kind
        ERRORS[kind] = cls


ERRORS: dict[VerdictKind, type[VerificationError]] = {}
"""The exception of each bad verdict."""


class WrongValue(VerificationError, kind=VerdictKind.WRONG_VALUE):
    """An output differs from the local reference."""


class WrongShape(VerificationError, kind=VerdictKind.WRONG_SHAPE):
    """An output, or a rank's part of it, has another shape than promised."""


class WrongDtype(VerificationError, kind=VerdictKind.WRONG_DTYPE):
    """An output has another dtype than the local reference."""


class WrongPlacement(VerificationError, kind=VerdictKind.WRONG_PLACEMENT):
    """What the ranks hold fits no tensor under the output's placements."""


class WrongGradient(VerificationError, kind=VerdictKind.WRONG_GRADIENT):
    """A gradient differs from the local reference."""


class MutatedInput(VerificationError, kind=VerdictKind.MUTATED_INPUT):
    """An input was changed that the local call leaves alone, or not as the local call changes it."""


class SilentError(VerificationError, kind=VerdictKind.SILENT_ERROR):
    """The local call raises, the sharded one returns something."""


class Crash(VerificationError, kind=VerdictKind.CRASH):
    """The sharded call raises, the local one does not."""


class RanksDisagree(VerificationError, kind=VerdictKind.RANKS_DISAGREE):
    """Ranks hold an output or a gradient under different placements."""


class Hang(VerificationError, kind=VerdictKind.HANG):
    """A trial made no progress within its limit."""


class Died(VerificationError, kind=VerdictKind.DIED):
    """A rank's process ended."""


class NothingVerified(AssertionError):
    """Every trial was unsupported or inconclusive, or one had no end in its time; the message says why."""


class ToolError(RuntimeError):
    """The verifier itself failed, or its ranks did not start: this says nothing of the op."""


# -------------------------------------------------------------------------------------------------------------- result
@dataclass(frozen=True, repr=False)
class Verification:
    """What came of one call on one mesh: an observation and a verdict for each combination that was tried.

    ``total`` is how many combinations there are, of which ``len(observations)`` were tried.
    """

    case: OpCase
    mesh: MeshSpec
    observations: tuple[Observation, ...]
    verdicts: tuple[Verdict, ...]
    total: int

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.counts.items()) or "none tried"
        tried = f"{len(self.observations)} of {plural(self.total, 'combination')}"
        return f"<Verification of {self.case.op} on mesh {self.mesh}: {tried}, {counts}>"

    @property
    def counts(self) -> dict[VerdictKind, int]:
        """Number of trials by verdict, those that occurred."""
        counts = Counter(verdict.kind for verdict in self.verdicts)
        return {kind: counts[kind] for kind in VerdictKind if counts[kind]}

    @property
    def combinations(self) -> list[dict[str, str]]:
        """The placements of each tensor argument by its name, as text, for each trial."""
        return [dict(combination_rows(self.case, o.trial.combination)) for o in self.observations]

    def placements(self, subject: str = "output") -> list[str]:
        """Return the placements of an output or a gradient, as text, for each trial that got that far.

        Parameters
        ----------
        subject
            ``output`` (``output 0`` and so on where there are several), or ``weight.grad 0``: the gradient of an
            argument in the first backward pass.

        Raises
        ------
        ValueError
            If no trial has such a subject; the message lists those that there are.
        """
        reports = [first_report(observation) for observation in self.observations]
        tables = [dict(report.placements) for report in reports if report is not None]
        known = {name: None for table in tables for name in table}
        if subject not in known:
            raise ValueError(f"no trial has a {subject!r}; there are {', '.join(map(repr, known)) or 'none'}")
        return [table[subject] for table in tables if subject in table]

    def collectives(self, phase: Phase | str | None = None) -> dict[str, int]:
        """Return how often each collective ran on the first rank in ``phase`` (in any, if None), over all trials.

        Raises
        ------
        ValueError
            If the trials were not traced, or there is no such phase.
        """
        if not all(observation.trial.trace for observation in self.observations):
            raise ValueError("collectives are counted in traced trials only; call verify(..., trace=True)")
        wanted = _phase(phase)
        counts: Counter[str] = Counter()
        for observation in self.observations:
            report = first_report(observation)
            for where, name, count in report.collectives if report is not None else ():
                if wanted in (None, where):
                    counts[name] += count
        return dict(counts)

    def redistributions(self, phase: Phase | str | None = None) -> list[Redistribution]:
        """Return the steps of all redistributions that the first rank took in ``phase`` (in any, if None)."""
        wanted = _phase(phase)
        reports = [first_report(observation) for observation in self.observations]
        steps = [step for report in reports if report is not None for step in report.redistributions]
        return [step for step in steps if wanted in (None, step.phase)]

    def describe(self) -> str:
        """Return what was tried and what came of it, on one line.

        As ``aten.embedding.default on mesh 4: sampled 32 of 56 combinations: 30 PASS, 2 UNSUPPORTED``.
        """
        tried = len(self.observations)
        total = plural(self.total, "combination")
        share = f"all {total}" if tried == self.total else f"sampled {tried} of {total}"
        counts = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        return f"{self.case.op} on mesh {self.mesh}: {share}: {counts or 'none tried'}"


def _phase(phase: Phase | str | None) -> Phase | None:
    if phase is None:
        return None
    if phase not in list(Phase):
        raise ValueError(f"phase {phase!r} is none of {', '.join(Phase)}")
    return Phase(phase)
