"""What comes of mutants."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum, auto

from verifier.mutation.mutants import Mutant

__all__ = ["Kind", "MutationRun", "Outcome"]


class Kind(StrEnum):
    """What came of a mutant.

    Attributes
    ----------
    CAUGHT
        It claims a wrong rule that the original does not claim, keeps a stale decision, ends the process, or fails on
        ranks in a trial that passes without it.
    FEWER
        It only loses rules of the original: DTensor communicates, or refuses, where it need not.
    SAME
        It claims what the original claims on every sample.
    SURVIVED
        It differs and no sample tells that it is wrong, or no sample reaches the line.
    """

    CAUGHT = auto()
    FEWER = auto()
    SAME = auto()
    SURVIVED = auto()


@dataclass(frozen=True)
class Outcome:
    """What came of one mutant.

    Parameters
    ----------
    why
        A sentence.
    ops
        The targets whose samples were asked, at level 1.
    more, fewer
        How many rules the mutant alone claims, and the original alone.
    level
        At which level it was judged in the end.
    trials
        How many trials ranks ran with it.
    """

    mutant: Mutant
    kind: Kind
    verdict: str
    why: str
    ops: tuple[str, ...]
    samples: int
    more: int
    fewer: int
    level: int = 1
    trials: int = 0


@dataclass
class MutationRun:
    """What came of all mutants.

    Parameters
    ----------
    candidates
        How many mutants there are; ``outcomes`` has those of the sample that were tried.
    no_programs
        Mutants that no function could run.
    """

    candidates: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    no_programs: list[Mutant] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def counts(self) -> Counter[Kind]:
        return Counter(outcome.kind for outcome in self.outcomes)
