"""Which rules that DTensor claims have really run on a mesh, and which never did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from verifier.cases import Observation, Phase, Verdict, VerdictKind, format_placements, split_placements
from verifier.records import RuleCoverageRecord
from verifier.simpler_calls import is_composed

__all__ = ["RuleCoverage", "columns_run", "ran_at"]


def ran_at(observation: Observation) -> list[str]:
    """Return the placements to which DTensor redistributed the arguments of a trial's op in its forward call.

    Empty if it ran the op as the trial gave them to it, or not at all.
    """
    report = next((report for report in observation.reports if report is not None), None)
    executed = report.executed if report is not None else ()
    own = [e for e in executed if e.phase is Phase.FORWARD and e.op == observation.trial.case.op]
    return list(own[-1].placements) if own else []


def columns_run(observation: Observation) -> Iterator[str]:
    """Yield the input placements, mesh dim by mesh dim, on which the op of a trial ran in its forward call."""
    given = [format_placements(placements) for placements in observation.trial.combination]
    if is_composed(observation.trial.case):  # what the op is given in a program, nobody has seen
        given = []
    for column in zip(*map(split_placements, ran_at(observation) or given), strict=True):
        yield ", ".join(column)


class RuleCoverage:
    """Keeps, for each op, which rules DTensor claims and which of them have run."""

    def __init__(self) -> None:
        self._claimed: defaultdict[str, set[str]] = defaultdict(set)
        self._ran: defaultdict[str, set[str]] = defaultdict(set)

    def claim(self, op: str, rules: Iterable[str]) -> None:
        """Note that DTensor claims ``rules`` of ``op``."""
        self._claimed[op].update(rules)

    def run(self, observation: Observation, verdict: Verdict) -> None:
        """Note which rules a trial ran: none where the forward call was refused, or where the verifier failed."""
        refused = verdict.kind is VerdictKind.UNSUPPORTED and verdict.phase in (Phase.SETUP, Phase.FORWARD)
        if not refused and verdict.kind is not VerdictKind.TOOL_ERROR:
            self._ran[observation.trial.case.op].update(columns_run(observation))

    def records(self) -> dict[str, RuleCoverageRecord]:
        """Return what is known of each op whose claims were read."""
        return {
            op: RuleCoverageRecord(sorted(rules), sorted(rules & self._ran.get(op, set())))
            for op, rules in sorted(self._claimed.items())
        }
