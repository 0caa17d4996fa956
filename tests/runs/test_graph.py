"""The redistribution graph: totals, determinism, and files that other tools can read."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
import torch
from run_factory import make_graph, make_run
from torch.distributed.tensor import Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Issued, Observation, ProcessReport, Redistribution
from verifier.core.placement_text import split_placements
from verifier.core.verdict import Phase
from verifier.records.checks import check_record
from verifier.records.schema import CallRecord, IssuedRecord
from verifier.runs.graph import LOCAL, RedistributionGraph

GATHER = Redistribution(Phase.FORWARD, "S(0)", "R", 0, "all_gather", 96, ("S(0)", "R"))
GATHER_LATE = Redistribution(Phase.BACKWARD, "S(0)", "R", 0, "all_gather", 4, ("S(0)", "R"))
CUT = Redistribution(Phase.FORWARD, "R", "S(1)", 0, None, 8, ("R", "S(1)"))
FIRST_OF_TWO = Redistribution(
    Phase.FORWARD, "(S(0), S(0))", "(S(0), R)", 1, "all_gather", 16, ("(S(0), S(0))", "(R, R)")
)


def observe(mesh: str, *reports: tuple[Redistribution, ...] | None) -> Observation:
    trial = Trial(OpCase("aten.embedding.default", "torch.nn.functional.embedding"), MeshSpec.parse(mesh), ())
    processes = tuple(
        None if steps is None else ProcessReport((rank,), Phase.DONE, redistributions=steps)
        for rank, steps in enumerate(reports)
    )
    return Observation(trial, Fate.COMPLETED, processes)


def collect(*observations: Observation) -> RedistributionGraph:
    graph = RedistributionGraph()
    for observation in observations:
        graph.add(observation)
    return graph


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("R", ("R",)),
        ("P(sum)", ("P(sum)",)),
        ("MaskP(sum, None, 0)", ("MaskP(sum, None, 0)",)),
        ("(S(0), R)", ("S(0)", "R")),
        ("(_S(0, 2), MaskP(sum, None, 0), R)", ("_S(0, 2)", "MaskP(sum, None, 0)", "R")),
    ],
)
def test_placements_are_split_at_mesh_dims_only(text: str, parts: tuple[str, ...]) -> None:
    assert split_placements(text) == parts


def test_a_step_is_counted_once_however_many_ranks_report_it() -> None:
    (edge,) = collect(observe("4", (GATHER,), (GATHER,), (GATHER,), (GATHER,))).to_record().edges
    assert (edge.count, edge.bytes) == (1, 96)


def test_the_first_process_that_reported_speaks_for_a_trial() -> None:
    assert collect(observe("2", None, (GATHER, CUT))).to_record().nodes == ["R", "S(0)", "S(1)"]
    assert collect(observe("2", None, None)).to_record().edges == []


def test_totals_are_summed_by_step_and_phase() -> None:
    record = collect(observe("4", (GATHER, CUT)), observe("4", (GATHER, GATHER_LATE))).to_record()
    local, gather = record.edges
    assert (local.collective, local.count, local.bytes) == (LOCAL, 1, 8)
    assert (gather.count, gather.bytes) == (3, 196)
    assert list(gather.phases.items()) == [("forward", 2), ("backward", 1)]


def test_meshes_have_edges_of_their_own() -> None:
    record = collect(observe("4", (GATHER,)), observe("8", (GATHER,)), observe("2x2", (FIRST_OF_TWO,))).to_record()
    assert [(edge.source, edge.mesh) for edge in record.edges] == [
        ("(S(0), S(0))", "2x2"),
        ("S(0)", "4"),
        ("S(0)", "8"),
    ]
    assert collect(observe("2x2", (FIRST_OF_TWO,))).to_networkx().nodes["(S(0), R)"] == {"mesh_ndim": 2}


def test_the_order_of_trials_does_not_matter() -> None:
    observations = [observe("4", (GATHER, CUT)), observe("8", (GATHER_LATE,)), observe("2x2", (FIRST_OF_TWO,))]
    records = [collect(*order).to_record() for order in itertools.permutations(observations)]
    assert all(record == records[0] for record in records)


def test_a_record_survives_the_round_trip() -> None:
    record = RedistributionGraph.from_record(make_graph()).to_record()
    assert RedistributionGraph.from_record(record).to_record() == record
    assert sum(edge.bytes for edge in record.edges) == sum(edge.bytes for edge in make_graph().edges)
    assert record.nodes == sorted(make_graph().nodes)


def test_networkx_has_every_edge_with_its_totals() -> None:
    record = make_graph()
    graph = RedistributionGraph.from_record(record).to_networkx()
    assert isinstance(graph, nx.MultiDiGraph)
    assert graph.number_of_edges() == len(record.edges)
    assert sum(count for *_, count in graph.edges(data="count")) == sum(edge.count for edge in record.edges)


def test_graphml_is_read_back_with_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "graph.graphml"
    collect(observe("4", (GATHER, CUT, GATHER_LATE))).write_graphml(path)
    graph = nx.read_graphml(path, force_multigraph=True)
    (attributes,) = graph.get_edge_data("S(0)", "R").values()
    assert attributes == {
        "collective": "all_gather",
        "mesh": "4",
        "mesh_dim": 0,
        "bytes": 100,
        "count": 2,
        "phase_forward": 1,
        "phase_backward": 1,
    }


def test_json_is_versioned_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    graph = collect(observe("4", (GATHER, CUT)))
    graph.write_json(path)
    document = json.loads(path.read_text())
    assert document.pop("format_version") == 8
    again = nx.node_link_graph(document, edges="edges")
    assert nx.utils.graphs_equal(again, graph.to_networkx())


def test_whole_redistributions_are_counted() -> None:
    """Two steps of one redistribution are one path; the same path again is counted."""
    first = Redistribution(
        Phase.FORWARD, "(S(0), S(1))", "(S(0), R)", 1, "all_gather", 8, ("(S(0), S(1))", "(R, R)"), "float32[4, 4]"
    )
    second = replace(first, source="(S(0), R)", target="(R, R)", mesh_dim=0, begins=False)
    late = replace(first, phase=Phase.BACKWARD), replace(second, phase=Phase.BACKWARD)
    unknown = replace(first, tensor="")
    record = collect(observe("2x2", (first, second)), observe("2x2", (*late, unknown))).to_record()
    (path,) = record.paths
    assert (path.mesh, path.tensor, path.source, path.target) == ("2x2", "float32[4, 4]", "(S(0), S(1))", "(R, R)")
    assert path.steps == [("all_gather", "(S(0), R)"), ("all_gather", "(R, R)")]
    assert (path.count, path.phases, path.explicit) == (2, {"forward": 1, "backward": 1}, False)
    assert RedistributionGraph.from_record(record).to_record() == record


def test_what_was_issued_is_counted_beside_the_steps() -> None:
    """Equal redistributions are measured together; those in which the verifier gathers are counted, not measured."""
    issued = (Issued("all_gather_into_tensor", (0, 1, 2, 3), "float32", 8, 32),)
    measured = replace(GATHER, tensor="float32[8]", issued=issued, peak=40, seconds=0.25)
    faster = replace(measured, phase=Phase.BACKWARD, peak=44, seconds=0.125)
    own = replace(GATHER, phase=Phase.GATHER, tensor="float32[8]")
    record = collect(observe("4", (measured, own)), observe("4", (faster,))).to_record()
    verifiers, calls = record.paths
    assert (verifiers.phases, verifiers.issued, verifiers.measured, verifiers.seconds) == ({"gather": 1}, [], 0, 0.0)
    assert calls.issued == [IssuedRecord("all_gather_into_tensor", [0, 1, 2, 3], "float32", 8, 32)]
    assert (calls.count, calls.measured, calls.peak_bytes) == (2, 2, 44)
    assert (calls.seconds, calls.fastest) == (0.375, 0.125)
    check_record(make_run(graph=record))
    assert RedistributionGraph.from_record(record).to_record() == record
    other = replace(measured, issued=(replace(issued[0], ranks=(0, 2)),))
    assert len(collect(observe("4", (measured, other))).to_record().paths) == 2, "another group is another path"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("measured", 9, "was measured 9 times of 1"),
        ("measured", 0, "was measured 0 times of 1"),
        ("issued", [IssuedRecord("a\x1b[1m", [0], "float32", 1, 1)], "is none"),
        ("issued", [IssuedRecord("all_reduce", [0], "<b>", 1, 1)], "is none"),
        ("seconds", float("nan"), "is no number"),
        ("peak_bytes", -1, "is no number"),
    ],
)
def test_a_record_with_impossible_measurements_is_refused(field: str, value: object, message: str) -> None:
    step = replace(GATHER, tensor="float32[8]", issued=(Issued("all_reduce", (0,), "float32", 8, 8),), peak=8)
    graph = collect(observe("4", (step,))).to_record()
    check_record(make_run(graph=graph))
    wrong = replace(graph, paths=[replace(graph.paths[0], **{field: value})])
    with pytest.raises(ValueError, match=message):
        check_record(make_run(graph=wrong))


def test_steps_on_a_submesh_belong_to_a_mesh_of_its_shape(tmp_path: Path) -> None:
    """A program may make submeshes, whose placements do not fit the trial's mesh: the record must be readable."""
    step = replace(GATHER, tensor="float32[4]", mesh="2")
    record = make_run(graph=collect(observe("2x2", (replace(step, mesh=""),))).to_record())
    with pytest.raises(ValueError, match="does not fit mesh 2x2"):
        check_record(record)
    record = replace(record, graph=collect(observe("2x2", (step,))).to_record())
    check_record(record)
    assert ([path.mesh for path in record.graph.paths], [edge.mesh for edge in record.graph.edges]) == (["2"], ["2"])


def test_calls_that_passed_are_counted_with_the_placements_of_what_the_op_itself_asked_for() -> None:
    case = OpCase("aten.relu.default", "torch.relu", (torch.ones(3, 8),))
    trial = Trial(case, MeshSpec((4,)), ((Shard(0),),))
    asked = Redistribution(
        Phase.FORWARD, "S(0)", "R", 0, "all_gather", 8, ("S(0)", "R"), "float32[3, 8]", by="aten.relu.default"
    )
    late, others = replace(asked, phase=Phase.BACKWARD), replace(asked, by="aten.add.Tensor")
    graph = RedistributionGraph()
    for passed in (True, False):
        report = ProcessReport((0,), Phase.DONE, redistributions=(asked, late, others))
        graph.add(Observation(trial, Fate.COMPLETED, (report,)), passed)
    record = graph.to_record()
    assert record.calls == [CallRecord("aten.relu.default", "4", "S(0) small", 1)]
    assert {(path.by, path.given): path.phases for path in record.paths} == {
        ("aten.relu.default", "S(0) small"): {"forward": 2},
        ("aten.relu.default", ""): {"backward": 2},
        ("aten.add.Tensor", ""): {"forward": 2},
    }
    assert {path.given: path.call for path in record.paths} == {"S(0) small": "argument 0=f[n, n]", "": ""}
    assert RedistributionGraph.from_record(record).to_record() == record
    program = replace(trial, case=replace(case, op="chain.sum"))
    other = RedistributionGraph()
    other.add(Observation(program, Fate.COMPLETED, (ProcessReport((0,), Phase.DONE),)))
    assert not other.to_record().calls, "it is no call of one op"
