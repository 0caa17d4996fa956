"""The redistribution graph: the steps that DTensor took between placements, with their counts and input bytes."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import networkx as nx  # type: ignore[import-untyped]

from verifier.core.placement_text import split_placements
from verifier.core.verdict import Phase
from verifier.records.files import AS_IT_WAS, write_atomically
from verifier.records.schema import FORMAT_VERSION, CallRecord, EdgeRecord, GraphRecord, IssuedRecord, PathRecord

if TYPE_CHECKING:
    from verifier.core.observation import Observation, Redistribution

__all__ = ["LOCAL", "RedistributionGraph"]

LOCAL = "none (local)"
"""The name for the collective of a step without one, such as sharding a replicated tensor."""

_PHASES = {str(phase): position for position, phase in enumerate(Phase)}

_Key = tuple[str, str, str, int, str]
"""source, target, mesh, mesh dim, collective: steps with equal keys are one edge."""


_Collective = tuple[str, tuple[int, ...], str, int, int]
"""name, ranks, dtype, bytes sent and received."""


class _PathKey(NamedTuple):
    """What redistributions have in common that are counted together."""

    op: str
    mesh: str
    tensor: str
    source: str
    target: str
    steps: tuple[tuple[str, str], ...]
    explicit: bool
    given: str
    by: str
    repeats: str
    undoes: str
    issued: tuple[_Collective, ...]
    call: str


@dataclass
class _Totals:
    bytes: int = 0
    count: int = 0
    phases: Counter[str] = field(default_factory=Counter)


@dataclass
class _Times:
    """Redistributions on one path by phase, and what was measured of them."""

    phases: Counter[str] = field(default_factory=Counter)
    measured: int = 0
    peak: int = 0
    seconds: float = 0.0
    fastest: float = 0.0

    def measure(self, count: int, peak: int, seconds: float, fastest: float) -> None:
        if count:
            self.fastest = min(self.fastest, fastest) if self.measured else fastest
            self.measured += count
            self.peak = max(self.peak, peak)
            self.seconds += seconds


class RedistributionGraph:
    """Steps of redistributions, summed over all added observations.

    A node is the text of a tensor's placements on all mesh dims, so meshes with different numbers of mesh dims have
    different nodes. An edge is one kind of step. All output is sorted, and does not depend on the order of additions.

    >>> from verifier.core.observation import Redistribution
    >>> graph = RedistributionGraph()
    >>> graph.add_step("4", Redistribution(Phase.FORWARD, "S(0)", "R", 0, "all_gather", 96, ("S(0)", "R")))
    >>> graph.to_record().nodes
    ['R', 'S(0)']
    """

    def __init__(self) -> None:
        self._edges: dict[_Key, _Totals] = {}
        self._paths: dict[_PathKey, _Times] = {}
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._alone: set[str] = set()

    def add(self, observation: Observation, passed: bool = True) -> None:
        """Count the steps in the first report of ``observation``, and the call if it ``passed``.

        All ranks take the same steps, so counting every report would count each step once per process.
        """
        report = next((report for report in observation.reports if report is not None), None)
        if report is None:
            return
        from verifier.core.arguments import combination_text  # loads torch, which reading a record does not need
        from verifier.core.call_text import kind_of_call

        mesh, op = observation.trial.mesh, observation.trial.case.op
        placed = combination_text(observation.trial)
        if passed and op.count(".") > 1:  # an overload of an op, and no program
            self._calls[op, f"{mesh.shape_text}{mesh.suffix}", placed] += 1
        for step in report.redistributions:
            self.add_step(step.mesh or str(mesh), step)
        for steps in _whole(report.redistributions):
            first, taken = steps[0], tuple((step.collective or "", step.target) for step in steps)
            if first.tensor:
                given = placed if first.by == op and first.phase is Phase.FORWARD else ""
                issued = tuple((one.name, one.ranks, one.dtype, one.sent, one.received) for one in first.issued)
                key = _PathKey(
                    op, first.mesh or str(mesh), first.tensor, *first.path, taken, first.explicit, given, first.by,
                    first.repeats, first.undoes, issued, kind_of_call(observation.trial.case) if given else "",
                )  # fmt: skip
                times = self._paths.setdefault(key, _Times())
                times.phases[str(first.phase)] += 1
                times.measure(int(first.peak > 0 or first.seconds > 0), first.peak, first.seconds, first.seconds)

    def add_step(self, mesh: str, step: Redistribution) -> None:
        """Count a step on ``mesh``, the text of a :class:`~verifier.core.case.MeshSpec`."""
        totals = self._totals((step.source, step.target, mesh, step.mesh_dim, step.collective or LOCAL))
        totals.bytes += step.bytes
        totals.count += 1
        totals.phases[str(step.phase)] += 1

    def _totals(self, key: _Key) -> _Totals:
        return self._edges.setdefault(key, _Totals())

    # ----------------------------------------------------------------------------------------------------- records
    def to_record(self) -> GraphRecord:
        """Return the stored graph: nodes sorted by name, edges by source, target, mesh, mesh dim and collective."""
        edges = [
            EdgeRecord(*key, totals.bytes, totals.count, _in_order(totals.phases))
            for key, totals in sorted(self._edges.items())
        ]
        nodes = {node for edge in edges for node in (edge.source, edge.target)}
        paths = [_path_record(key, times) for key, times in sorted(self._paths.items(), key=itemgetter(0))]
        calls = [CallRecord(*key, count) for key, count in sorted(self._calls.items())]
        return GraphRecord(sorted(nodes | self._alone), edges, paths, calls)

    @classmethod
    def from_record(cls, record: GraphRecord) -> RedistributionGraph:
        """Return the graph of a record of :meth:`to_record`; edges with equal keys are summed."""
        graph = cls()
        graph._alone.update(record.nodes)
        for edge in record.edges:
            totals = graph._totals((edge.source, edge.target, edge.mesh, edge.mesh_dim, edge.collective))
            totals.bytes += edge.bytes
            totals.count += edge.count
            totals.phases.update(edge.phases)
        for path in record.paths:
            steps = tuple((collective, target) for collective, target in path.steps)
            issued = tuple((one.name, tuple(one.ranks), one.dtype, one.sent, one.received) for one in path.issued)
            asked = (path.explicit, path.given, path.by, path.repeats, path.undoes, issued, path.call)
            times = graph._paths.setdefault(
                _PathKey(path.op, path.mesh, path.tensor, path.source, path.target, steps, *asked), _Times()
            )
            times.phases.update(path.phases)
            times.measure(path.measured, path.peak_bytes, path.seconds, path.fastest)
        for call in record.calls:
            graph._calls[call.op, call.mesh, call.given] += call.count
        return graph

    # -------------------------------------------------------------------------------------------------- networkx
    def to_networkx(self) -> Any:
        """Return a ``networkx.MultiDiGraph``.

        Nodes have ``mesh_ndim``. Edges have ``collective``, ``mesh``, ``mesh_dim``, ``bytes`` (total over steps of the
        largest local tensor that enters the step), ``count`` (of steps) and ``phases`` (a dict of counts by phase).
        """
        record = self.to_record()
        graph = nx.MultiDiGraph()
        for node in record.nodes:
            graph.add_node(node, mesh_ndim=len(split_placements(node)))
        for edge in record.edges:
            graph.add_edge(
                edge.source,
                edge.target,
                key=f"{edge.mesh}/{edge.mesh_dim}/{edge.collective}",
                collective=edge.collective,
                mesh=edge.mesh,
                mesh_dim=edge.mesh_dim,
                bytes=edge.bytes,
                count=edge.count,
                phases=dict(edge.phases),
            )
        return graph

    def write_graphml(self, path: Path | str, kept: str = AS_IT_WAS) -> None:
        """Write GraphML. GraphML has only scalars, so each phase is an attribute, such as ``phase_forward``.

        This method and :meth:`write_json` raise as :func:`~verifier.records.files.write_atomically` does.
        """
        graph = self.to_networkx()
        graph.graph["format_version"] = FORMAT_VERSION
        for _, _, attributes in graph.edges(data=True):
            for phase, count in attributes.pop("phases").items():
                attributes[f"phase_{phase.replace(' ', '_')}"] = count
        written = io.BytesIO()
        nx.write_graphml(graph, written, named_key_ids=True)
        write_atomically(Path(path), written.getvalue(), kept)

    def write_json(self, path: Path | str, kept: str = AS_IT_WAS) -> None:
        """Write networkx's node-link JSON, with a ``format_version`` beside its keys."""
        document = {"format_version": FORMAT_VERSION, **nx.node_link_data(self.to_networkx(), edges="edges")}
        write_atomically(Path(path), (json.dumps(document, indent=2) + "\n").encode(), kept)


def _path_record(key: _PathKey, times: _Times) -> PathRecord:
    return PathRecord(
        op=key.op, mesh=key.mesh, tensor=key.tensor, source=key.source, target=key.target, steps=[*key.steps],
        explicit=key.explicit, count=times.phases.total(), phases=_in_order(times.phases), given=key.given, by=key.by,
        repeats=key.repeats, undoes=key.undoes,
        issued=[IssuedRecord(name, [*ranks], dtype, *sizes) for name, ranks, dtype, *sizes in key.issued],
        measured=times.measured, peak_bytes=times.peak, seconds=round(times.seconds, 6),
        fastest=round(times.fastest, 6), call=key.call,
    )  # fmt: skip


def _whole(steps: Sequence[Redistribution]) -> Iterator[list[Redistribution]]:
    """Yield the steps of each redistribution."""
    begun = [number for number, step in enumerate(steps) if step.begins]
    yield from ([*steps[first:last]] for first, last in itertools.pairwise([*begun, len(steps)]))


def _in_order(phases: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(phases.items(), key=_by_phase))


def _by_phase(item: tuple[str, int]) -> tuple[int, str]:
    return (_PHASES.get(item[0], len(_PHASES)), item[0])
