"""Which rules that DTensor claims have really run on a mesh, and which never did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from verifier.cases import Observation, Phase, VerdictKind, format_placements, split_placements
from verifier.records import RuleCoverageRecord

__all__ = ["RuleCoverage", "columns_run"]

_INCONCLUSIVE = (VerdictKind.TOOL_ERROR, VerdictKind.UNSUPPORTED)


def columns_run(observation: Observation) -> Iterator[str]:
    """Yield the input placements, mesh dim by mesh dim, on which the op of a trial ran in its forward call.

    They are those that the trial gave it, or those to which DTensor redistributed its arguments.
    """
    trial = observation.trial
    report = next((report for report in observation.reports if report is not None), None)
    if report is None:
        return
    own = [e for e in report.executed if e.phase is Phase.FORWARD and e.op == trial.case.op]
    texts = own[-1].placements if own else [format_placements(placements) for placements in trial.combination]
    for column in zip(*map(split_placements, texts), strict=True):
        yield ", ".join(column)


class RuleCoverage:
    """Counts, for each op, how often each rule that DTensor claims has run."""

    def __init__(self) -> None:
        self._claimed: defaultdict[str, set[str]] = defaultdict(set)
        self._ran: defaultdict[str, dict[str, int]] = defaultdict(dict)

    def claim(self, op: str, rules: Iterable[str]) -> None:
        """Note that DTensor claims ``rules`` of ``op``."""
        self._claimed[op].update(rules)

    def run(self, observation: Observation, verdict: VerdictKind) -> None:
        """Note which rules a trial ran. What DTensor refused, or where the verifier failed, ran none."""
        if verdict in _INCONCLUSIVE:
            return
        counts = self._ran[observation.trial.case.op]
        for rule in columns_run(observation):
            counts[rule] = counts.get(rule, 0) + 1

    def count(self, op: str, rule: str) -> int:
        """Return how often ``rule`` has run."""
        return self._ran[op].get(rule, 0) if op in self._ran else 0

    def records(self) -> dict[str, RuleCoverageRecord]:
        """Return what is known of each op whose claims were read."""
        return {
            op: RuleCoverageRecord(sorted(rules), sorted(rules & self._ran.get(op, {}).keys()))
            for op, rules in sorted(self._claimed.items())
        }
