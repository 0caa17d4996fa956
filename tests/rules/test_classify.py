"""One look at the ranks' results must say the same as putting them together under each placement, one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from verifier.core.case import MeshSpec
from verifier.core.verdict import VerdictKind
from verifier.placements.algebra import Disagreement, combine, local_shape, split
from verifier.placements.alphabet import Alphabet
from verifier.placements.partials import partial_reductions, split_index, split_partial
from verifier.rules.classify import Expected
from verifier.torch_internals.placements import special_placement

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128)


def small(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype) if dtype != torch.bool else values > 0


@st.composite
def results(draw: st.DrawFn) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A value, and what ranks might hold: a true split of it under some placement, or one with an element changed."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    parts = draw(st.integers(2, 4))
    value = small(shape, dtype, draw(st.integers(0, 1000)))
    letter = draw(st.sampled_from(Alphabet().placements(value.ndim, dtype)))
    locals_ = split(value, (letter,), (parts,), draw(st.integers(0, 1000)))
    rank = draw(st.integers(0, parts - 1))
    if draw(st.booleans()) and locals_[rank].numel():
        changed = locals_[rank].clone()
        flat = changed.view(-1)
        flat[0] = ~flat[0] if dtype == torch.bool else flat[0] + 1
        locals_[rank] = changed
    return value, locals_


@given(results())
def test_represented_says_what_combining_says(drawn: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    value, locals_ = drawn
    expected = Expected(value, len(locals_), exact=True, terms=1, noise=0.0)
    found = expected.represented(locals_)
    for number, letter in enumerate(expected.letters):
        try:
            right = torch.equal(combine(locals_, (letter,), (len(locals_),), value.shape), value)
        except Disagreement:
            right = False
        assert bool(found >> number & 1) == right, f"{letter}: {locals_} of {value}"


@given(results())
def test_a_mismatch_is_found_exactly_where_a_placement_is_not_represented(
    drawn: tuple[torch.Tensor, list[torch.Tensor]],
) -> None:
    value, locals_ = drawn
    expected = Expected(value, len(locals_), exact=True, terms=1, noise=0.0)
    mesh = MeshSpec((len(locals_),))
    found = expected.represented(locals_)
    for number, letter in enumerate(expected.letters):
        mismatch = expected.mismatch(locals_, (letter,), mesh)
        assert (mismatch is None) == bool(found >> number & 1), f"{letter}: {mismatch}"


def test_only_the_placements_asked_for_are_looked_at() -> None:
    value = torch.tensor([1.0, 2.0])
    expected = Expected(value, 2, exact=True, terms=1, noise=0.0)
    both = [value, value]
    assert expected.represented(both, expected.bit(Partial("max"))) == expected.bit(Partial("max"))
    assert expected.bit(Replicate()) & expected.represented(both)


def test_nan_equals_nan_and_a_small_error_is_within_the_tolerance() -> None:
    value = torch.tensor([float("nan"), 1 / 3], dtype=torch.float64)
    exact = Expected(value, 2, exact=True, terms=4, noise=0.0)
    assert exact.represented([value.clone(), value.clone()], exact.bit(Replicate()))
    near = value + 1e-16
    tolerant = Expected(value, 2, exact=False, terms=4, noise=1.0)
    assert tolerant.represented([near, near], tolerant.bit(Replicate()))
    assert not tolerant.represented([value + 1e-3, value + 1e-3], tolerant.bit(Replicate()))


def test_a_difference_that_conditioning_may_explain_is_not_clear() -> None:
    value = torch.tensor([1.0, 2.0], dtype=torch.float64)
    expected = Expected(value, 2, exact=False, terms=2, noise=0.0)
    mesh = MeshSpec((2,))
    slightly = expected.mismatch([value + 1e-9, value + 1e-9], (Replicate(),), mesh)
    clearly = expected.mismatch([value + 0.1, value + 0.1], (Replicate(),), mesh)
    assert slightly is not None
    assert not slightly.clear
    assert clearly is not None
    assert clearly.clear
    assert clearly.kind is VerdictKind.WRONG_VALUE


def test_another_dtype_represents_nothing() -> None:
    value = torch.tensor([1.0, 2.0])
    expected = Expected(value, 2, exact=True, terms=1, noise=0.0)
    wrong = [value.double(), value.double()]
    assert expected.represented(wrong) == 0
    mismatch = expected.mismatch(wrong, (Replicate(),), MeshSpec((2,)))
    assert mismatch is not None
    assert mismatch.kind is VerdictKind.WRONG_DTYPE


@given(
    st.lists(st.integers(0, 9), min_size=0, max_size=6),
    st.sampled_from(("sum", "product", "min", "max")),
    st.integers(2, 4),
    st.integers(0, 1000),
)
def test_index_parts_reduce_to_the_indices_and_stay_in_their_range(
    values: list[int], reduction: str, parts: int, seed: int
) -> None:
    value = torch.tensor(values, dtype=torch.int64)
    pieces = split_index(value, reduction, parts, torch.Generator().manual_seed(seed))
    whole = combine(pieces, (Partial(reduction),), (parts,), value.shape)
    assert torch.equal(whole, value)
    for piece in pieces:
        assert piece.dtype == value.dtype
        if values:
            assert int(piece.min()) >= 0
            assert int(piece.max()) <= max(*values, 1, 1)


def test_index_parts_of_a_reduction_that_the_dtype_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"int64.*P\(avg\)"):
        split_index(torch.tensor([1]), "avg", 2, torch.Generator())
    assert "avg" not in partial_reductions(torch.int64)


# ------------------------------------------------------------------------------------------------ strided shards, norms
@given(st.integers(0, 13), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1))
def test_a_strided_shard_is_put_together_again(size: int, factor: int, parts: int, dim: int) -> None:
    shape = [size, 3] if dim == 0 else [3, size]
    value = small(shape, torch.float64, 0)
    placement = special_placement(f"_S({dim}, {factor})")
    assert placement is not None
    pieces = split(value, (placement,), (parts,), 0)
    for rank, piece in enumerate(pieces):
        assert tuple(piece.shape) == local_shape(value.shape, (placement,), (parts,), (rank,))
    assert torch.equal(combine(pieces, (placement,), (parts,), value.shape), value)


def test_flattening_a_tensor_that_is_sharded_on_its_second_dim_gives_a_strided_shard() -> None:
    value = torch.arange(24.0).view(4, 6)
    flat = [piece.reshape(-1) for piece in split(value, (Shard(1),), (2,), 0)]
    placement = special_placement("_S(0, 4)")
    assert placement is not None
    assert torch.equal(combine(flat, (placement,), (2,), (24,)), value.reshape(-1))


@pytest.mark.parametrize("order", [1, 2, 3.5, -1])
def test_norms_of_parts_make_the_norm(order: float) -> None:
    value = torch.tensor([3.0, -4.0, 1.0, 2.0], dtype=torch.float64)
    placement = special_placement(f"_NormP({order})")
    assert placement is not None
    norms = [torch.linalg.vector_norm(piece, order) for piece in split(value, (Shard(0),), (2,), 0)]
    got = combine(norms, (placement,), (2,), ())
    assert torch.allclose(got, torch.linalg.vector_norm(value, order))


def test_parts_of_a_sum_differ_in_value() -> None:
    pieces = split_partial(torch.ones(4, dtype=torch.float64), "sum", 2, torch.Generator().manual_seed(0))
    assert not torch.equal(*pieces)
