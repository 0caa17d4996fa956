"""What trials have cost so far, which decides what is not tried any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from verifier.core.case import Trial
from verifier.core.observation import Fate, Observation

__all__ = ["Costs"]

_SLOW_ENOUGH = 2
"""After so many slow calls of an op in a row, no others are tried, because each takes a minute."""
_HANGS_ENOUGH = 3
"""After so many hangs of calls of an op on a mesh, no others are tried, because each waits for its whole time limit."""


@dataclass
class Costs:
    """The trials that ended the ranks, how often calls hung, and those for which ranks computed too long.

    A decision about a trial depends on the earlier trials of the same op alone. ``waits_little`` says whether an op is
    given up after some hangs: the rules of an import may hang at every combination, known defects of torch at a few.
    """

    _ended: dict[tuple[str, str, str, str], Fate] = field(default_factory=dict)
    _slow: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    _hangs: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits_little: bool = False

    def note(self, observation: Observation) -> None:
        """Take in the next trial."""
        trial, fate = observation.trial, observation.fate
        if fate in (Fate.HANG, Fate.DIED):
            self._ended[_likely_to_end(trial)] = fate
        if fate is Fate.HANG and self.waits_little:
            self._hangs[_likely_to_hang(trial)] += 1
        if fate is Fate.SLOW:
            self._slow[_likely_to_be_slow(trial)] += 1
        else:
            self._slow.pop(_likely_to_be_slow(trial), None)

    def unaffordable(self, trial: Trial) -> str:
        """Return why a trial is not tried, or nothing: a trial that ends the ranks costs new processes."""
        fate = self._ended.get(_likely_to_end(trial))
        return f"combination that ended {fate} before" if fate is not None else self.given_up(trial)

    def given_up(self, trial: Trial) -> str:
        """Return why no more calls of this op are tried, or nothing."""
        if (hangs := self._hangs[_likely_to_hang(trial)]) >= _HANGS_ENOUGH:
            return f"{hangs} combinations of this op hung before"
        slow = self._slow[_likely_to_be_slow(trial)]
        return f"ranks computed too long for the {slow} combinations before" if slow >= _SLOW_ENOUGH else ""

    def of(self, ops: Collection[str] | None = None) -> Costs:
        """Return a copy of what decides about trials of ``ops``, by default of all."""
        ended = {key: fate for key, fate in self._ended.items() if ops is None or key[0] in ops}
        slow = Counter({key: count for key, count in self._slow.items() if ops is None or key[0] in ops})
        hangs = Counter({key: count for key, count in self._hangs.items() if ops is None or key[0] in ops})
        return Costs(ended, slow, hangs, self.waits_little)


def _likely_to_end(trial: Trial) -> tuple[str, str, str, str]:
    """Return the key of trials that are likely to end the ranks too: op, call, mesh, and placements by mesh dim.

    A program is called for many ops.
    """
    case, columns = trial.case, {tuple(map(str, column)) for column in zip(*trial.combination, strict=True)}
    return case.op, case.call, str(trial.mesh), " x ".join(",".join(column) for column in sorted(columns))


def _likely_to_hang(trial: Trial) -> tuple[str, str]:
    """Return the key of trials that are likely to hang too if others did: op, and mesh."""
    return trial.case.op, str(trial.mesh)


def _likely_to_be_slow(trial: Trial) -> tuple[str, str, bool]:
    """Return the key of trials that are likely to be slow too: op, mesh, and whether there is a backward pass."""
    return trial.case.op, str(trial.mesh), bool(trial.cotangents)
