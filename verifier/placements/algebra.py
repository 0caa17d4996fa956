"""The placement algebra: split a global tensor into local tensors, and combine local tensors into a global one.

The oracle uses it, so it is written from DTensor's documented semantics and calls none of DTensor's functions:
placements are read only as data. A mesh of shape ``mesh_shape`` numbers its ranks row-major. Mesh dims act from left to
right, each on the result of the one before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.placement_text import BITWISE_REDUCTIONS, format_placements
from verifier.core.wording import plural
from verifier.placements.bounds import shard_bounds, strided_indices
from verifier.placements.partials import bitwise, is_reducible, split_partial
from verifier.torch_internals.placements import (
    PLAIN_PLACEMENTS,
    Placements,
    masked_extent,
    norm_order,
    strided_shard,
    strides_of,
)

__all__ = [
    "Disagreement",
    "Irreducible",
    "combine",
    "coordinates",
    "in_order",
    "is_modelled",
    "is_shard_order",
    "local_shape",
    "reducing_rounds",
    "shard_indices",
    "sharded_dim",
    "split",
    "take_local",
    "view_local",
    "with_arithmetic",
]


class Disagreement(ValueError):  # noqa: N818 - what the ranks are in
    """Replicas differ, or a local tensor does not have the shape that its placements require."""


class Irreducible(Disagreement):
    """No collective reduces the local tensors, for example bools under an average."""


def shard_indices(placement: Placement, size: int, parts: int, index: int) -> Sequence[int]:
    """Return which of the ``size`` indices of the tensor dim that ``placement`` shards are in shard ``index``.

    >>> from torch.distributed.tensor.placement_types import _StridedShard
    >>> shard_indices(_StridedShard(0, split_factor=2), 8, 2, 0)
    [0, 1, 4, 5]
    """
    strided = strides_of(placement)
    if strided is None:
        return range(*shard_bounds(size, parts, index))
    return strided_indices(size, strided[1], parts, index)


def is_modelled(placement: Placement) -> bool:
    """Return whether it is known what ``placement`` promises: not of a class of the user's, be it derived from others.

    >>> class Halves(Partial): ...
    >>> is_modelled(Partial()), is_modelled(Halves())
    (True, False)
    """
    if type(placement) in PLAIN_PLACEMENTS:
        return True
    return any(one(placement) is not None for one in (strides_of, masked_extent, norm_order))


def sharded_dim(placement: Placement) -> int | None:
    """Return the tensor dim that ``placement`` shards, or None."""
    if type(placement) in PLAIN_PLACEMENTS:
        return placement.dim if type(placement) is Shard else None
    strided = strides_of(placement)
    return None if strided is None else strided[0]


def in_order(placements: Placements, mesh_shape: Sequence[int], order: Sequence[int]) -> Placements:
    """Return ``placements`` with the strided shards that mean that the mesh dims shard in ``order``.

    DTensor writes a shard order in this way. If mesh dims to the right shard the same tensor dim first, the split
    factor is the number of pieces that they have made.

    >>> in_order((Shard(0), Shard(0)), (2, 3), (1, 0))
    (_StridedShard(dim=0, sf=3), Shard(dim=0))
    """
    result = list(placements)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            before = order[: list(order).index(mesh_dim)]
            factor = math.prod(mesh_shape[d] for d in before if d > mesh_dim and placements[d] == placement)
            if factor > 1:
                result[mesh_dim] = strided_shard(placement.dim, factor)
    return tuple(result)


def is_shard_order(placements: Placements, mesh_shape: Sequence[int]) -> bool:
    """Return whether :func:`in_order` gives ``placements`` for some order; it does if no shard is strided.

    Other strided shards are results of views. What a call lists may be more placements than the mesh has dims.

    >>> is_shard_order((strided_shard(0, 2), Replicate()), (2, 2))
    False
    >>> is_shard_order((Shard(0), Shard(0)), (2,))
    True
    """
    if len(placements) > len(mesh_shape):
        return all(strides_of(p) is None for p in placements)
    plain = tuple(p if (cut := strides_of(p)) is None else Shard(cut[0]) for p in placements)
    orders = itertools.permutations(range(len(mesh_shape)))
    return any(in_order(plain, mesh_shape, order) == placements for order in orders)


def coordinates(mesh_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the coordinate of every rank, in rank order.

    >>> list(coordinates((2, 2)))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return itertools.product(*(range(extent) for extent in mesh_shape))


def local_shape(
    shape: Sequence[int], placements: Placements, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the local tensor at ``coordinate``.

    >>> local_shape((17, 4), (Shard(0),), (8,), (7,))
    (0, 4)
    """
    result = list(shape)
    for placement, extent, index in zip(placements, mesh_shape, coordinate, strict=True):
        dim = sharded_dim(placement)
        if dim is not None:
            result[dim] = len(shard_indices(placement, result[dim], extent, index))
    return tuple(result)


def take_local(
    value: torch.Tensor, placements: Placements, mesh_shape: Sequence[int], coordinate: Sequence[int], seed: int
) -> torch.Tensor:
    """Return a copy of the local tensor that the rank at ``coordinate`` holds of ``value``.

    Ranks that call this with the same ``value`` and ``seed`` get local tensors of the same split, without
    communication.

    Raises
    ------
    ValueError
        If a placement is none of Replicate, Shard and Partial, or shards a tensor dim that ``value`` does not have.
    """
    local = view_local(value, placements, mesh_shape, coordinate, seed)
    return local.clone(memory_format=torch.preserve_format)


def view_local(
    value: torch.Tensor, placements: Placements, mesh_shape: Sequence[int], coordinate: Sequence[int], seed: int
) -> torch.Tensor:
    """Return the result of :func:`take_local`, only for reading: it may share the memory of ``value``."""
    local = value.detach()
    prefix: tuple[int, ...] = ()
    for mesh_dim, (placement, extent, index) in enumerate(zip(placements, mesh_shape, coordinate, strict=True)):
        if type(placement) is Replicate:
            prefix = (*prefix, 0)
            continue
        if type(placement) is Shard:
            if not 0 <= placement.dim < value.ndim:
                raise ValueError(f"cannot place a {value.ndim}-d tensor as {format_placements(placements)}")
            start, stop = shard_bounds(local.shape[placement.dim], extent, index)
            local = local.narrow(placement.dim, start, stop - start)
        elif (dim := sharded_dim(placement)) is not None:
            indices = shard_indices(placement, local.shape[dim], extent, index)
            local = local.index_select(dim, torch.tensor(indices, dtype=torch.long))
        elif type(placement) is Partial:
            # the ranks along this mesh dim have the same prefix, so the same split; replicas share their summands
            generator = torch.Generator().manual_seed(hash((seed, mesh_dim, prefix)) & 0x7FFFFFFF)
            local = split_partial(local, placement.reduce_op, extent, generator)[index]
        elif (order := norm_order(placement)) is not None:  # what a norm writes to: its own values do not matter
            local = local * (extent ** (-1 / order) if order else 1)
        else:
            raise ValueError(f"cannot split by {placement!r}; Replicate, Shard and Partial are supported")
        prefix = (*prefix, index)
    return local


def split(value: torch.Tensor, placements: Placements, mesh_shape: Sequence[int], seed: int) -> list[torch.Tensor]:
    """Return the local tensors of all ranks, in rank order; see :func:`take_local`.

    >>> [local.tolist() for local in split(torch.arange(5), (Shard(0),), (4,), seed=0)]
    [[0, 1], [2, 3], [4], []]
    """
    return [take_local(value, placements, mesh_shape, c, seed) for c in coordinates(mesh_shape)]


def _reduce(pieces: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    dtype = pieces[0].dtype
    if not is_reducible(dtype, reduction):
        raise Irreducible(f"no collective reduces {str(dtype).removeprefix('torch.')} tensors under P({reduction})")
    if reduction in BITWISE_REDUCTIONS:
        return bitwise(pieces, reduction)
    stacked = torch.stack(list(pieces))
    if dtype == torch.bool:
        return stacked.any(0) if reduction in ("sum", "max") else stacked.all(0)
    if dtype.is_complex:
        wide = stacked.to(torch.complex128)
    elif dtype.is_floating_point:
        wide = stacked.to(torch.float64)
    else:
        wide = stacked.to(torch.int64) if dtype in (torch.uint16, torch.uint32) else stacked  # no arithmetic in torch
    if reduction in ("max", "min"):
        return (wide.amax(0) if reduction == "max" else wide.amin(0)).to(dtype)
    if reduction == "product":
        return wide.prod(0).to(dtype)
    total = wide.sum(0)
    return (total / len(pieces) if reduction == "avg" else total).to(dtype)


def _merge(pieces: Sequence[torch.Tensor], placement: Placement, size: int | None) -> torch.Tensor:
    """Combine the tensors along one mesh dim. ``size`` is that of the sharded tensor dim before the split."""
    if isinstance(placement, Replicate):
        first = pieces[0]
        for rank, other in enumerate(pieces[1:], 1):
            if first.shape != other.shape or not _same(first, other):
                raise Disagreement(f"replicas 0 and {rank} along the mesh dim differ")
        return first
    dim = sharded_dim(placement)
    if dim is not None:
        assert size is not None
        cuts = [shard_indices(placement, size, len(pieces), index) for index in range(len(pieces))]
        for index, (piece, cut) in enumerate(zip(pieces, cuts, strict=True)):
            others = [extent for d, extent in enumerate(piece.shape) if d != dim]
            wanted = [extent for d, extent in enumerate(pieces[0].shape) if d != dim]
            if others != wanted or piece.ndim != pieces[0].ndim:
                raise Disagreement(f"shards 0 and {index} of tensor dim {dim} differ along another tensor dim")
            if piece.shape[dim] != len(cut):
                raise Disagreement(
                    f"shard {index} of tensor dim {dim} has {piece.shape[dim]} elements, expected {len(cut)}"
                )
        joined = torch.cat(list(pieces), dim)
        if isinstance(placement, Shard):
            return joined
        order = torch.tensor([i for cut in cuts for i in cut], dtype=torch.long)
        return joined.index_select(dim, order.argsort())
    if isinstance(placement, Partial) and (type(placement) is Partial or norm_order(placement) is not None):
        shapes = {tuple(piece.shape) for piece in pieces}
        if len(shapes) > 1:
            raise Disagreement(f"parts of {placement} differ in shape: {sorted(shapes)}")
        order_p = norm_order(placement)
        if order_p == 0:
            raise Disagreement(f"parts of {placement} cannot be put together: 1 / 0 is the power that does it")
        if order_p is not None:
            powers = torch.stack([piece.double().abs() ** order_p for piece in pieces])
            return (powers.sum(0) ** (1 / order_p)).to(pieces[0].dtype)
        return _reduce(pieces, placement.reduce_op)
    raise ValueError(f"cannot combine by {placement!r}; Replicate, Shard and Partial are supported")


def reducing_rounds(placements: Placements, mesh_shape: Sequence[int]) -> bool:
    """Return whether a reduction of exact local tensors may round, because it takes a root or divides.

    Division by a power of two is exact, and so is the sum of absolute values in a 1-norm.

    >>> reducing_rounds((Partial("avg"),), (3,)), reducing_rounds((Partial("avg"),), (4,))
    (True, False)
    """
    for placement, extent in zip(placements, mesh_shape, strict=True):
        if type(placement) is Partial:
            if placement.reduce_op == "avg" and extent & (extent - 1):
                return True
        elif norm_order(placement) not in (None, 1.0):
            return True
    return False


def with_arithmetic(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in a dtype in which torch can compare them; some have few ops besides conversion."""
    if tensor.dtype == torch.complex32:
        return tensor.to(torch.complex64)
    return tensor.float() if tensor.dtype.is_floating_point and tensor.itemsize == 1 else tensor


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit; NaN is equal to NaN."""
    left, right = with_arithmetic(left), with_arithmetic(right)
    return torch.equal(left, right) or bool(((left == right) | ((left != left) & (right != right))).all())


def combine(
    locals_: Sequence[torch.Tensor], placements: Placements, mesh_shape: Sequence[int], shape: Sequence[int]
) -> torch.Tensor:
    """Return the global tensor of ``shape`` that the local tensors, in rank order, represent.

    Raises
    ------
    Disagreement
        If replicas differ, or a local tensor does not have the shape that the placements require. If no collective
        reduces the local tensors, the error is :class:`Irreducible`.

    >>> value = torch.arange(6.0).view(3, 2)
    >>> torch.equal(combine(split(value, (Shard(0), Shard(0)), (2, 2), 0), (Shard(0), Shard(0)), (2, 2), (3, 2)), value)
    True
    """
    pieces = dict(zip(coordinates(mesh_shape), locals_, strict=True))
    for mesh_dim in reversed(range(len(mesh_shape))):
        placement = placements[mesh_dim]
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for coordinate in sorted(pieces):
            groups.setdefault(coordinate[:-1], []).append(pieces[coordinate])
        merged = {}
        for prefix, group in groups.items():
            size = None
            dim = sharded_dim(placement)
            if dim is not None:
                if dim >= len(shape):
                    raise Disagreement(
                        f"the global tensor has {plural(len(shape), 'dim')}, {placement} cuts tensor dim {dim}"
                    )
                size = local_shape(shape, placements[:mesh_dim], mesh_shape[:mesh_dim], prefix)[dim]
            merged[prefix] = _merge(group, placement, size)
        pieces = merged
    (result,) = pieces.values()
    if tuple(result.shape) != tuple(shape):
        raise Disagreement(f"the parts make up shape {list(result.shape)}, expected {list(shape)}")
    return result
