"""Pictures and values: what a rank is drawn to hold is what the placement algebra says it holds."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest
from run_factory import make_finding

from verifier.core.case import MeshSpec
from verifier.placements.algebra import local_shape
from verifier.placements.parsing import parse_placements
from verifier.records.schema import TensorRecord
from verifier.report.svg import drawn_text, local_part, sharding_svg
from verifier.report.values import call_text, named_tensors, values_text

ONE_DIM = ["R", "S(0)", "S(1)", "P(sum)", "P(max)"]


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (3, 2), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(5, 2), (17, 4), (1, 1), (0, 3)])
def test_local_parts_have_the_shapes_of_the_placement_algebra(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> None:
    mesh = MeshSpec(mesh_shape)
    for combination in itertools.product(ONE_DIM, repeat=mesh.ndim):
        text = combination[0] if mesh.ndim == 1 else f"({', '.join(combination)})"
        for rank in range(mesh.world_size):
            part = local_part(shape, text, mesh, rank)
            assert part is not None
            assert part.shape == local_shape(shape, parse_placements(text), mesh.shape, mesh.coordinate(rank))
            assert part.pending == ("P(" in text)


@pytest.mark.parametrize("text", ["_S(0, 2)", "S(2)", "(S(0), R)", "?", ""])
def test_what_cannot_be_drawn_is_not_guessed(text: str) -> None:
    assert local_part([5, 2], text, MeshSpec((4,)), 0) is None
    assert sharding_svg("weight", [5, 2], text, MeshSpec((4,))) is None


def test_masked_partials_are_contributions() -> None:
    part = local_part([5], "MaskP(sum, None, 0)", MeshSpec((4,)), 1)
    assert part is not None
    assert part.pending
    assert part.shape == (5,)


@pytest.mark.parametrize("shape", [[], [0], [7], [5, 2], [2, 3, 4], [1000, 3]])
def test_pictures_are_well_formed_and_have_a_drawing_a_rank(shape: list[int]) -> None:
    for mesh, placements in (("8", "R"), ("2x2", "(R, P(sum))"), ("64", "R")):
        svg = ET.fromstring(str(sharding_svg('<weight "&">', shape, placements, MeshSpec.parse(mesh))))
        assert len(svg.findall("g")) == min(MeshSpec.parse(mesh).world_size, 32)
        assert '<weight "&">' in svg.attrib["aria-label"]


def test_the_drawn_dims_are_those_that_are_cut() -> None:
    mesh = MeshSpec((2, 2))
    assert "tensor dim 0 goes down, 2 across" in drawn_text([2, 3, 4], "(S(2), R)", mesh)
    assert "tensor dim 1 goes down, 2 across" in drawn_text([2, 3, 4], "(S(2), S(1))", mesh)
    assert drawn_text([2, 3], "(S(0), R)", mesh) == ""


@pytest.mark.parametrize(
    ("shape", "values", "text"),
    [
        ([], [3.0], "3"),
        ([0, 2], [], "(no elements)"),
        ([3], [1.5, "nan", "-inf"], "[1.5, nan, -inf]"),
        ([2], [[1.0, -2.0], [0.0, 3.0]], "[1-2j, 0+3j]"),
        ([2], [True, False], "[True, False]"),
        ([2, 2], [1.0, 20.0, -3.0, 4.0], "[[ 1, 20],\n [-3,  4]]"),
        ([2, 1, 2], [1, 2, 3, 4], "[[[1, 2]],\n [[3, 4]]]"),
        ([1], [-0.0], "[-0.0]"),
    ],
)
def test_values_are_laid_out_as_the_tensor_is(shape: list[int], values: list[object], text: str) -> None:
    assert values_text(TensorRecord("float64", shape, values)) == text


def test_many_values_are_cut_off_and_counted() -> None:
    text = values_text(TensorRecord("int64", [1000], list(range(1000))))
    assert text.endswith("239,\n… 760 more values in run.json")


def test_tensors_get_their_names_and_placements() -> None:
    tensors = named_tensors(make_finding())
    assert [(t.name, t.type_text, t.placements) for t in tensors] == [
        ("indices", "i64[3]", "R"),
        ("weight", "f64[5, 2]", "S(0)"),
    ]
    unnamed = named_tensors(make_finding(input_placements={}))
    assert [t.name for t in unnamed] == ["tensor 0", "tensor 1"]


def test_the_call_is_written_with_its_tensors_and_scalars() -> None:
    finding = make_finding()
    tensor = TensorRecord("bfloat16", [1], [2.0])
    finding.trial.case.args = [[{"tensor": tensor}], {"dtype": "float32"}]
    finding.trial.case.kwargs = {"weight": {"tensor": tensor}, "mode": "sum"}
    assert call_text(finding) == (
        "torch.nn.functional.embedding([indices: bf16[1] R], 'float32', weight: bf16[1] S(0), mode='sum')"
    )
