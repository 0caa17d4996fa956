"""Turns the events of a run into its record, and the records of several workers into one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

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
    EdgeRecord,
    FindingRecord,
    GraphRecord,
    KnownRecord,
    MatrixRecord,
    RuleCoverageRecord,
    RulesRecord,
    RunHeader,
    RunRecord,
    UntestedRecord,
)
from verifier.runs.coverage import EdgeCoverage, RuleCoverage, merged_edges

__all__ = ["NO_ARGUMENT", "OTHER_REASONS", "GraphBuilder", "Summary", "join_levels", "merge_records"]

NO_ARGUMENT = "-"
"""Row or column of a matrix where an op has no such tensor argument."""

OTHER_REASONS = "other reasons"
"""What reasons are counted under once there are ``MAX_REASONS`` distinct ones."""

MAX_REASONS = 50

_Cells = dict[str, dict[str, Counter[str]]]
_MatrixKey = tuple[str, str, str, str]
_STATUS_RANK = {"known": 0, "fixed": 1, "untested": 2}


class GraphBuilder(Protocol):
    """What collects redistributions, as ``verifier.runs.graph.RedistributionGraph`` does."""

    def add(self, observation: Observation) -> object:
        """Take in the redistributions of one trial."""
        ...

    def to_record(self) -> GraphRecord:
        """Return all that was taken in."""
        ...


class Summary:
    """A listener that accumulates the events of one run; :meth:`record` may be asked at any time after the first.

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
        self._findings: dict[str, FindingRecord] = {}
        self._untested: Counter[tuple[str, str]] = Counter()
        self._pool_restarts = 0
        self._seconds_by: dict[str, float] = {}
        self._rules = RuleCoverage()
        self._edges = EdgeCoverage()

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case RunStarted(header):
                self._header = header
            case TrialFinished():
                self._add_trial(event)
            case RulesClaimed(op, rules):
                self._rules.claim(op, rules)
            case CaseSkipped(what, reason, count):
                self._untested[what, reason] += count
            case PoolRestarted(seconds=seconds):
                self._pool_restarts += 1
                self._busy_seconds += seconds
            case FindingReported(finding):
                _add_finding(self._findings, finding)
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
            # The first line is the difference; what follows is about this one trial.
            reason = event.verdict.message.partition("\n")[0] or f"no reason given in {case.op}"
            if kind is VerdictKind.UNSUPPORTED:
                reason = _general(reason)
            _tally(self._reasons[kind], reason, 1)
        for report in observation.reports:
            if report is not None:
                for share, seconds in report.seconds:
                    self._seconds_by[share] = self._seconds_by.get(share, 0.0) + seconds
        self._rules.run(observation, event.verdict)
        self._edges.add(observation, event.verdict)
        self._graph.add(observation)

    def record(self, baseline: Sequence[KnownRecord] = ()) -> RunRecord:
        """Return the run so far. What it lists is sorted, so that it does not depend on the order of the events.

        Before the run has finished it is not ``complete``, and its ``seconds`` are those spent in trials and restarts.

        Parameters
        ----------
        baseline
            What became of the baseline's entries in this run.

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
            counts=_by_verdict(self._counts),
            counts_by_op={op: _by_verdict(counts) for op, counts in sorted(self._by_op.items())},
            counts_by_mesh={mesh: _by_verdict(counts) for mesh, counts in sorted(self._by_mesh.items())},
            coverage=dict(sorted(self._coverage.items())),
            findings=_sorted_findings(self._findings.values()),
            baseline=sorted(baseline, key=lambda known: known.fingerprint),
            untested=[UntestedRecord(what, reason, n) for (what, reason), n in sorted(self._untested.items())],
            matrices=_matrix_records(self._matrices),
            graph=self._graph.to_record(),
            pool_restarts=self._pool_restarts,
            seconds_by=dict(sorted(self._seconds_by.items())),
            inconclusive=_by_count(self._reasons[VerdictKind.INCONCLUSIVE]),
            unsupported=_by_count(self._reasons[VerdictKind.UNSUPPORTED]),
            tool_errors=sorted(self._reasons[VerdictKind.TOOL_ERROR]),
            rule_coverage=self._rules.records(),
            edge_coverage=self._edges.records(),
        )


def merge_records(records: Sequence[RunRecord]) -> RunRecord:
    """Return the records of workers that shared one run as the record of that run.

    Counts, occurrences, bytes and ``seconds_by`` are added up; ``seconds`` is the longest, because workers run side by
    side; the run is complete if every part is. The header is the first one's, with the families, meshes, dtypes,
    imports and digests of all. Of two records of one finding, the confirmed, the minimised, the smaller one is kept;
    of two records of one op's rules, the later one.

    Raises
    ------
    ValueError
        If there are no records.
    """
    if not records:
        raise ValueError("no records to merge; a run has at least one")
    first = records[0].header
    findings: dict[str, FindingRecord] = {}
    known: dict[str, KnownRecord] = {}
    untested: Counter[tuple[str, str]] = Counter()
    matrices: dict[_MatrixKey, _Cells] = {}
    for record in records:
        for finding in record.findings:
            _add_finding(findings, finding)
        for entry in record.baseline:
            kept = known.setdefault(entry.fingerprint, entry)
            if _STATUS_RANK[entry.status] < _STATUS_RANK[kept.status]:
                known[entry.fingerprint] = entry
        for skipped in record.untested:
            untested[skipped.what, skipped.reason] += skipped.count
        for matrix in record.matrices:
            cells = matrices.setdefault((matrix.op, matrix.mesh, matrix.row_name, matrix.column_name), {})
            for row, columns in matrix.cells.items():
                for column, counts in columns.items():
                    cells.setdefault(row, {}).setdefault(column, Counter()).update(counts)
    return RunRecord(
        header=_merged_header(first, [record.header for record in records]),
        seconds=max(record.seconds for record in records),
        complete=all(record.complete for record in records),
        trials=sum(record.trials for record in records),
        counts=_by_verdict(_added(record.counts for record in records)),
        counts_by_op=_added_by_key(record.counts_by_op for record in records),
        counts_by_mesh=_added_by_key(record.counts_by_mesh for record in records),
        coverage=dict(sorted(_added(record.coverage for record in records).items())),
        findings=_sorted_findings(findings.values()),
        baseline=[known[fingerprint] for fingerprint in sorted(known)],
        untested=[UntestedRecord(what, reason, count) for (what, reason), count in sorted(untested.items())],
        matrices=_matrix_records(matrices),
        graph=_merged_graph([record.graph for record in records]),
        pool_restarts=sum(record.pool_restarts for record in records),
        seconds_by=_added_seconds([record.seconds_by for record in records]),
        inconclusive=_merged_reasons(record.inconclusive for record in records),
        unsupported=_merged_reasons(record.unsupported for record in records),
        tool_errors=sorted(_merged_reasons(dict.fromkeys(record.tool_errors, 1) for record in records)),
        rules=_merged_rules([record.rules for record in records if record.rules is not None]),
        rule_coverage=_merged_coverage([record.rule_coverage for record in records]),
        edge_coverage=merged_edges([record.edge_coverage for record in records]),
    )


def join_levels(level2: RunRecord, rules: RunRecord) -> RunRecord:
    """Return a run on meshes and a rule check as one record, so that they are shown and judged together.

    What :func:`merge_records` adds up or unites is added up or united here, too: an entry of the baseline that either
    run saw fail is known, and the whole is complete if both runs are. They ran one after the other, so that ``seconds``
    is their sum. The header is that of the newer run, with the families, meshes, dtypes, imports and commands of both.
    """
    records = (level2, rules)
    newer = max(records, key=lambda record: (record.header.started, record.header.id))
    header = _merged_header(newer.header, [record.header for record in records])
    command = " ; ".join(_union([record.header.command] for record in records))
    return replace(
        merge_records(records),
        header=replace(header, command=command),
        seconds=level2.seconds + rules.seconds,
    )


def _merged_header(base: RunHeader, headers: Sequence[RunHeader]) -> RunHeader:
    return replace(
        base,
        families=_union(header.families for header in headers),
        meshes=_union(header.meshes for header in headers),
        dtypes=_union(header.dtypes for header in headers),
        imports=_union(header.imports for header in headers),
        own_rules=sorted(_union(header.own_rules for header in headers)),
        digests={name: digest for header in headers for name, digest in header.digests.items()},
    )


def _merged_rules(parts: Sequence[RulesRecord]) -> RulesRecord | None:
    """Return the rule checks as one. ``sizes`` is the fewest, because nothing more can be said of all ops."""
    if not parts:
        return None
    ops = {name: op for part in parts for name, op in part.ops.items()}
    return RulesRecord(
        combinations=sum(part.combinations for part in parts),
        seconds=sum(part.seconds for part in parts),
        seconds_starting=sum(part.seconds_starting for part in parts),
        seconds_confirming=sum(part.seconds_confirming for part in parts),
        jobs=max(part.jobs for part in parts),
        meshes=_union(part.meshes for part in parts),
        dtype=", ".join(_union(part.dtype.split(", ") for part in parts)),
        sizes=min(part.sizes for part in parts),
        claims_only=any(part.claims_only for part in parts),
        ops=dict(sorted(ops.items())),
    )


def _merged_coverage(parts: Sequence[Mapping[str, RuleCoverageRecord]]) -> dict[str, RuleCoverageRecord]:
    """Return what any part knows of: what one worker claims of an op another may have exercised."""
    merged: dict[str, RuleCoverageRecord] = {}
    for op in sorted({op for part in parts for op in part}):
        of_op = [part[op] for part in parts if op in part]
        merged[op] = RuleCoverageRecord(
            sorted({rule for one in of_op for rule in one.claimed}),
            sorted({rule for one in of_op for rule in one.exercised}),
        )
    return merged


# ------------------------------------------------------------------------------------------------------------- counts
def _tally(counts: Counter[str], reason: str, count: int) -> None:
    """Count a reason; messages that name values would otherwise make as many reasons as there are trials."""
    distinct = len(counts) - (OTHER_REASONS in counts)
    counts[reason if reason in counts or distinct < MAX_REASONS else OTHER_REASONS] += count


def _general(reason: str) -> str:
    """Return the first sentence of a refusal, for any placements: there are as many of these as there are trials.

    >>> _general("RuntimeError: redistribute from S(1) to P(avg) not supported yet. Use another")
    'RuntimeError: redistribute from S to P not supported yet'
    """
    return re.sub(r"\b(_?[SP]|MaskP|_NormP)\([^()]*\)", r"\1", reason).partition(". ")[0]


def _merged_reasons(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    merged: Counter[str] = Counter()
    for part in parts:
        for reason, count in part.items():
            if reason == OTHER_REASONS:
                merged[reason] += count
            else:
                _tally(merged, reason, count)
    return _by_count(merged)


def _by_verdict(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts in the order of the verdicts, those that occurred only."""
    return {kind.value: counts[kind.value] for kind in VerdictKind if counts.get(kind.value)}


def _by_count(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _added(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return total


def _added_by_key(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter[str]] = {}
    for part in parts:
        for key, counts in part.items():
            total.setdefault(key, Counter()).update(counts)
    return {key: _by_verdict(counts) for key, counts in sorted(total.items())}


def _added_seconds(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    shares = sorted({share for part in parts for share in part})
    return {share: sum(part.get(share, 0.0) for part in parts) for share in shares}


def _union(parts: Iterable[Iterable[str]]) -> list[str]:
    """Return the distinct texts in the order in which they first occur."""
    return list(dict.fromkeys(text for part in parts for text in part))


# ---------------------------------------------------------------------------------------- findings, matrices and graph
def _add_finding(findings: dict[str, FindingRecord], finding: FindingRecord) -> None:
    """Add a finding, or its occurrences to those of the same one."""
    other = findings.get(finding.fingerprint)
    if other is None:
        findings[finding.fingerprint] = finding
        return
    best = min(finding, other, key=_preference)
    findings[finding.fingerprint] = replace(
        best,
        occurrences=finding.occurrences + other.occurrences,
        known=finding.known or other.known,
        also=sorted({*finding.also, *other.also, _where(finding), _where(other)} - {_where(best)}),
        groups=sorted({*finding.groups, *other.groups}),
    )


def _where(finding: FindingRecord) -> str:
    """Return mesh and combination as ``also`` has them."""
    return f"{finding.mesh}: " + ", ".join(f"{name}={text}" for name, text in finding.input_placements.items())


def _preference(finding: FindingRecord) -> tuple[bool, bool, int, bytes]:
    """Sort key that puts the best evidence first, whatever the order in which findings came in."""
    trial = msgspec.json.encode(finding.trial)
    unsure = finding.confirmed.unsure
    return unsure, not finding.minimised, len(trial), trial


def _sorted_findings(findings: Iterable[FindingRecord]) -> list[FindingRecord]:
    return sorted(findings, key=lambda finding: (finding.op, finding.verdict, finding.fingerprint))


def _matrix_records(matrices: Mapping[_MatrixKey, _Cells]) -> list[MatrixRecord]:
    return [
        MatrixRecord(
            op=op,
            mesh=mesh,
            row_name=row_name,
            column_name=column_name,
            cells={
                row: {column: _by_verdict(counts) for column, counts in sorted(columns.items())}
                for row, columns in sorted(cells.items())
            },
        )
        for (op, mesh, row_name, column_name), cells in sorted(matrices.items(), key=lambda item: item[0])
    ]


def _merged_graph(graphs: Sequence[GraphRecord]) -> GraphRecord:
    edges: dict[tuple[str, str, str, int, str], EdgeRecord] = {}
    for edge in (edge for graph in graphs for edge in graph.edges):
        key = (edge.source, edge.target, edge.mesh, edge.mesh_dim, edge.collective)
        same = edges.get(key)
        edges[key] = edge if same is None else _added_edge(same, edge)
    return GraphRecord(
        nodes=sorted(_union(graph.nodes for graph in graphs)), edges=[edges[key] for key in sorted(edges)]
    )


def _added_edge(one: EdgeRecord, other: EdgeRecord) -> EdgeRecord:
    return replace(
        one,
        bytes=one.bytes + other.bytes,
        count=one.count + other.count,
        phases=dict(sorted(_added([one.phases, other.phases]).items())),
    )
