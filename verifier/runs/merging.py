"""Merges the records of workers, or of both levels, into one."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

import msgspec

from verifier.core.verdict import VerdictKind
from verifier.records.schema import (
    CallRecord,
    EdgeCoverageRecord,
    EdgeRecord,
    FindingRecord,
    GraphRecord,
    KnownRecord,
    MatrixRecord,
    PathRecord,
    RuleCoverageRecord,
    RulesRecord,
    RunHeader,
    RunRecord,
    UntestedRecord,
)

__all__ = [
    "MAX_REASONS",
    "OTHER_REASONS",
    "added",
    "by_frequency",
    "count_reason",
    "join_levels",
    "joined_findings",
    "merge_records",
]

OTHER_REASONS = "other reasons"
"""The text that counts further reasons after ``MAX_REASONS`` distinct reasons."""

MAX_REASONS = 50

_STATUS_RANK = {"known": 0, "fixed": 1, "untested": 2}
_VERDICT_RANK = {kind.value: rank for rank, kind in enumerate(VerdictKind)}

_NOTHING: Mapping[str, Any] = {}

T = TypeVar("T")


def merge_records(records: Sequence[RunRecord]) -> RunRecord:
    """Return the record of a run from the records of the workers that shared it.

    Counts, occurrences, bytes and ``seconds_by`` are added up. ``seconds`` is the maximum, because workers run in
    parallel. The run is complete if every part is. The header is the first record's, with the families, meshes, dtypes,
    imports and digests of all. If a finding has two records, the confirmed, then minimised, then smaller record is
    kept. If an op's rules have two records, the later record is kept.

    Raises
    ------
    ValueError
        If there are no records.
    """
    if not records:
        raise ValueError("no records to merge; a run has at least one")
    return RunRecord(**{name: reduce(join, (getattr(r, name) for r in records)) for name, join in _JOINS.items()})


def join_levels(level2: RunRecord, rules: RunRecord) -> RunRecord:
    """Return a run on meshes and a rule check as one record, which is shown and judged as a whole.

    Fields are combined as in :func:`merge_records`: a baseline entry that failed in either run is known, and the result
    is complete if both runs are. ``seconds`` is the sum, because one run followed the other. The header is the newer
    run's, with the families, meshes, dtypes, imports and commands of both.
    """
    newer = max(level2.header, rules.header, key=lambda header: (header.started, header.id))
    merged = merge_records([level2, rules])
    command = " ; ".join(_union([level2.header.command], [rules.header.command]))
    united = {name: getattr(merged.header, name) for name in _UNITED}
    header = replace(newer, **united, command=command)
    return replace(merged, header=header, seconds=level2.seconds + rules.seconds)


# ------------------------------------------------------------------------------------------------------------- numbers
def added(one: Mapping[str, Any], other: Mapping[str, Any] = _NOTHING) -> dict[str, Any]:
    """Return the sums of numbers by name, or by nested names, sorted; verdicts have their own order.

    >>> added({"PASS": 1, "CRASH": 2}, {"PASS": 3}), added({"b": {"x": 1}}, {"a": {"x": 0.5}})
    ({'PASS': 4, 'CRASH': 2}, {'a': {'x': 0.5}, 'b': {'x': 1}})
    """
    names = sorted({**one, **other}, key=lambda name: (_VERDICT_RANK.get(name, -1), name))
    return {name: _sum([part[name] for part in (one, other) if name in part]) for name in names}


def _sum(values: Sequence[Any]) -> Any:
    return added(*values) if isinstance(values[0], Mapping) else sum(values)


def count_reason(counts: Counter[str], reason: str, count: int = 1) -> None:
    """Count a reason; the number of reasons is limited, because messages with values may differ for every trial."""
    distinct = len(counts) - (OTHER_REASONS in counts)
    known = reason in counts or reason == OTHER_REASONS or distinct < MAX_REASONS
    counts[reason if known else OTHER_REASONS] += count


def by_frequency(*parts: Mapping[str, int]) -> dict[str, int]:
    """Return the summed counts of reasons, the most frequent first."""
    merged: Counter[str] = Counter()
    for part in parts:
        for reason, count in part.items():
            count_reason(merged, reason, count)
    return dict(sorted(merged.items(), key=lambda item: (-item[1], item[0])))


def _errors(one: Sequence[str], other: Sequence[str]) -> list[str]:
    return sorted(by_frequency(dict.fromkeys(one, 1), dict.fromkeys(other, 1)))


# ------------------------------------------------------------------------------------------- what has a name of its own
def _union(*parts: Iterable[str]) -> list[str]:
    """Return the distinct texts in order of first occurrence."""
    return list(dict.fromkeys(text for part in parts for text in part))


def _sorted_union(*parts: Iterable[str]) -> list[str]:
    return sorted(_union(*parts))


def _joined(items: Iterable[T], key: Callable[[T], Hashable], join: Callable[[T, T], T]) -> list[T]:
    """Return ``items``, with items of equal keys joined."""
    found: dict[Hashable, T] = {}
    for item in items:
        found[key(item)] = join(found[key(item)], item) if key(item) in found else item
    return list(found.values())


def _by_name(join: Callable[[T, T], T]) -> Callable[[Mapping[str, T], Mapping[str, T]], dict[str, T]]:
    def joined(one: Mapping[str, T], other: Mapping[str, T]) -> dict[str, T]:
        both = {name: join(one[name], other[name]) for name in one.keys() & other.keys()}
        return dict(sorted({**one, **other, **both}.items()))

    return joined


_UNITED: Mapping[str, Callable[[Any, Any], Any]] = {
    "families": _union,
    "meshes": _union,
    "dtypes": _union,
    "imports": _union,
    "own_rules": _sorted_union,
    "digests": operator.or_,
}
"""The fields of a header that are united over all parts; other fields are the first part's."""


def _header(one: RunHeader, other: RunHeader) -> RunHeader:
    united = {name: join(getattr(one, name), getattr(other, name)) for name, join in _UNITED.items()}
    return replace(one, **united)


def joined_findings(*parts: Iterable[FindingRecord]) -> list[FindingRecord]:
    """Return the findings of all parts in the order of a record, each with its best evidence."""
    findings = _joined((one for part in parts for one in part), lambda one: one.fingerprint, _finding)
    return sorted(findings, key=lambda one: (one.op, one.verdict, one.fingerprint))


def _finding(one: FindingRecord, other: FindingRecord) -> FindingRecord:
    best = min(other, one, key=_preference)
    return replace(
        best,
        occurrences=one.occurrences + other.occurrences,
        known=one.known or other.known,
        also=sorted({*one.also, *other.also, _where(one), _where(other)} - {_where(best)}),
        groups=_sorted_union(one.groups, other.groups),
    )


def _where(finding: FindingRecord) -> str:
    """Return mesh and combination as in the field ``also``."""
    return f"{finding.mesh}: " + ", ".join(f"{name}={text}" for name, text in finding.input_placements.items())


def _preference(finding: FindingRecord) -> tuple[bool, bool, int, bytes]:
    """Sort key that puts the best evidence first, independently of the order of findings."""
    trial = msgspec.json.encode(finding.trial)
    unsure = finding.confirmed.unsure
    return unsure, not finding.minimised, len(trial), trial


def _baseline(one: Sequence[KnownRecord], other: Sequence[KnownRecord]) -> list[KnownRecord]:
    """Return the states of the baseline's entries; an entry that failed in either part is known."""

    def best(*entries: KnownRecord) -> KnownRecord:
        return min(entries, key=lambda entry: _STATUS_RANK[entry.status])

    return sorted(_joined([*one, *other], lambda entry: entry.fingerprint, best), key=lambda entry: entry.fingerprint)


def _untested(one: Sequence[UntestedRecord], other: Sequence[UntestedRecord]) -> list[UntestedRecord]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for skipped in (*one, *other):
        counts[skipped.what, skipped.reason, skipped.remedy] += skipped.count
    return [UntestedRecord(what, reason, n, remedy) for (what, reason, remedy), n in sorted(counts.items())]


def _matrices(one: Sequence[MatrixRecord], other: Sequence[MatrixRecord]) -> list[MatrixRecord]:
    def key(matrix: MatrixRecord) -> tuple[str, ...]:
        return matrix.op, matrix.mesh, matrix.row_name, matrix.column_name

    def both(this: MatrixRecord, that: MatrixRecord) -> MatrixRecord:
        return replace(this, cells=added(this.cells, that.cells))

    return sorted(_joined([*one, *other], key, both), key=key)


def _graph(one: GraphRecord, other: GraphRecord) -> GraphRecord:
    def key(edge: EdgeRecord) -> tuple[str, str, str, int, str]:
        return edge.source, edge.target, edge.mesh, edge.mesh_dim, edge.collective

    def both(this: EdgeRecord, that: EdgeRecord) -> EdgeRecord:
        phases = added(this.phases, that.phases)
        return replace(this, bytes=this.bytes + that.bytes, count=this.count + that.count, phases=phases)

    def path_key(path: PathRecord) -> tuple[object, ...]:
        ends = (path.op, path.mesh, path.tensor, path.source, path.target)
        asked = (path.explicit, path.given, path.by, path.repeats, path.undoes)
        return *ends, tuple(map(tuple, path.steps)), *asked

    def both_paths(this: PathRecord, that: PathRecord) -> PathRecord:
        return replace(this, count=this.count + that.count, phases=added(this.phases, that.phases))

    def call_key(call: CallRecord) -> tuple[str, str, str]:
        return call.op, call.mesh, call.given

    def both_calls(this: CallRecord, that: CallRecord) -> CallRecord:
        return replace(this, count=this.count + that.count)

    edges = _joined([*one.edges, *other.edges], key, both)
    paths = sorted(_joined([*one.paths, *other.paths], path_key, both_paths), key=path_key)
    calls = sorted(_joined([*one.calls, *other.calls], call_key, both_calls), key=call_key)
    return GraphRecord(_sorted_union(one.nodes, other.nodes), sorted(edges, key=key), paths, calls)


def _rules(one: RulesRecord | None, other: RulesRecord | None) -> RulesRecord | None:
    """Return the merged rule checks. ``sizes`` is the minimum, because that holds for all ops."""
    if one is None or other is None:
        return one or other
    return RulesRecord(
        combinations=one.combinations + other.combinations,
        seconds=one.seconds + other.seconds,
        seconds_starting=one.seconds_starting + other.seconds_starting,
        seconds_confirming=one.seconds_confirming + other.seconds_confirming,
        jobs=max(one.jobs, other.jobs),
        meshes=_union(one.meshes, other.meshes),
        dtype=", ".join(_union(one.dtype.split(", "), other.dtype.split(", "))),
        sizes=min(one.sizes, other.sizes),
        claims_only=one.claims_only or other.claims_only,
        ops=dict(sorted((one.ops | other.ops).items())),
    )


def _rule_coverage(one: RuleCoverageRecord, other: RuleCoverageRecord) -> RuleCoverageRecord:
    """Return the union of both parts, because one worker may exercise a rule that another worker claims."""
    claimed, exercised = (one.claimed, other.claimed), (one.exercised, other.exercised)
    return RuleCoverageRecord(_sorted_union(*claimed), _sorted_union(*exercised))


def _edge_coverage(one: EdgeCoverageRecord, other: EdgeCoverageRecord) -> EdgeCoverageRecord:
    """Return the edges that either part exercised, and the other edges that either part saw refused."""
    exercised = {*one.exercised, *other.exercised}
    refused = {*one.refused, *other.refused} - exercised
    return EdgeCoverageRecord(max(one.possible, other.possible), sorted(exercised), sorted(refused))


_JOINS: Mapping[str, Callable[[Any, Any], Any]] = {
    "header": _header,
    "seconds": max,
    "complete": operator.and_,
    "trials": operator.add,
    "counts": added,
    "counts_by_op": added,
    "counts_by_mesh": added,
    "coverage": added,
    "findings": joined_findings,
    "baseline": _baseline,
    "untested": _untested,
    "matrices": _matrices,
    "graph": _graph,
    "pool_restarts": operator.add,
    "seconds_by": added,
    "inconclusive": by_frequency,
    "unsupported": by_frequency,
    "tool_errors": _errors,
    "rules": _rules,
    "rule_coverage": _by_name(_rule_coverage),
    "edge_coverage": _by_name(_edge_coverage),
    "format_version": max,
}
"""Functions that merge the values of each field of a :class:`RunRecord`."""
