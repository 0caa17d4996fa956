"""Edges between placements that redistributions take: which were asked for, which DTensor really took or refused.

An edge says what one mesh dim goes from and to, as ``S(0) -> R``. Of a strided shard it leaves the stride out. How many
mesh dims there are makes a difference to DTensor's planner, so edges are counted for each number of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from verifier.cases import (
    BITWISE_REDUCTIONS,
    REDUCTIONS,
    Combination,
    Observation,
    OpCase,
    Phase,
    Placements,
    Verdict,
    VerdictKind,
    format_placements,
    split_placements,
)
from verifier.records import EdgeCoverageRecord
from verifier.targets import explicit_moves

__all__ = ["EdgeCoverage", "edges_between", "merged_edges", "possible_edges", "resolved_moves"]

_TENSOR_DIMS = 3
"""Edges are counted for tensors of up to so many dims."""


def resolved_moves(case: OpCase, combination: Combination) -> tuple[tuple[Placements, Placements], ...]:
    """Return the redistributions that ``case`` asks for where its arguments are placed as ``combination`` says."""
    return tuple(
        (combination[source] if isinstance(source, int) else source, target) for source, target in explicit_moves(case)
    )


def possible_edges() -> frozenset[str]:
    """Return every edge on one mesh dim, of tensors of up to three dims.

    >>> len(possible_edges()), "P(sum) -> S(1)" in possible_edges(), "R -> R" in possible_edges()
    (210, True, False)
    """
    letters = ["R", *(f"P({reduction})" for reduction in (*REDUCTIONS, *BITWISE_REDUCTIONS))]
    letters += [f"{kind}({dim})" for kind in ("S", "_S") for dim in range(_TENSOR_DIMS)]
    return frozenset(f"{source} -> {target}" for source in letters for target in letters if source != target)


def edges_between(source: str, target: str) -> Iterator[str]:
    """Yield the edge on each mesh dim between placements as text; a mesh dim on which nothing changes has none.

    >>> list(edges_between("(S(0), R, _S(1, 2))", "(R, R, S(1))"))
    ['S(0) -> R', '_S(1) -> S(1)']
    """
    for first, last in zip(split_placements(source), split_placements(target), strict=True):
        if first != last:
            yield f"{_letter(first)} -> {_letter(last)}"


def _letter(text: str) -> str:
    return text.partition(",")[0] + ")" if text.startswith("_S(") else text


class EdgeCoverage:
    """Keeps, for each number of mesh dims, which edges calls that ask for redistributions have taken.

    An edge counts as exercised where DTensor planned a redistribution along it, forward or backward, and as refused
    where it only ever said that it does not support what was asked.
    """

    def __init__(self) -> None:
        self._exercised: defaultdict[int, set[str]] = defaultdict(set)
        self._refused: defaultdict[int, set[str]] = defaultdict(set)

    def add(self, observation: Observation, verdict: Verdict) -> None:
        """Take in one trial."""
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
        """Return what is known for each number of mesh dims on which redistributions were asked for."""
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


def merged_edges(parts: Sequence[Mapping[str, EdgeCoverageRecord]]) -> dict[str, EdgeCoverageRecord]:
    """Return what any part has exercised, and of the rest what any part saw refused."""
    merged = {}
    for ndim in sorted({ndim for part in parts for ndim in part}):
        records = [part[ndim] for part in parts if ndim in part]
        exercised = {edge for record in records for edge in record.exercised}
        refused = {edge for record in records for edge in record.refused} - exercised
        merged[ndim] = EdgeCoverageRecord(
            max(record.possible for record in records), sorted(exercised), sorted(refused)
        )
    return merged
