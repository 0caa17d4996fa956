"""Edges between placements: which a run has exercised, and how trials are steered to those that it has not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from run_factory import make_run
from torch.distributed.tensor import Replicate, Shard

from strategies.redistribution.inputs import REDISTRIBUTE, SEQUENCE_OP
from strategies.redistribution.programs import CHAIN, SEQUENCE
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation, ProcessReport, Redistribution
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.placements.alphabet import Alphabet
from verifier.placements.edges import possible_edges, resolved_moves
from verifier.placements.parsing import parse_placements
from verifier.planning.steering import Steering
from verifier.programs import keep_mesh_dims
from verifier.runs.coverage import EdgeCoverage
from verifier.runs.merging import merge_records
from verifier.torch_internals.placements import Combination

R = Replicate()
MESH = MeshSpec((2,))
SQUARE = MeshSpec((2, 2))


def chain(*targets: str, ndim: int = 2) -> OpCase:
    return OpCase(REDISTRIBUTE, CHAIN, (torch.ones((3,) * ndim), [list(parse_placements(t)) for t in targets]))


def observed(case: OpCase, source: str, paths: Sequence[tuple[str, str]], mesh: MeshSpec = SQUARE) -> Observation:
    steps = tuple(Redistribution(Phase.FORWARD, *path, 0, "all_gather", 8, path) for path in paths)
    report = ProcessReport((0,), Phase.DONE, redistributions=steps)
    return Observation(Trial(case, mesh, (parse_placements(source),)), Fate.COMPLETED, (report,))


# -------------------------------------------------------------------------------------------------------- what is asked
def test_moves_of_a_chain_go_on_from_target_to_target() -> None:
    case = chain("(S(-1), R)", "(R, R)")
    source = (Shard(0), R)
    assert resolved_moves(case, (source,)) == ((source, (Shard(1), R)), ((Shard(1), R), (R, R)))
    assert resolved_moves(keep_mesh_dims(case, (0,)), ((R,),))[0] == ((R,), (Shard(1),))


def test_moves_of_a_sequence_begin_where_that_is_known() -> None:
    tensor = torch.ones(3, 3)
    steps: list[list[Any]] = [
        ["redistribute", 1, [Shard(0)]],
        ["add_", 2, 3.0],
        ["redistribute", 3, [Shard(1)]],  # what is written to stays where it is
        ["neg", 0],
        ["redistribute", 5, [R]],  # where DTensor has placed this is its own choice
    ]
    case = OpCase(SEQUENCE_OP, SEQUENCE, (tensor, tensor.clone(), steps))
    assert resolved_moves(case, ((R,), (Shard(1),))) == (((Shard(1),), (Shard(0),)), ((Shard(0),), (Shard(1),)))


# --------------------------------------------------------------------------------------------------------- what was run
def test_an_edge_counts_where_dtensor_took_it() -> None:
    coverage = EdgeCoverage()
    case = chain("(R, R)")
    coverage.add(observed(case, "(S(0), _S(1, 2))", [("(S(0), _S(1, 2))", "(R, R)")]), Verdict(VerdictKind.PASS))
    coverage.add(observed(case, "(P(max), R)", []), Verdict(VerdictKind.UNSUPPORTED, phase=Phase.FORWARD))
    coverage.add(observed(case, "(P(min), R)", []), Verdict(VerdictKind.TOOL_ERROR))
    coverage.add(observed(OpCase("op", "torch.clone", case.args[:1]), "(S(0), R)", [("(S(1), R)", "(R, R)")]),
                 Verdict(VerdictKind.PASS))  # fmt: skip
    record = coverage.records()["2"]
    assert set(coverage.records()) == {"2"}
    assert record.exercised == ["S(0) -> R", "_S(1) -> R"]
    assert record.refused == ["P(max) -> R"]
    assert record.possible == len(possible_edges())


def test_what_one_part_refused_another_may_have_exercised() -> None:
    parts = [EdgeCoverage(), EdgeCoverage()]
    case = chain("R")
    for part in parts:
        part.add(observed(case, "P(max)", [], MESH), Verdict(VerdictKind.UNSUPPORTED, phase=Phase.FORWARD))
    parts[1].add(observed(case, "P(max)", [("P(max)", "R")], MESH), Verdict(VerdictKind.PASS))
    merged = merge_records([replace(make_run(), edge_coverage=part.records()) for part in parts]).edge_coverage
    assert merged["1"].exercised == ["P(max) -> R"]
    assert merged["1"].refused == []


# ------------------------------------------------------------------------------------------------------------- steering
def sources(combinations: Sequence[Combination]) -> list[Any]:
    return [combination[0] for combination in combinations]


@pytest.mark.parametrize("mesh", [MESH, SQUARE], ids=str)
def test_every_source_has_its_turn_before_any_comes_again(mesh: MeshSpec) -> None:
    steering, alphabet = Steering(3), Alphabet(partial=("sum",))
    target = "S(0)" if mesh is MESH else "(S(0), R)"
    count = 4**mesh.ndim
    drawn: list[Any] = []
    for _ in range(-(-count // 3)):
        drawn += sources(steering.wanted(chain(target), mesh, alphabet))
    assert len(set(drawn[:count])) == count


def test_rare_edges_of_one_mesh_dim_come_first() -> None:
    """Two mesh dims that change, and in two ways, before any combination on which nothing changes."""
    (first, *_, last) = sources(Steering(100).wanted(chain("(R, S(0))"), SQUARE, Alphabet(partial=())))
    assert first[0] != R
    assert first[1] != Shard(0)
    assert last == (R, Shard(0))


def test_tensors_that_are_not_redistributed_have_their_turns_as_well() -> None:
    tensor = torch.ones(3, 3)
    case = OpCase(SEQUENCE_OP, SEQUENCE, (tensor, tensor.clone(), [["redistribute", 0, [R]], ["add", 2, 1]]))
    wanted = Steering(3).wanted(case, MESH, Alphabet(partial=()))
    assert {second for _, second in wanted} == {(R,), (Shard(0),), (Shard(1),)}


def test_what_is_planned_depends_on_the_cases_alone() -> None:
    cases = [chain("(R, S(0))"), chain("(S(1), R)", "(R, R)"), chain("(R, S(0))")]
    one, other = Steering(5), Steering(5)
    assert [one.wanted(case, SQUARE) for case in cases] == [other.wanted(case, SQUARE) for case in cases]
    assert one.wanted(cases[0], SQUARE) != Steering(5).wanted(cases[0], SQUARE)  # and on those before
