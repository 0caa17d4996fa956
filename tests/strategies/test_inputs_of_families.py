"""The generators: what they draw is legal, adversarial and covers its classes, and it shrinks to something readable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from operator import eq
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy
from torch.distributed.tensor import Replicate, Shard

from strategies.embedding import FAMILY
from strategies.embedding.inputs import BACKWARD, EMBEDDING, INPUT_CLASSES, LOOKUP, embedding_cases
from strategies.indices import edge_rows, index_shapes, index_tensors, padding_indices
from strategies.meshes import mesh_shapes
from strategies.tensors import Layout, chunk_sizes, dim_sizes, filled, layouts, shard_classes
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.ops import argument_names, resolve
from verifier.core.verdict import Phase as Step
from verifier.core.verdict import Verdict, VerdictKind
from verifier.placements.partials import split_partial
from verifier.planning.families import DrawContext, Family
from verifier.torch_internals.placements import Placements

T = TypeVar("T")
QUICK = settings(
    max_examples=150, database=None, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
FIND = settings(
    max_examples=2000, database=None, derandomize=True, deadline=None, phases=(Phase.generate, Phase.shrink)
)


def minimal(generator: SearchStrategy[T], condition: Callable[[T], bool] = lambda _: True) -> T:
    return find(generator, condition, settings=FIND)


def context(shape: tuple[int, ...], ops: tuple[str, ...] = FAMILY.ops, device: str = "cpu") -> DrawContext:
    return DrawContext(MeshSpec(shape, device=device), FAMILY.dtypes, ops)


def some_contexts() -> SearchStrategy[DrawContext]:
    return mesh_shapes().map(context)


def ids_of(case: OpCase) -> list[torch.Tensor]:
    values = [value for value in (*case.args, *case.kwargs.values()) if isinstance(value, torch.Tensor)]
    return [value for value in values if not value.dtype.is_floating_point]


def weight_of(case: OpCase) -> torch.Tensor:
    weight = case.kwargs["weight"] if case.call == LOOKUP else case.args[0]
    assert isinstance(weight, torch.Tensor)
    return weight


def run(case: OpCase) -> list[torch.Tensor]:
    """Return the outputs of the local call, on a copy of the weight that ``max_norm`` may write to."""
    kwargs = dict(case.kwargs)
    if "max_norm" in kwargs:
        kwargs["weight"] = weight_of(case).detach().clone().requires_grad_()
    result: Any = resolve(case.call)(*case.args, **kwargs)
    return list(result) if isinstance(result, tuple) else [result]


# -------------------------------------------------------------------------------------------------------------- sizes
@given(st.integers(1, 40), st.integers(1, 9))
@QUICK
def test_chunk_sizes_are_those_of_torch_chunk(size: int, parts: int) -> None:
    chunks = [len(chunk) for chunk in torch.empty(size).chunk(parts)]
    assert list(chunk_sizes(size, parts)) == chunks + [0] * (parts - len(chunks))


def test_shard_classes_look_at_every_choice_of_mesh_dims() -> None:
    assert shard_classes(17, (8,)) == {"empty shard"}
    assert shard_classes(5, (4,)) == {"empty shard"}  # 2, 2, 1, 0
    assert shard_classes(5, (2, 2)) == {"uneven shard"}  # 3, 2 and 2, 1, 1, 1
    assert shard_classes(2, (2, 2)) == {"even shard", "empty shard"}  # 1, 1 and 1, 0, 1, 0
    assert shard_classes(0, (2,)) == shard_classes(3, (1, 1)) == set()


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", ["even shard", "uneven shard", "empty shard"])
def test_dim_sizes_contain_every_kind_of_cut(world_size: int, kind: str) -> None:
    size = minimal(dim_sizes(world_size), lambda size: kind in shard_classes(size, (world_size,)))
    assert size <= 2 * world_size


def test_dim_sizes_shrink_to_one_and_keep_their_limits() -> None:
    assert minimal(dim_sizes(4)) == 1
    assert minimal(dim_sizes(4), lambda size: size == 0) == 0
    assert minimal(dim_sizes(4), lambda size: size > 1) == 3
    with pytest.raises(NoSuchExample):
        minimal(dim_sizes(4, smallest=1, largest=6), lambda size: not 1 <= size <= 6)
    with pytest.raises(ValueError, match="world_size=0"):
        dim_sizes(0)


# ------------------------------------------------------------------------------------------------------------- values
@given(st.lists(st.integers(0, 7), max_size=3), st.sampled_from(FAMILY.dtypes), st.integers(0, 2**16 - 1))
@QUICK
def test_filled_values_expose_mix_ups(shape: list[int], dtype: torch.dtype, seed: int) -> None:
    tensor = filled(shape, dtype, seed)
    values = tensor.flatten().tolist()
    assert tensor.dtype == dtype
    assert list(tensor.shape) == shape
    assert all(value == int(value) and 1 <= abs(value) <= 8 for value in values)
    assert len(set(values)) >= min(len(values), 14)
    if len(values) > 1:
        assert min(values) < 0 < max(values)
        assert sum(values) != 0 or len(values) % 15
    assert torch.equal(tensor, filled(shape, dtype, seed))


def test_filled_values_depend_on_the_seed_and_are_not_symmetric() -> None:
    tables = [filled((3, 3), torch.float64, seed) for seed in range(20)]
    assert len({str(table.tolist()) for table in tables}) == 20
    assert not any(torch.equal(table, table.T) for table in tables)


def test_filled_layouts() -> None:
    plain = filled((3, 4), torch.float32, 5)
    strided = filled((3, 4), torch.float32, 5, Layout(contiguous=False, requires_grad=True, parameter=True))
    assert plain.is_contiguous()
    assert strided.stride() == (1, 3)
    assert torch.equal(plain, strided)
    assert isinstance(strided, torch.nn.Parameter)
    assert strided.is_leaf
    assert strided.requires_grad
    assert not filled((2,), torch.float32, 0, Layout(parameter=True)).requires_grad
    with pytest.raises(ValueError, match=r"torch\.bool has no negative values"):
        filled((2,), torch.bool, 0)


def test_layouts_shrink_to_an_ordinary_tensor() -> None:
    assert minimal(layouts(trainable=True)) == Layout(requires_grad=True)
    assert minimal(layouts()) == Layout()
    for layout in (Layout(), Layout(contiguous=False, requires_grad=True, parameter=True), Layout(parameter=True)):
        assert minimal(layouts(trainable=True), partial(eq, layout)) == layout


# ------------------------------------------------------------------------------------------------------------- meshes
@given(st.integers(1, 8), st.integers(1, 3), st.data())
@QUICK
def test_mesh_shapes_keep_their_limits(max_ranks: int, max_dims: int, data: st.DataObject) -> None:
    shape = data.draw(mesh_shapes(max_ranks, max_dims))
    assert 1 <= len(shape) <= max_dims
    assert 1 <= prod(shape) <= max_ranks


def test_mesh_shapes_shrink_to_few_ranks() -> None:
    assert minimal(mesh_shapes()) == (1,)
    assert minimal(mesh_shapes(), lambda shape: prod(shape) > 1) == (2,)
    assert minimal(mesh_shapes(), lambda shape: len(shape) == 3) == (1, 2, 2)
    assert minimal(mesh_shapes(), lambda shape: min(shape) > 1 and len(shape) == 3) == (2, 2, 2)
    with pytest.raises(ValueError, match="max_ranks=0"):
        mesh_shapes(0)
    with pytest.raises(ValueError, match="max_dims=4"):
        mesh_shapes(8, 4)


# ------------------------------------------------------------------------------------------------------------ indices
@given(st.integers(0, 20), st.integers(1, 8), st.booleans(), st.data())
@QUICK
def test_index_tensors_are_in_range_exactly_if_asked(
    rows: int, ranks: int, out_of_range: bool, data: st.DataObject
) -> None:
    ids = data.draw(index_tensors(rows, world_size=ranks, out_of_range=out_of_range))
    assert ids.dtype in (torch.int32, torch.int64)
    assert ids.ndim <= 4
    assert ids.numel() <= 32
    assert bool(((ids < 0) | (ids >= rows)).any()) == out_of_range
    if rows == 0 and not out_of_range:
        assert ids.numel() == 0


@given(st.integers(1, 20), st.integers(1, 8))
@QUICK
def test_edge_rows_are_both_ends_of_every_chunk(rows: int, ranks: int) -> None:
    chunks = torch.arange(rows).chunk(ranks)
    assert edge_rows(rows, ranks) == tuple(sorted({int(chunk[end]) for chunk in chunks for end in (0, -1)}))


@pytest.mark.parametrize("shape", [(6,), (3, 4)])  # drawn one by one, and filled from a seed
@pytest.mark.parametrize(
    "condition",
    [
        lambda ids: len(set(ids)) == 1,
        lambda ids: 1 < len(set(ids)) < len(ids),
        lambda ids: ids == sorted(ids) and len(set(ids)) > 2,
        lambda ids: set(ids) <= {0, 4, 5, 9, 10, 14, 15, 16} and len(set(ids)) > 2,
        lambda ids: ids.count(11) > 1,
    ],
    ids=["all-same", "duplicates", "ascending", "edge rows", "favoured"],
)
def test_index_modes_occur(shape: tuple[int, ...], condition: Callable[[list[int]], bool]) -> None:
    generator = index_tensors(17, shape, 4, favoured=[11])
    assert minimal(generator, lambda ids: condition(ids.flatten().tolist())).shape == shape


@pytest.mark.parametrize("ndim", range(5))
def test_index_shapes_have_every_rank(ndim: int) -> None:
    assert len(minimal(index_shapes(4), lambda shape: len(shape) == ndim)) == ndim


def test_index_tensors_shrink_each_element() -> None:
    assert minimal(index_tensors(17, world_size=4)).tolist() == [0]
    assert minimal(index_tensors(17, world_size=4), lambda ids: 5 in ids).tolist() == [5]
    three = minimal(index_tensors(17, (3,), 4), lambda ids: int(ids.sum()) >= 2)
    assert sorted(three.tolist()) == [0, 0, 2]
    assert minimal(index_tensors(17, world_size=4, out_of_range=True)).tolist() == [17]
    assert minimal(index_tensors(17, world_size=4), lambda ids: ids.numel() == 0).shape == (0,)


def test_index_tensors_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"num_embeddings=0 has no row; use shape=\(0,\)"):
        minimal(index_tensors(0, (2,)))
    with pytest.raises(ValueError, match="no element that could be out of range"):
        minimal(index_tensors(3, (0,), out_of_range=True))
    with pytest.raises(ValueError, match="no index shape has 40 to 32 elements"):
        index_shapes(2, min_elements=40)


@given(st.integers(1, 20), st.integers(1, 8), st.data())
@QUICK
def test_padding_indices_are_accepted_locally(rows: int, ranks: int, data: st.DataObject) -> None:
    padding_idx = data.draw(padding_indices(rows, ranks))
    torch.nn.functional.embedding(torch.tensor([0]), torch.ones(rows, 1), padding_idx=padding_idx)
    assert padding_idx is None or padding_idx % rows in edge_rows(rows, ranks)


def test_padding_indices_contain_both_spellings_and_shrink_to_none() -> None:
    assert minimal(padding_indices(5, 2)) is None
    assert minimal(padding_indices(0, 2)) is None
    for wanted in (0, 2, 3, 4, -5, -3, -2, -1):
        assert minimal(padding_indices(5, 2), partial(eq, wanted)) == wanted


# -------------------------------------------------------------------------------------------------------------- cases
def test_family_satisfies_the_interface() -> None:
    assert isinstance(FAMILY, Family)
    assert FAMILY.dtypes[0] == torch.float64
    with pytest.raises(ValueError, match="must each have an entry"):
        embedding_cases(DrawContext(MeshSpec((2,)), FAMILY.dtypes, ()))


@given(some_contexts().flatmap(FAMILY.cases))
@QUICK
def test_cases_raise_locally_exactly_if_an_id_is_out_of_range(case: OpCase) -> None:
    assert case.family == FAMILY.name
    assert case.op in FAMILY.ops
    assert case.tags <= INPUT_CLASSES
    names = argument_names(case)
    assert names[0] == ("grad_output" if case.op == BACKWARD else "weight")
    assert "padding_idx" not in case.kwargs or case.kwargs["padding_idx"] is not None
    if "out-of-range ids" in case.tags:
        with pytest.raises((IndexError, RuntimeError)):
            run(case)
        return
    for output in run(case):
        assert bool(output.isfinite().all())


@given(some_contexts().flatmap(FAMILY.cases), st.integers(0, 99))
@QUICK
def test_exact_cases_are_exact_also_in_parts(case: OpCase, seed: int) -> None:
    """Every rank's gradient from its part of a P(sum) cotangent is what float64 gives, in any dtype and order."""
    if not case.exact or case.tags & {"out-of-range ids", "no grad", "sparse"}:
        return
    generator = torch.Generator().manual_seed(seed)

    def in_float64(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    wide = replace(
        case,
        args=tuple(map(in_float64, case.args)),
        kwargs={name: in_float64(value) for name, value in case.kwargs.items()},
    )
    outputs, references = run(case), run(wide)
    for output, reference in zip(outputs, references, strict=True):
        assert torch.equal(output.double(), reference)
    if case.op == BACKWARD:
        return
    for _ in range(3):
        cotangents = [torch.randint(1, 4, o.shape, generator=generator).to(o.dtype) for o in outputs]
        for part in zip(*(split_partial(c, "sum", 8, generator) for c in cotangents), strict=True):
            got = torch.autograd.grad(outputs, weight_of(case), part, retain_graph=True)[0]
            expected = torch.autograd.grad(references, weight_of(wide), [p.double() for p in part], retain_graph=True)[
                0
            ]
            assert torch.equal(got.double(), expected)


@given(st.sampled_from(((2,), (4,), (2, 2))).flatmap(lambda shape: embedding_cases(context(shape, (BACKWARD,)))))
@QUICK
def test_local_backward_divides_by_the_counts(case: OpCase) -> None:
    """The CPU kernel is a fit reference for scale_grad_by_freq; the one of embedding_bag in torch 2.13 is not."""
    gradient, indices, rows, padding_idx, scale = case.args
    assert isinstance(gradient, torch.Tensor)
    assert isinstance(indices, torch.Tensor)
    ids, terms = indices.flatten().tolist(), gradient.double().reshape(indices.numel(), gradient.shape[-1])
    expected = torch.zeros(rows, gradient.shape[-1], dtype=torch.float64)  # type: ignore[call-overload]
    for index, term in zip(ids, terms, strict=True):
        if index != padding_idx:
            expected[index] += term / (ids.count(index) if scale else 1)
    got = run(case)[0].double()
    if case.exact:
        assert torch.equal(got, expected)
    else:
        rounding = 2 * len(ids) * torch.finfo(gradient.dtype).eps * 8
        assert bool(((got - expected).abs() <= rounding).all())


@pytest.mark.parametrize("shape", [(2,), (2, 2), (8,)])
def test_four_hundred_draws_contain_every_class(shape: tuple[int, ...]) -> None:
    counts: Counter[str] = Counter()
    drawn: list[OpCase] = []

    @settings(QUICK, max_examples=400, phases=(Phase.generate,))
    @given(FAMILY.cases(context(shape)))
    def draw(case: OpCase) -> None:
        drawn.append(case)
        counts.update(case.tags)

    draw()
    assert len(drawn) == 400
    assert INPUT_CLASSES - set(counts) == set()
    assert counts["out-of-range ids"] + counts["max_norm"] + counts["sparse"] <= 0.25 * len(drawn)
    programs = sum(case.call.startswith("strategies.") for case in drawn)
    assert 0.05 * len(drawn) <= programs <= 0.25 * len(drawn)
    assert {case.op for case in drawn} == set(FAMILY.ops)
    # Shapes must come back: DTensor is slow on each new one.
    assert len({weight_of(case).shape for case in drawn if case.op == EMBEDDING}) <= 100


@given(embedding_cases(context((2,), device="cuda")))
@QUICK
def test_ids_stay_in_range_where_a_bad_one_aborts_the_process(case: OpCase) -> None:
    run(case)


# ---------------------------------------------------------------------------------------------------------- shrinking
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_minimal_case_is_one_lookup_in_a_table_of_one_element(shape: tuple[int, ...]) -> None:
    case = minimal(FAMILY.cases(context(shape)))
    assert (case.op, case.call) == (EMBEDDING, LOOKUP)
    assert list(case.kwargs) == ["weight", "input"]
    assert weight_of(case).shape == (1, 1)
    assert weight_of(case).dtype == torch.float64
    assert weight_of(case).requires_grad
    assert ids_of(case)[0].tolist() == [0]
    assert ids_of(case)[0].dtype == torch.int64


@pytest.mark.parametrize("tag", sorted(INPUT_CLASSES))
def test_every_class_shrinks_to_few_elements_and_nothing_else(tag: str) -> None:
    case = minimal(FAMILY.cases(context((2,))), lambda case: tag in case.tags)
    # Sizes that are cut evenly or unevenly alternate among the shapes, so Hypothesis may stop before the smallest.
    alternating = dict.fromkeys(("even index shard", "uneven index shard", "non-contiguous gradient"), 8)
    most_ids = {"all-same ids": 2, "edge rows": 2, "duplicate ids": 3, **alternating}.get(tag, 1)
    assert all(ids.numel() <= most_ids for ids in ids_of(case))
    assert weight_of(case).numel() <= (most_ids if tag in alternating else 4)
    assert weight_of(case).dtype == torch.float64
    assert weight_of(case).numel() or tag in ("size-0 table", "empty indices", "even index shard")
    flags = {name for name, value in case.kwargs.items() if not isinstance(value, torch.Tensor)}
    assert all(flag in tag or "padding" in tag or (tag, flag) == ("norm_type", "max_norm") for flag in flags)


def test_an_empty_shard_shrinks_to_one_element() -> None:
    case = minimal(FAMILY.cases(context((2,))), lambda case: "empty shard" in case.tags)
    assert weight_of(case).shape == (1, 1)
    assert all(ids.numel() <= 1 for ids in ids_of(case))


def test_padding_on_another_shard_shrinks_to_two_rows() -> None:
    wanted = {"padding on another shard", "padding id looked up"}
    case = minimal(FAMILY.cases(context((2,))), lambda case: wanted <= case.tags)
    assert weight_of(case).shape == (2, 1)
    assert (ids_of(case)[0].tolist(), case.kwargs["padding_idx"]) == ([1], 1)


# -------------------------------------------------------------------------------------------------------- likely cause
R, ROWS, COLUMNS = (Replicate(),), (Shard(0),), (Shard(1),)
TABLE = filled((5, 2), torch.float64, 0, Layout(requires_grad=True))
NO_CAUSE = ""


def lookup(ids: list[int], **flags: object) -> OpCase:
    return OpCase(EMBEDDING, LOOKUP, (), {"weight": TABLE, "input": torch.tensor(ids), **flags}, "embedding")


def program(name: str, *ids: list[int]) -> OpCase:
    call = f"strategies.embedding.programs.{name}"
    return OpCase(EMBEDDING, call, (TABLE, *map(torch.tensor, ids)), {}, "embedding")


def gradient(ids: list[int], scale: bool) -> OpCase:
    args = (filled((len(ids), 2), torch.float64, 0), torch.tensor(ids), 5, -1, scale)
    return OpCase(BACKWARD, f"torch.ops.{BACKWARD}", args, {}, "embedding")


CRASH, SILENT = VerdictKind.CRASH, VerdictKind.SILENT_ERROR
WRONG, WRONG_GRADIENT = VerdictKind.WRONG_VALUE, VerdictKind.WRONG_GRADIENT
FREED = "the mask of a row-wise lookup is released by its first reduction"
SHARED = "do two pending lookups share one mask?"
EMPTY = "a rank's shard of weight is empty and the local kernel refuses it"
LOCAL_ROW = "is padding_idx used as a local row index?"
PER_RANK = "are frequencies counted per rank?"


@pytest.mark.parametrize(
    ("case", "ranks", "combination", "kind", "phase", "cause"),
    [
        (lookup([0]), 4, (ROWS, R), CRASH, Step.FORWARD, EMPTY),
        (lookup([0]), 2, (ROWS, R), CRASH, Step.FORWARD, NO_CAUSE),
        (lookup([0]), 4, (COLUMNS, R), CRASH, Step.FORWARD, NO_CAUSE),
        (lookup([0]), 4, (ROWS, R), CRASH, Step.BACKWARD, NO_CAUSE),
        (program("used_twice", [0]), 2, (ROWS, R), CRASH, Step.FORWARD, FREED),
        (program("used_twice", [0]), 2, (R, R), CRASH, Step.FORWARD, NO_CAUSE),
        (program("two_pending", [0], [4]), 2, (ROWS, R, R), CRASH, Step.FORWARD, SHARED),
        (lookup([7]), 2, (ROWS, R), SILENT, Step.FORWARD, "ids outside every rank's rows are masked and never checked"),
        (lookup([-1]), 2, (R, ROWS), SILENT, Step.FORWARD, NO_CAUSE),
        (lookup([4], padding_idx=4), 2, (ROWS, R), WRONG_GRADIENT, Step.BACKWARD, LOCAL_ROW),
        (lookup([4], padding_idx=4), 2, (R, R), WRONG_GRADIENT, Step.BACKWARD, NO_CAUSE),
        (lookup([4, 4], scale_grad_by_freq=True), 2, (R, ROWS), WRONG_GRADIENT, Step.BACKWARD, PER_RANK),
        (lookup([4, 3], scale_grad_by_freq=True), 2, (R, ROWS), WRONG_GRADIENT, Step.BACKWARD, NO_CAUSE),
        (gradient([1, 1], True), 2, (ROWS, ROWS), WRONG, Step.FORWARD, PER_RANK),
        (gradient([1, 1], False), 2, (ROWS, ROWS), WRONG, Step.FORWARD, NO_CAUSE),
        (lookup([4], max_norm=1.0), 2, (COLUMNS, R), WRONG, Step.FORWARD, "are norms taken over a rank's own columns?"),
    ],
)  # fmt: skip
def test_likely_cause_follows_the_structure(
    case: OpCase, ranks: int, combination: tuple[Placements, ...], kind: VerdictKind, phase: Step, cause: str
) -> None:
    trial = Trial(case, MeshSpec((ranks,)), combination)
    assert FAMILY.likely_cause(trial, Verdict(kind, phase=phase)) == cause
