"""Generators of lookups in legacy ShardedTensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import inf
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from strategies.indices import index_tensors, padding_indices
from strategies.sharded_tensor.programs import BAG, EMBEDDING, TRAINED
from strategies.tensors import Layout, dim_sizes, filled, rarely, seeds, shard_classes
from verifier.core.case import OpCase
from verifier.planning.families import DrawContext
from verifier.programs import tell_apart_by

__all__ = ["INPUT_CLASSES", "OPS", "has_sharded_tensor", "sharded_tensor_cases"]

KERNELS = ("embedding", "embedding_bag", "training", "unequal_batches")
CUTS = ("rows", "columns")
OPS = tuple(f"sharded_tensor.{kernel}.{cut}" for kernel in KERNELS for cut in CUTS)
"""Each kernel for each dim of the table that the spec may cut. Batches of unequal sizes are ops of their own, because
ranks die of them, and after that the same op is not tried again on the same mesh. On meshes of
several dims calls have no options: the kernels take a rank's number in its group for that in the world, and nothing
else would show."""

INPUT_CLASSES = frozenset({
    "all-padding bag", "empty bag", "empty shard", "even shard", "ids of one dim", "ids of two dims",
    "ids of three dims", "ids that the dtype rounds", "include_last_offset", "int32 ids", "max", "max_norm", "mean",
    "more bags than ids", "negative padding_idx", "norm_type", "offsets of a wrong start",
    "out-of-range ids", "out-of-range padding_idx", "padding id looked up", "padding_idx", "per_sample_weights",
    "permuted shards", "several steps", "several steps with norm_type", "several steps with padding_idx", "sum",
    "unequal batches", "unequal batches with offsets", "uneven shard", "weights of samples under mean",
})  # fmt: skip
"""Every tag that a case of this family can have; cuts are cuts of the table."""

_ERRORS = ("out-of-range ids", "out-of-range padding_idx")
_BAG_ERRORS = (*_ERRORS, "offsets of a wrong start", "weights of samples under mean")


def _facts(case: OpCase) -> Iterator[str]:
    """Yield what besides the names of its options tells a defect of these kernels from another.

    Only what can be the cause: of a call that the local op refuses, why it does; more bags than ids, of which the
    offsets are lost; weights of samples where their dtype or gradient matters; empty bags where there is something to
    divide by, or to take the largest of. Ranks die of unequal batches whatever else there is.
    """
    if "unequal_batches" in case.op:
        return
    weight, ids, *_ = case.args
    assert isinstance(weight, torch.Tensor)
    assert isinstance(ids, torch.Tensor)
    rows, mode, samples = weight.shape[0], case.kwargs.get("mode"), case.kwargs.get("per_sample_weights")
    if mode is not None:
        yield f"mode={mode}"
    if case.kwargs.get("norm_type") == inf:
        yield "norm_type=inf"
    pools = mode in ("mean", "max")
    if samples is not None and pools:
        yield "per_sample_weights"
        return
    padding_idx = case.kwargs.get("padding_idx")
    if isinstance(padding_idx, int):
        if not -rows <= padding_idx < rows:
            return
        if padding_idx < 0:
            yield "padding_idx<0"
    hazards = _hazards(weight, ids, case.kwargs)
    if "more bags than ids" in hazards:
        yield "more bags than ids"
        return
    offsets = case.kwargs.get("offsets") is not None
    if offsets:
        yield "offsets"
    learnt = isinstance(samples, torch.Tensor) and samples.requires_grad and offsets
    if learnt or "ids that the dtype rounds" in hazards:
        yield "per_sample_weights"
    yield from hazards if pools else hazards - {"all-padding bag", "empty bag"}


for _call in (EMBEDDING, BAG, TRAINED):
    tell_apart_by(_call, _facts)


def sharded_tensor_cases(context: DrawContext) -> SearchStrategy[OpCase]:
    """Return a generator of lookups and pooled lookups for the ops in ``context``.

    Shrinks to ranks that each look up row 0 of a table of the first dtype, of ``[1, 1]`` where torch can cut that.
    About one call in ten of those without gradients of norms is illegal in some way.

    Raises
    ------
    ValueError
        If ``context`` names no op or no dtype.
    """
    context.check(set(OPS))
    return _cases(context)


@st.composite
def _cases(draw: st.DrawFn, context: DrawContext) -> OpCase:
    op = draw(st.sampled_from(context.ops))
    _, kernel, cut = op.split(".")
    dim = CUTS.index(cut)
    ranks = context.mesh.shape[-1]
    dtype = draw(st.sampled_from(context.dtypes))
    if kernel == "unequal_batches" or context.mesh.ndim > 1:
        return _plain(draw, context, op, dim)
    if kernel == "training":
        return _training(draw, context, op, dim, dtype)
    bags = kernel == "embedding_bag"
    features = ["none"] * 6 + ["max_norm"] * 3 + ["norm_type"] * 2
    some = ["samples"] * 4 + ["rounded ids", "more bags than ids"] * 2 + 2 * list(_BAG_ERRORS)
    features += some if bags else list(_ERRORS)
    feature = draw(st.sampled_from(features))
    mode = "sum"
    if bags and feature not in ("samples", "rounded ids"):
        mode = "mean" if feature == "weights of samples under mean" else draw(st.sampled_from(["sum", "mean", "max"]))

    narrow = [one for one in context.dtypes if one.itemsize == 2]
    if feature == "rounded ids" and narrow:
        dtype = draw(st.sampled_from(narrow))
    rows = draw(_sizes(ranks, dim == 0))
    columns = draw(_sizes(ranks, dim == 1, largest=max(5, ranks + 1)))
    if feature == "rounded ids" and narrow:
        rows = {torch.bfloat16: 258, torch.float16: 2050}[dtype] + draw(st.sampled_from([0, 3]))
        columns = 1 if cut == "rows" else ranks
    weight = filled(
        (rows, columns), dtype, draw(seeds()), Layout(requires_grad=feature != "rounded ids" and not draw(rarely(8)))
    )
    order = _order(draw, ranks)
    padding_idx = draw(padding_indices(rows, ranks)) if rows < 258 else None
    if feature == "out-of-range padding_idx":
        padding_idx = draw(st.sampled_from([rows, -rows - 1]))
    favoured = [padding_idx % rows] if padding_idx is not None and -rows <= padding_idx < rows else []
    favoured += [rows - 1] if rows >= 258 else []

    many = feature == "more bags than ids"
    flat = many or feature == "offsets of a wrong start" or draw(st.booleans())
    shape, starts = _bags(draw, ranks, flat, many) if bags else (_ids_shape(draw, ranks), None)
    ids = draw(index_tensors(rows, shape, ranks, favoured=favoured, out_of_range=feature == "out-of-range ids"))
    kwargs: dict[str, Any] = {}
    if starts is not None:
        if feature == "offsets of a wrong start":
            starts = [min(1, len(ids)), *starts[1:]]
        last = draw(rarely(3))
        kwargs["offsets"] = [*starts, len(ids)] if last else starts
        kwargs |= {"include_last_offset": True} if last else {}
    if padding_idx is not None:
        kwargs["padding_idx"] = padding_idx
    if feature in ("samples", "rounded ids", "weights of samples under mean"):
        layout = Layout(requires_grad=weight.requires_grad and draw(st.booleans()))
        kwargs["per_sample_weights"] = filled(tuple(ids.shape), dtype, draw(seeds()), layout)
    if feature in ("max_norm", "norm_type"):
        kwargs["max_norm"] = draw(st.sampled_from([1.0, 4.0, 8.0, 0.5]))
    if feature == "norm_type":
        kwargs["norm_type"] = draw(st.sampled_from([inf, 1.0, 3.0]))
    if bags and mode != "sum":
        kwargs["mode"] = mode

    tags = _tags(context, weight, ids, dim, order, kwargs)
    tags |= {mode} if bags else set()
    tags |= {feature} if feature in _BAG_ERRORS else set()
    exact = "max_norm" not in kwargs and not (bags and mode == "mean")
    # without gradients, four products of such numbers add up to no more than the dtype can count to
    exact = exact and not ("per_sample_weights" in kwargs and weight.element_size() < 4 and feature != "rounded ids")
    call = BAG if bags else EMBEDDING
    return OpCase(op, call, (weight, ids, dim, order), kwargs, "sharded_tensor", exact, frozenset(tags))


def _training(draw: st.DrawFn, context: DrawContext, op: str, dim: int, dtype: torch.dtype) -> OpCase:
    ranks = context.mesh.shape[-1]
    few = [size for size in (1, ranks, ranks + 1) if dim == 0 or has_sharded_tensor(size, ranks)]
    rows, columns = draw(_sizes(ranks, dim == 0)), draw(st.sampled_from(few))
    weight = filled((rows, columns), dtype, draw(seeds()))
    shape = (draw(st.integers(1, 3)), ranks * draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    padding_idx = draw(padding_indices(rows, ranks))
    ids = draw(index_tensors(rows, shape, ranks, favoured=[] if padding_idx is None else [padding_idx % rows]))
    kwargs: dict[str, Any] = {}
    mode = draw(st.sampled_from([None, None, "sum", "mean", "max"]))
    if mode is not None:
        kwargs["mode"] = mode
    if padding_idx is not None:
        kwargs["padding_idx"] = padding_idx
    norm = draw(st.sampled_from(["none"] * 4 + ["max_norm", "norm_type"]))
    if norm != "none":
        kwargs["max_norm"] = draw(st.sampled_from([4.0, 8.0]))
        if norm == "norm_type":
            kwargs["norm_type"] = draw(st.sampled_from([inf, 1.0, 3.0]))
    order = _order(draw, ranks)
    tags = _tags(context, weight, ids, dim, order, kwargs) | ({mode} if mode is not None else set())
    if shape[0] > 1:
        options = [name for name in ("norm_type", "padding_idx") if name in kwargs]
        tags |= {"several steps", *(f"several steps with {name}" for name in options)}
    exact = mode not in ("mean",) and not kwargs.get("max_norm") and weight.element_size() >= 8
    return OpCase(op, TRAINED, (weight, ids, dim, order), kwargs, "sharded_tensor", exact, frozenset(tags))


def has_sharded_tensor(size: int, ranks: int) -> bool:
    """Return whether torch makes a ShardedTensor of which a ChunkShardingSpec cuts a dim of ``size`` over ``ranks``.

    In the metadata each shard starts at its number times the size of the first, and one that starts beyond the end is
    refused, though it is empty.

    >>> [size for size in range(1, 10) if not has_sharded_tensor(size, 4)]
    [1, 2, 5]
    """
    return -(-size // ranks) * (ranks - 1) <= size


def _sizes(ranks: int, cut: bool, largest: int | None = None) -> SearchStrategy[int]:
    """Return a generator of sizes of a dim of the table, which is ``cut`` or not."""
    sizes = dim_sizes(ranks, smallest=1, largest=largest)
    return sizes.filter(lambda size: has_sharded_tensor(size, ranks)) if cut else sizes


def _order(draw: st.DrawFn, ranks: int) -> list[int]:
    """Return the ranks in the order of the shards that they have: ascending, or some permutation."""
    return draw(st.permutations(range(ranks))) if draw(rarely(3)) else list(range(ranks))


def _ids_shape(draw: st.DrawFn, ranks: int) -> tuple[int, ...]:
    """Return a shape of ids of which each rank gets as many."""
    return (ranks * draw(st.integers(1, 2)), *draw(st.sampled_from([(), (2,), (3,), (2, 2)])))


def _bags(draw: st.DrawFn, ranks: int, flat: bool, many: bool) -> tuple[tuple[int, ...], list[int] | None]:
    """Return the shape of ids, and where bags start if they are ``flat``; each rank gets as many bags and ids.

    There are more bags than ids if there are ``many``, and never else.
    """
    if not flat:
        return (ranks * draw(st.integers(1, 2)), draw(st.integers(1, 3))), None
    size = draw(st.integers(1, 4))
    bags = size + draw(st.integers(1, 2)) if many else draw(st.integers(1, min(3, size)))
    inner = [draw(st.lists(st.integers(0, size), min_size=bags - 1, max_size=bags - 1)) for _ in range(ranks)]
    return (ranks * size,), [rank * size + start for rank in range(ranks) for start in [0, *sorted(inner[rank])]]


def _plain(draw: st.DrawFn, context: DrawContext, op: str, dim: int) -> OpCase:
    """Return a call without any option but offsets, in which batches are of unequal sizes if the op says so."""
    ranks = context.mesh.shape[-1]
    kernel = op.split(".")[1]
    unequal = kernel == "unequal_batches"
    bags = draw(st.booleans()) if unequal else kernel == "embedding_bag"
    few = [size for size in (ranks, ranks + 1) if dim == 0 or has_sharded_tensor(size, ranks)]
    rows, columns = draw(_sizes(ranks, dim == 0)), draw(st.sampled_from(few))
    steps = [draw(st.integers(1, 2))] if kernel == "training" else []
    flat = unequal and bags and draw(st.booleans())
    inner: list[tuple[int, ...]] = [()] if flat else [(1,), (3,)] if bags else [(), (3,)]
    shape = (*steps, 2 * ranks - unequal, *draw(st.sampled_from(inner)))
    ids = draw(index_tensors(rows, shape, ranks, dtype=torch.int64))
    kwargs: dict[str, Any] = {"offsets": list(range(0, len(ids), 2))} if flat else {}  # a bag for each rank
    weight = filled((rows, columns), context.dtypes[0], draw(seeds()))
    order = list(range(ranks))
    tags = _tags(context, weight, ids, dim, order, kwargs) | ({"sum"} if bags else set())
    tags |= {"unequal batches"} if unequal else {"several steps"} if steps == [2] else set()
    tags |= {"unequal batches with offsets"} if flat else set()
    call = TRAINED if steps else BAG if bags else EMBEDDING
    exact = weight.element_size() >= 4
    return OpCase(op, call, (weight, ids, dim, order), kwargs, "sharded_tensor", exact, frozenset(tags))


def _hazards(weight: torch.Tensor, ids: torch.Tensor, kwargs: Mapping[str, Any]) -> set[str]:
    """Return those tags of a call that are told from its values, and are signs of defects."""
    rows, padding_idx, offsets = weight.shape[0], kwargs.get("padding_idx"), kwargs.get("offsets")
    padding = None if padding_idx is None or not -rows <= padding_idx < rows else padding_idx % rows
    bags: list[list[int]] = []
    if offsets is not None:
        edges = [*offsets, *([] if kwargs.get("include_last_offset") else [len(ids)])]
        bags = [ids[start:stop].tolist() for start, stop in pairwise(edges)]
    elif ids.ndim > 1:
        bags = ids.flatten(end_dim=-2).tolist()
    largest = {torch.bfloat16: 256, torch.float16: 2048}.get(weight.dtype, rows)
    found = {
        "all-padding bag": any(bag and set(bag) == {padding} for bag in bags),
        "empty bag": any(not bag for bag in bags),
        "more bags than ids": offsets is not None and len(bags) > len(ids),
        "ids that the dtype rounds": "per_sample_weights" in kwargs and bool((ids > largest).any()),
    }
    return {tag for tag, holds in found.items() if holds}


def _tags(
    context: DrawContext, weight: torch.Tensor, ids: torch.Tensor, dim: int, order: list[int], kwargs: dict[str, Any]
) -> set[str]:
    ranks = context.mesh.shape[-1]
    rows, padding_idx = weight.shape[0], kwargs.get("padding_idx")
    padding = None if padding_idx is None or not -rows <= padding_idx < rows else padding_idx % rows
    found = {
        f"ids of {('one', 'two', 'three')[ids.ndim - 1]} dim{'s' * (ids.ndim > 1)}": True,
        "include_last_offset": "include_last_offset" in kwargs,
        "int32 ids": ids.dtype == torch.int32,
        "max_norm": "max_norm" in kwargs,
        "negative padding_idx": padding_idx is not None and padding_idx < 0,
        "norm_type": "norm_type" in kwargs,
        "padding id looked up": padding is not None and bool((ids == padding).any()),
        "padding_idx": padding_idx is not None,
        "per_sample_weights": "per_sample_weights" in kwargs,
        "permuted shards": order != sorted(order),
    }
    tags = {tag for tag, holds in found.items() if holds} | set(shard_classes(weight.shape[dim], (ranks,)))
    return tags | _hazards(weight, ids, kwargs)
