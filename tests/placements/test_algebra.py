"""The placement algebra: what it cuts it can put together, as torch.chunk cuts, and it notices what is corrupted."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.meshes import mesh_shapes
from verifier.core.placement_text import BITWISE_REDUCTIONS, REDUCTIONS, format_placements
from verifier.placements.algebra import Disagreement, combine, coordinates, local_shape, split, take_local
from verifier.placements.alphabet import Alphabet
from verifier.placements.bounds import shard_bounds
from verifier.placements.partials import bitwise_reductions, partial_reductions, split_partial
from verifier.torch_internals.placements import Placements

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool)

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9])
SEEDS = st.integers(0, 2**16 - 1)


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return small integers of both signs, 0 among them; bools where the dtype has no others."""
    generator = torch.Generator().manual_seed(seed)
    low = 0 if dtype in (torch.uint8, torch.bool) else -8
    high = 2 if dtype == torch.bool else 9
    real = torch.randint(low, high, tuple(shape), generator=generator)
    if dtype.is_complex:
        return torch.complex(real.double(), torch.randint(low, high, tuple(shape), generator=generator).double()).to(
            dtype
        )
    return real.to(dtype)


@st.composite
def placed_tensors(draw: st.DrawFn, max_ranks: int = 8) -> tuple[torch.Tensor, Placements, tuple[int, ...], int]:
    """Draw a tensor, legal placements of it on a mesh, the shape of the mesh, and the seed of the split."""
    mesh_shape = draw(mesh_shapes(max_ranks))
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(SIZES, max_size=3))
    letters = st.sampled_from(Alphabet().placements(len(shape), dtype))
    placements = draw(st.tuples(*(letters for _ in mesh_shape)).filter(Alphabet.legal))
    return values(shape, dtype, draw(SEEDS)), placements, mesh_shape, draw(SEEDS)


# ----------------------------------------------------------------------------------------------------- cut and combine
@given(placed_tensors())
def test_combine_undoes_split(placed: tuple[torch.Tensor, Placements, tuple[int, ...], int]) -> None:
    value, placements, mesh_shape, seed = placed
    locals_ = split(value, placements, mesh_shape, seed)
    assert len(locals_) == math.prod(mesh_shape)
    assert {local.dtype for local in locals_} == {value.dtype}
    result = combine(locals_, placements, mesh_shape, value.shape)
    assert result.dtype == value.dtype
    assert torch.equal(result, value)


@given(placed_tensors())
def test_each_rank_takes_its_part_of_the_same_split(
    placed: tuple[torch.Tensor, Placements, tuple[int, ...], int],
) -> None:
    value, placements, mesh_shape, seed = placed
    locals_ = split(value, placements, mesh_shape, seed)
    for coordinate, local in zip(coordinates(mesh_shape), locals_, strict=True):
        assert torch.equal(take_local(value, placements, mesh_shape, coordinate, seed), local)
        assert tuple(local.shape) == local_shape(value.shape, placements, mesh_shape, coordinate)


@given(placed_tensors())
def test_parts_are_copies(placed: tuple[torch.Tensor, Placements, tuple[int, ...], int]) -> None:
    value, placements, mesh_shape, seed = placed
    before = value.clone()
    for local in split(value, placements, mesh_shape, seed):
        local.zero_()
    assert torch.equal(value, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_reduction_of_every_dtype(dtype: torch.dtype) -> None:
    """No drawing here, so that none is left out: all letters on all orders of two mesh dims."""
    value = values((5, 3), dtype, seed=1)
    alphabet = Alphabet(partial=(*REDUCTIONS, *BITWISE_REDUCTIONS))
    letters = alphabet.placements(value.ndim, dtype)
    possible = {*partial_reductions(dtype), *bitwise_reductions(dtype)}
    assert {letter.reduce_op for letter in letters if isinstance(letter, Partial)} == possible
    usual = {p.reduce_op for p in Alphabet().placements(value.ndim, dtype) if isinstance(p, Partial)}
    assert usual == set(partial_reductions(dtype))
    assert all(Alphabet.admits(letter, value.ndim, dtype) for letter in letters)
    tried = 0
    for placements in ((a, b) for a in letters for b in letters if Alphabet.legal((a, b))):
        locals_ = split(value, placements, (2, 3), seed=tried)
        assert torch.equal(combine(locals_, placements, (2, 3), value.shape), value), format_placements(placements)
        tried += 1
    assert tried >= len(letters)


def test_replicas_in_a_dtype_without_equality_are_compared() -> None:
    one, other = torch.tensor([1 + 2j]).to(torch.complex32), torch.tensor([1 + 3j]).to(torch.complex32)
    assert combine([one, one.clone()], (Replicate(),), (2,), (1,)) is one
    with pytest.raises(Disagreement):
        combine([one, other], (Replicate(),), (2,), (1,))


# -------------------------------------------------------------------------------------------------------------- shards
@given(size=st.integers(0, 40), parts=st.integers(1, 12))
def test_shards_are_those_of_torch_chunk(size: int, parts: int) -> None:
    rows = torch.arange(size)
    chunks = [chunk.tolist() for chunk in rows.chunk(parts)] if size else []
    chunks += [[]] * (parts - len(chunks))  # torch.chunk gives fewer where the others would be empty
    bounds = [shard_bounds(size, parts, index) for index in range(parts)]
    assert [rows[start:stop].tolist() for start, stop in bounds] == chunks


@given(st.data(), mesh_shapes(), st.integers(0, 12))
def test_mesh_dims_cut_one_after_the_other(data: st.DataObject, mesh_shape: tuple[int, ...], size: int) -> None:
    """Every mesh dim cuts the same tensor dim: the parts in rank order are chunks of chunks."""
    rows = torch.arange(size)
    placements: Placements = (Shard(0),) * len(mesh_shape)
    expected = [rows]
    for extent in mesh_shape:
        cut = [(*whole.chunk(extent),) if whole.numel() else (whole,) for whole in expected]
        expected = [part for parts in cut for part in (*parts, *[rows[:0]] * (extent - len(parts)))]
    got = split(rows, placements, mesh_shape, seed=0)
    assert [part.tolist() for part in got] == [part.tolist() for part in expected]


# ------------------------------------------------------------------------------------------------------------- partial
@given(
    dtype=st.sampled_from([*FLOATS, torch.int64, *COMPLEX]),
    reduction=st.sampled_from(["sum", "avg"]),
    parts=st.integers(2, 8),
    seed=SEEDS,
)
def test_parts_of_a_sum_differ_in_value_size_and_sign(
    dtype: torch.dtype, reduction: str, parts: int, seed: int
) -> None:
    assume(reduction in partial_reductions(dtype))
    value = values((6, 6), dtype, seed)
    pieces = split_partial(value, reduction, parts, torch.Generator().manual_seed(seed))
    real = [torch.view_as_real(piece) if dtype.is_complex else piece for piece in pieces]
    for piece in real:
        assert bool((piece > 0).any())
        assert bool((piece < 0).any())
    assert len({tuple(piece.flatten().tolist()) for piece in real}) == parts
    assert len({float(piece.double().abs().max()) for piece in real}) > 1 or parts == 2


@given(reduction=st.sampled_from(["sum", "avg", "max", "min"]), parts=st.integers(2, 8), seed=SEEDS)
def test_parts_may_be_infinite_beside_a_nan_and_beside_no_infinity(reduction: str, parts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = values((12, 6), torch.float64, seed).index_fill(0, torch.arange(6), math.nan)
    pieces = split_partial(value, reduction, parts, generator)
    combined = {
        "sum": lambda all_parts: all_parts.sum(0),
        "avg": lambda all_parts: all_parts.mean(0),
        "max": lambda all_parts: all_parts.amax(0),
        "min": lambda all_parts: all_parts.amin(0),
    }[reduction](torch.stack(pieces))
    assert torch.equal(combined.isnan(), value.isnan())
    assert torch.equal(combined.nan_to_num(), value.nan_to_num())
    assert any(bool(piece.isinf().any()) for piece in pieces)
    value[11, 5] = math.inf
    pieces = split_partial(value, reduction, parts, generator)
    assert not any(bool(piece[:11].isinf().any()) for piece in pieces)


@given(
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(["min", "max", "product", *BITWISE_REDUCTIONS]),
    parts=st.integers(2, 8),
    seed=SEEDS,
)
def test_no_rank_alone_has_the_result(dtype: torch.dtype, reduction: str, parts: int, seed: int) -> None:
    assume(reduction in (*partial_reductions(dtype), *bitwise_reductions(dtype)))
    assume(not (reduction == "product" and dtype == torch.uint8))  # no factor but 1 has an inverse
    value = values((8, 8), dtype, seed)
    if dtype == torch.bool:  # an element that no rank can change is the same on all
        value = torch.full((8, 8), reduction == "max")
    pieces = split_partial(value, reduction, parts, torch.Generator().manual_seed(seed))
    wrong = [bool((piece != value).any()) for piece in pieces]
    assert all(wrong), wrong
    assert any(not torch.equal(pieces[0], piece) for piece in pieces[1:])


@given(
    dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8]),
    reduction=st.sampled_from(BITWISE_REDUCTIONS),
    parts=st.integers(2, 8),
    seed=SEEDS,
)
def test_parts_under_one_bitwise_operation_are_none_under_another(
    dtype: torch.dtype, reduction: str, parts: int, seed: int
) -> None:
    value = values((8, 8), dtype, seed)
    pieces = split_partial(value, reduction, parts, torch.Generator().manual_seed(seed))
    for other in BITWISE_REDUCTIONS:
        by_element = [functools.reduce(getattr(operator, _OPERATORS[other]), each) for each in _elements(pieces)]
        assert (by_element == value.flatten().tolist()) == (other == reduction)


_OPERATORS = {"band": "and_", "bor": "or_", "bxor": "xor"}


def _elements(pieces: list[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    return zip(*(piece.flatten().tolist() for piece in pieces), strict=True)


@given(
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(["sum", "avg", "product", "min", "max", *BITWISE_REDUCTIONS]),
)
def test_a_reduction_that_the_dtype_lacks_is_refused(dtype: torch.dtype, reduction: str) -> None:
    value = values((2,), dtype, 0)
    sum_of_bools = dtype == torch.bool and reduction == "sum"
    if sum_of_bools or reduction in (*partial_reductions(dtype), *bitwise_reductions(dtype)):
        assert len(split_partial(value, reduction, 2, torch.Generator().manual_seed(0))) == 2
    else:
        with pytest.raises(ValueError, match=r"cannot be P\("):
            split_partial(value, reduction, 2, torch.Generator().manual_seed(0))


@given(placed_tensors())
def test_a_split_follows_from_its_seed(placed: tuple[torch.Tensor, Placements, tuple[int, ...], int]) -> None:
    value, placements, mesh_shape, seed = placed
    first = split(value, placements, mesh_shape, seed)
    again = split(value, placements, mesh_shape, seed)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_another_seed_splits_otherwise() -> None:
    value = values((6, 6), torch.float64, 0)
    splits = [split(value, (Partial("sum"),), (2,), seed) for seed in range(4)]
    assert len({tuple(pieces[0].flatten().tolist()) for pieces in splits}) == 4


# ---------------------------------------------------------------------------------------------------------- corruption
def noticed(locals_: Sequence[torch.Tensor], placed: tuple[torch.Tensor, Placements, tuple[int, ...], int]) -> bool:
    """Return whether ``combine`` refuses the parts or gives something else than what was cut."""
    value, placements, mesh_shape, _ = placed
    try:
        result = combine(locals_, placements, mesh_shape, value.shape)
    except Disagreement:
        return True
    return not torch.equal(result, value)


@given(placed_tensors(), st.data())
def test_a_corrupted_element_is_noticed(
    placed: tuple[torch.Tensor, Placements, tuple[int, ...], int], data: st.DataObject
) -> None:
    value, placements, mesh_shape, seed = placed
    # one part may be irrelevant to a minimum, a maximum or a product with 0, but never to the others
    assume(not any(isinstance(p, Partial) and p.reduce_op not in ("sum", "avg") for p in placements))
    locals_ = split(value, placements, mesh_shape, seed)
    full = [rank for rank, local in enumerate(locals_) if local.numel()]
    assume(full)
    victim = locals_[data.draw(st.sampled_from(full))].view(-1)
    position = data.draw(st.integers(0, victim.numel() - 1))
    victim[position] = ~victim[position] if value.dtype == torch.bool else victim[position] + 8
    assert noticed(locals_, placed)


def lengthened(local: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([local, local.new_zeros([1 if d == dim else n for d, n in enumerate(local.shape)])], dim)


@given(placed_tensors(), st.data())
def test_a_part_that_is_too_long_is_noticed(
    placed: tuple[torch.Tensor, Placements, tuple[int, ...], int], data: st.DataObject
) -> None:
    value, placements, mesh_shape, seed = placed
    cut = sorted({placement.dim for placement in placements if isinstance(placement, Shard)})
    # along a dim that is cut, if there is one
    dim = data.draw(st.sampled_from(cut)) if cut else data.draw(st.integers(0, max(value.ndim - 1, 0)))
    assume(value.ndim and len(cut) <= 1)
    locals_ = split(value, placements, mesh_shape, seed)
    rank = data.draw(st.integers(0, len(locals_) - 1))
    locals_[rank] = lengthened(locals_[rank], dim)
    assert noticed(locals_, placed)


def test_shards_that_differ_along_another_dim_are_noticed() -> None:
    value = values((4, 2), torch.float64, 0)
    first, second = split(value, (Shard(0),), (2,), 0)
    assert noticed([first, lengthened(second, 1)], (value, (Shard(0),), (2,), 0))


def test_two_ranks_that_swap_their_shards_are_noticed() -> None:
    value = values((6, 2), torch.float64, 3)
    first, second, third = split(value, (Shard(0),), (3,), 0)
    assert noticed([second, first, third], (value, (Shard(0),), (3,), 0))


def test_replicas_that_differ_are_named() -> None:
    value = values((4,), torch.float64, 0)
    locals_ = split(value, (Replicate(),), (3,), 0)
    locals_[2][1] += 1
    with pytest.raises(Disagreement, match="replicas 0 and 2"):
        combine(locals_, (Replicate(),), (3,), value.shape)


def test_nan_replicas_agree() -> None:
    value = torch.tensor([1.0, float("nan")])
    assert torch.isnan(combine([value, value.clone()], (Replicate(),), (2,), (2,))[1])


# ------------------------------------------------------------------------------------------------------------ alphabet
@given(ndim=st.integers(0, 4), dtype=st.sampled_from(DTYPES))
def test_alphabet_has_every_placement_once(ndim: int, dtype: torch.dtype) -> None:
    letters = Alphabet().placements(ndim, dtype)
    assert len(set(map(str, letters))) == len(letters) == 1 + ndim + len(partial_reductions(dtype))
    assert Alphabet(shard=False, partial=()).placements(ndim, dtype) == (Replicate(),)


def test_mixtures_of_reductions_are_illegal_but_for_sum_and_avg() -> None:
    assert Alphabet.legal((Partial("sum"), Shard(0), Partial("avg")))
    assert not Alphabet.legal((Partial("sum"), Partial("max")))
    assert not Alphabet.legal((Partial("avg"), Partial("min")))
    assert Alphabet.legal((Partial("max"), Partial("max")))


@pytest.mark.parametrize("placements", [(Shard(2),), (Shard(-1),)])
def test_a_dim_that_is_not_there_is_refused(placements: Placements) -> None:
    with pytest.raises(ValueError, match="cannot place a 2-d tensor"):
        split(values((2, 2), torch.float64, 0), placements, (2,), 0)


@given(data=st.data())
def test_replicas_hold_the_same_parts(data: st.DataObject) -> None:
    """Replicate promises equal local tensors, also where another mesh dim splits the value into parts."""
    reduction = data.draw(st.sampled_from(["sum", "avg", "product", "min", "max"]))
    value = values((3, 2), torch.float64, data.draw(st.integers(0, 99)))
    for placements in ((Replicate(), Partial(reduction)), (Partial(reduction), Replicate())):
        zero, one, two, three = split(value, placements, (2, 2), data.draw(st.integers(0, 99)))
        pairs = ((zero, two), (one, three)) if placements[0] == Replicate() else ((zero, one), (two, three))
        assert all(torch.equal(left, right) for left, right in pairs)
