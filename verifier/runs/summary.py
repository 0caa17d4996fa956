"""Turns the events of a run into its record."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from verifier.core.observation import Observation
from verifier.core.verdict import VerdictKind
from verifier.events import (
    CaseSkipped,
    Event,
    FindingReported,
    PoolRestarted,
    RulesClaimed,
    RunFinished,
    RunStarted,
    TrialFinished,
)
from verifier.records.schema import (
    FindingRecord,
    GraphRecord,
    KnownRecord,
    MatrixRecord,
    RunHeader,
    RunRecord,
    UntestedRecord,
)
from verifier.runs.coverage import EdgeCoverage, RuleCoverage
from verifier.runs.merging import added, by_frequency, count_reason, joined_findings

__all__ = ["NO_ARGUMENT", "GraphBuilder", "Summary"]

NO_ARGUMENT = "-"
"""Row or column of a matrix for an op without that tensor argument."""

_Cells = dict[str, dict[str, Counter[str]]]
_MatrixKey = tuple[str, str, str, str]


class GraphBuilder(Protocol):
    """A collector of redistributions, such as ``verifier.runs.graph.RedistributionGraph``."""

    def add(self, observation: Observation, passed: bool = True) -> object:
        """Add the redistributions of a trial, and the call if it ``passed``."""
        ...

    def to_record(self) -> GraphRecord:
        """Return the graph of all added trials."""
        ...


class Summary:
    """A listener that accumulates the events of a run; :meth:`record` may be called after the first event.

    Parameters
    ----------
    graph
        Gets each observation; its record becomes the run's ``graph``.
    """

    def __init__(self, graph: GraphBuilder) -> None:
        self._graph = graph
        self._header: RunHeader | None = None
        self._finished: RunFinished | None = None
        self._busy_seconds = 0.0
        self._trials = 0
        self._counts: Counter[str] = Counter()
        self._by_op: dict[str, Counter[str]] = {}
        self._by_mesh: dict[str, Counter[str]] = {}
        self._coverage: Counter[str] = Counter()
        self._matrices: dict[_MatrixKey, _Cells] = {}
        self._reasons: dict[VerdictKind, Counter[str]] = {
            kind: Counter() for kind in (VerdictKind.INCONCLUSIVE, VerdictKind.UNSUPPORTED, VerdictKind.TOOL_ERROR)
        }
        self._findings: list[FindingRecord] = []
        self._untested: Counter[tuple[str, str, str]] = Counter()
        self._pool_restarts = 0
        self._seconds_by: dict[str, float] = {}
        self._rules = RuleCoverage()
        self._edges = EdgeCoverage()

    def __call__(self, event: Event) -> None:
        """Add an event."""
        match event:
            case RunStarted(header):
                self._header = header
            case TrialFinished():
                self._add_trial(event)
            case RulesClaimed(op, rules):
                self._rules.claim(op, rules)
            case CaseSkipped(what, reason, count, remedy):
                self._untested[what, reason, remedy] += count
            case PoolRestarted(seconds=seconds):
                self._pool_restarts += 1
                self._busy_seconds += seconds
            case FindingReported(finding):
                self._findings = joined_findings(self._findings, [finding])
            case RunFinished():
                self._finished = event

    def _add_trial(self, event: TrialFinished) -> None:
        observation, kind = event.observation, event.verdict.kind
        case, mesh = observation.trial.case, str(observation.trial.mesh)
        self._trials += 1
        self._busy_seconds += observation.seconds
        self._counts[kind.value] += 1
        self._by_op.setdefault(case.op, Counter())[kind.value] += 1
        self._by_mesh.setdefault(mesh, Counter())[kind.value] += 1
        self._coverage.update(case.tags)
        (row_name, row), (column_name, column) = (*event.rows, (NO_ARGUMENT,) * 2, (NO_ARGUMENT,) * 2)[:2]
        cells = self._matrices.setdefault((case.op, mesh, row_name, column_name), {})
        cells.setdefault(row, {}).setdefault(column, Counter())[kind.value] += 1
        if kind in self._reasons:
            # The first line is the difference; the other lines are about this trial only.
            reason = event.verdict.message.partition("\n")[0] or f"no reason given in {case.op}"
            if kind is VerdictKind.UNSUPPORTED:
                reason = _general(reason)
            count_reason(self._reasons[kind], reason)
        for report in observation.reports:
            if report is not None:
                for share, seconds in report.seconds:
                    self._seconds_by[share] = self._seconds_by.get(share, 0.0) + seconds
        self._rules.run(observation, event.verdict)
        self._edges.add(observation, event.verdict)
        self._graph.add(observation, kind is VerdictKind.PASS)

    def record(self, baseline: Sequence[KnownRecord] = ()) -> RunRecord:
        """Return the run so far. Its lists are sorted, so they do not depend on the order of the events.

        An unfinished run is not ``complete``, and its ``seconds`` are those of trials and restarts.

        Parameters
        ----------
        baseline
            The states of the baseline's entries in this run.

        Raises
        ------
        ValueError
            If the run has not started: there is no header yet.
        """
        if self._header is None:
            raise ValueError("a run is recorded from its RunStarted event on; none was received")
        finished = self._finished or RunFinished(self._busy_seconds, complete=False)
        return RunRecord(
            header=self._header,
            seconds=finished.seconds,
            complete=finished.complete,
            trials=self._trials,
            counts=added(self._counts),
            counts_by_op=added(self._by_op),
            counts_by_mesh=added(self._by_mesh),
            coverage=added(self._coverage),
            findings=list(self._findings),
            baseline=sorted(baseline, key=lambda known: known.fingerprint),
            untested=[
                UntestedRecord(what, reason, n, remedy) for (what, reason, remedy), n in sorted(self._untested.items())
            ],
            matrices=[MatrixRecord(*key, added(self._matrices[key])) for key in sorted(self._matrices)],
            graph=self._graph.to_record(),
            pool_restarts=self._pool_restarts,
            seconds_by=added(self._seconds_by),
            inconclusive=by_frequency(self._reasons[VerdictKind.INCONCLUSIVE]),
            unsupported=by_frequency(self._reasons[VerdictKind.UNSUPPORTED]),
            tool_errors=sorted(self._reasons[VerdictKind.TOOL_ERROR]),
            rule_coverage=self._rules.records(),
            edge_coverage=self._edges.records(),
        )


def _general(reason: str) -> str:
    """Return the first sentence of a refusal without tensor dims and reductions, so that few reasons differ.

    >>> _general("RuntimeError: redistribute from S(1) to P(avg) not supported yet. Use another")
    'RuntimeError: redistribute from S to P not supported yet'
    """
    return re.sub(r"\b(_?[SP]|MaskP|_NormP)\([^()]*\)", r"\1", reason).partition(". ")[0]
