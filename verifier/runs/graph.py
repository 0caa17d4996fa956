"""The redistribution graph: which steps DTensor took between placements, how often, and how many bytes went in."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx  # type: ignore[import-untyped]

from verifier.core.placement_text import split_placements
from verifier.core.verdict import Phase
from verifier.records.files import AS_IT_WAS, write_atomically
from verifier.records.schema import FORMAT_VERSION, EdgeRecord, GraphRecord

if TYPE_CHECKING:
    from verifier.core.observation import Observation, Redistribution

__all__ = ["LOCAL", "RedistributionGraph"]

LOCAL = "none (local)"
"""What stands in for the collective of a step that needs none, such as cutting a replicated tensor."""

_PHASES = {str(phase): position for position, phase in enumerate(Phase)}

_Key = tuple[str, str, str, int, str]
"""source, target, mesh, mesh dim, collective: steps that agree in these are one edge."""


@dataclass
class _Totals:
    bytes: int = 0
    count: int = 0
    phases: Counter[str] = field(default_factory=Counter)


class RedistributionGraph:
    """Steps of redistributions, summed over everything that was added.

    A node is the placements of a tensor on all mesh dims, as text, so that meshes with a different number of mesh dims
    have different nodes; an edge is one kind of step. Everything that comes out is sorted, whatever the order in which
    it went in.

    >>> from verifier.core.observation import Redistribution
    >>> graph = RedistributionGraph()
    >>> graph.add_step("4", Redistribution(Phase.FORWARD, "S(0)", "R", 0, "all_gather", 96, ("S(0)", "R")))
    >>> graph.to_record().nodes
    ['R', 'S(0)']
    """

    def __init__(self) -> None:
        self._edges: dict[_Key, _Totals] = {}
        self._alone: set[str] = set()

    def add(self, observation: Observation) -> None:
        """Count the steps of ``observation`` as its first process that reported saw them.

        All ranks take the same steps: counting every report would count each step once per process.
        """
        report = next((report for report in observation.reports if report is not None), None)
        if report is not None:
            mesh = str(observation.trial.mesh)
            for step in report.redistributions:
                self.add_step(mesh, step)

    def add_step(self, mesh: str, step: Redistribution) -> None:
        """Count one step on ``mesh``, given as :class:`~verifier.core.case.MeshSpec` prints it."""
        totals = self._totals((step.source, step.target, mesh, step.mesh_dim, step.collective or LOCAL))
        totals.bytes += step.bytes
        totals.count += 1
        totals.phases[str(step.phase)] += 1

    def _totals(self, key: _Key) -> _Totals:
        return self._edges.setdefault(key, _Totals())

    # ----------------------------------------------------------------------------------------------------- records
    def to_record(self) -> GraphRecord:
        """Return the graph as it is stored: nodes by name, edges by source, target, mesh, mesh dim and collective."""
        edges = [
            EdgeRecord(*key, totals.bytes, totals.count, dict(sorted(totals.phases.items(), key=_by_phase)))
            for key, totals in sorted(self._edges.items())
        ]
        ends = {node for edge in edges for node in (edge.source, edge.target)}
        return GraphRecord(sorted(ends | self._alone), edges)

    @classmethod
    def from_record(cls, record: GraphRecord) -> RedistributionGraph:
        """Return the graph that :meth:`to_record` stored; edges that agree in all but their totals are summed."""
        graph = cls()
        graph._alone.update(record.nodes)
        for edge in record.edges:
            totals = graph._totals((edge.source, edge.target, edge.mesh, edge.mesh_dim, edge.collective))
            totals.bytes += edge.bytes
            totals.count += edge.count
            totals.phases.update(edge.phases)
        return graph

    # -------------------------------------------------------------------------------------------------- networkx
    def to_networkx(self) -> Any:
        """Return a ``networkx.MultiDiGraph``.

        Nodes carry ``mesh_ndim``. Edges carry ``collective``, ``mesh``, ``mesh_dim``, ``bytes`` (in total, of the
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
        """Write GraphML. It knows scalars only, so each phase becomes an attribute, such as ``phase_forward``.

        Raises as :func:`~verifier.records.files.write_atomically` does, and so does :meth:`write_json`.
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


def _by_phase(item: tuple[str, int]) -> tuple[int, str]:
    return (_PHASES.get(item[0], len(_PHASES)), item[0])
