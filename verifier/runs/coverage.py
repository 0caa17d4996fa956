"""Counts the rules and redistributions that a run has tried."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from verifier.core.observation import Observation
from verifier.core.placement_text import format_placements, split_placements
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.placements.edges import edges_between, possible_edges, resolved_moves
from verifier.programs import is_composed
from verifier.records.schema import EdgeCoverageRecord, RuleCoverageRecord
from verifier.torch_internals.placements import Placements

__all__ = [
    "EdgeCoverage",
    "RuleCoverage",
    "columns_run",
    "ran_at",
]


class EdgeCoverage:
    """Collects, for each number of mesh dims, the edges that explicit redistributions took.

    An edge is exercised if DTensor planned a redistribution along it, forward or backward. It is refused if DTensor
    never did more than say that the redistribution is not supported.
    """

    def __init__(self) -> None:
        self._exercised: defaultdict[int, set[str]] = defaultdict(set)
        self._refused: defaultdict[int, set[str]] = defaultdict(set)

    def add(self, observation: Observation, verdict: Verdict) -> None:
        """Add a trial."""
        trial = observation.trial
        asked = resolved_moves(trial.case, trial.combination)
        if not asked or verdict.kind is VerdictKind.TOOL_ERROR:
            return
        ndim = trial.mesh.ndim
        exercised = self._exercised[ndim]
        report = next((report for report in observation.reports if report is not None), None)
        for step in report.redistributions if report is not None else ():
            exercised.update(edges_between(*step.path))
        if verdict.kind is VerdictKind.UNSUPPORTED and verdict.phase in (Phase.SETUP, Phase.FORWARD):
            self._refused[ndim].update(_edges(asked))

    def records(self) -> dict[str, EdgeCoverageRecord]:
        """Return a record for each number of mesh dims with explicit redistributions."""
        possible = possible_edges()
        return {
            str(ndim): EdgeCoverageRecord(
                len(possible), sorted(exercised & possible), sorted((self._refused[ndim] & possible) - exercised)
            )
            for ndim, exercised in sorted(self._exercised.items())
        }


def _edges(moves: Iterable[tuple[Placements, Placements]]) -> Iterator[str]:
    for source, target in moves:
        yield from edges_between(format_placements(source), format_placements(target))


def ran_at(observation: Observation) -> list[str]:
    """Return the placements to which DTensor redistributed the arguments of a trial's op in its forward call.

    The result is empty if DTensor redistributed nothing or did not run the op.
    """
    report = next((report for report in observation.reports if report is not None), None)
    executed = report.executed if report is not None else ()
    own = [e for e in executed if e.phase is Phase.FORWARD and e.op == observation.trial.case.op]
    return list(own[-1].placements) if own else []


def columns_run(observation: Observation) -> Iterator[str]:
    """Yield the input placements, mesh dim by mesh dim, on which the op of a trial ran in its forward call."""
    given = [format_placements(placements) for placements in observation.trial.combination]
    if is_composed(observation.trial.case):  # the op's placements inside a program are not known
        given = []
    for column in zip(*map(split_placements, ran_at(observation) or given), strict=True):
        yield ", ".join(column)


class RuleCoverage:
    """Collects, for each op, the rules that DTensor claims and the claimed rules that have run."""

    def __init__(self) -> None:
        self._claimed: defaultdict[str, set[str]] = defaultdict(set)
        self._ran: defaultdict[str, set[str]] = defaultdict(set)

    def claim(self, op: str, rules: Iterable[str]) -> None:
        """Add ``rules`` that DTensor claims for ``op``."""
        self._claimed[op].update(rules)

    def run(self, observation: Observation, verdict: Verdict) -> None:
        """Add the rules that a trial ran: none if the forward call was refused or the verifier failed."""
        refused = verdict.kind is VerdictKind.UNSUPPORTED and verdict.phase in (Phase.SETUP, Phase.FORWARD)
        if not refused and verdict.kind is not VerdictKind.TOOL_ERROR:
            self._ran[observation.trial.case.op].update(columns_run(observation))

    def records(self) -> dict[str, RuleCoverageRecord]:
        """Return a record for each op whose claims were read."""
        return {
            op: RuleCoverageRecord(sorted(rules), sorted(rules & self._ran.get(op, set())))
            for op, rules in sorted(self._claimed.items())
        }
