"""Generators of lookups in legacy ShardedTensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from strategies.indices import index_tensors, padding_indices
from strategies.sharded_tensor.facts import hazards
from strategies.sharded_tensor.programs import BAG, EMBEDDING, TRAINED
from strategies.tensors import Layout, dim_sizes, filled, rarely, seeds, shard_classes
from verifier.core.case import OpCase
from verifier.planning.families import DrawContext

__all__ = ["INPUT_CLASSES", "OPS", "has_sharded_tensor", "sharded_tensor_cases"]

KERNELS = ("embedding", "embedding_bag", "training", "unequal_batches")
CUTS = ("rows", "columns")
OPS = tuple(f"sharded_tensor.{kernel}.{cut}" for kernel in KERNELS for cut in CUTS)
"""Each kernel for each dim of the table that the spec may shard.

Batches of unequal sizes are separate ops: they kill ranks, and then the op is not tried again on the same mesh. Calls
on several mesh dims have no options: the kernels confuse group ranks and global ranks, which would hide all else."""

INPUT_CLASSES = frozenset({
    "all-padding bag", "empty bag", "empty shard", "even shard", "ids of one dim", "ids of two dims",
    "ids of three dims", "ids that the dtype rounds", "include_last_offset", "int32 ids", "max", "max_norm", "mean",
    "more bags than ids", "negative padding_idx", "norm_type", "offsets of a wrong start",
    "out-of-range ids", "out-of-range padding_idx", "padding id looked up", "padding_idx", "per_sample_weights",
    "permuted shards", "several steps", "several steps with norm_type", "several steps with padding_idx", "sum",
    "unequal batches", "unequal batches with offsets", "uneven shard", "weights of samples under mean",
})  # fmt: skip
"""Every tag that a case of this family can have; shards are shards of the table."""

_LARGE = {torch.bfloat16: 258, torch.float16: 2050}
"""Numbers of rows whose last row number is not exact in the dtype."""


def sharded_tensor_cases(context: DrawContext) -> SearchStrategy[OpCase]:
    """Return a generator of lookups and pooled lookups for the ops in ``context``.

    Shrinks to ranks that each look up row 0 of a table of the first dtype, of ``[1, 1]`` if torch can shard that. Of
    the calls without gradients of norms, about one in ten is illegal.

    Raises
    ------
    ValueError
        If ``context`` names no op or no dtype.
    """
    context.check(set(OPS))
    return st.sampled_from(context.ops).flatmap(lambda op: _cases(_Setting.of(context, op))).map(_Call.case)


class _Setting(NamedTuple):
    """The op of a call, the ``dim`` of the table that is sharded, and the number of ranks."""

    context: DrawContext
    op: str
    kernel: str
    dim: int
    ranks: int

    @classmethod
    def of(cls, context: DrawContext, op: str) -> _Setting:
        _, kernel, cut = op.split(".")
        return cls(context, op, kernel, CUTS.index(cut), context.mesh.shape[-1])

    @property
    def bags(self) -> bool:
        return self.kernel == "embedding_bag"


@dataclass
class _Call:
    """A call that features change; tags that follow from its values are added at the end."""

    setting: _Setting
    call: str
    weight: torch.Tensor
    ids: torch.Tensor
    order: list[int]
    kwargs: dict[str, Any] = field(default_factory=dict)
    tags: set[str] = field(default_factory=set)
    exact: bool = True

    def case(self) -> OpCase:
        args = (self.weight, self.ids, self.setting.dim, self.order)
        tags = frozenset(self.tags | _tags(self))
        return OpCase(self.setting.op, self.call, args, self.kwargs, "sharded_tensor", self.exact, tags)


def _cases(setting: _Setting) -> SearchStrategy[_Call]:
    """Return a generator of calls of an op, each with at most one feature; plain calls come first."""
    if setting.kernel == "unequal_batches" or setting.context.mesh.ndim > 1:
        return _calls_without_options(setting)
    if setting.kernel == "training":
        return _training_steps(setting)
    weights = {_plain_calls: 6, _calls_with_max_norm: 3, _calls_with_norm_type: 2}
    if setting.bags:
        weights |= {_bags_with_sample_weights: 4, _bags_of_rounded_ids: 2, _more_bags_than_ids: 2}
        weights |= {_bags_with_wrong_offsets: 2, _means_with_sample_weights: 2}
    weights |= dict.fromkeys((_calls_with_wrong_ids, _calls_with_wrong_padding_idx), 2 if setting.bags else 1)
    features = [feature for feature, weight in weights.items() for _ in range(weight)]
    return st.sampled_from(features).flatmap(lambda feature: feature(setting))


# ------------------------------------------------------------------------------------------------------------- features
@st.composite
def _plain_calls(
    draw: st.DrawFn,
    setting: _Setting,
    modes: tuple[str, ...] = ("sum", "mean", "max"),
    tables: SearchStrategy[torch.Tensor] | None = None,
    flat: bool = False,
    many: bool = False,
    out_of_range: bool = False,
) -> _Call:
    """Draw a call with no other options than padding and, for bags, a mode and offsets.

    Bags have one of ``modes``, and offsets if ``flat``; see :func:`_bags` for ``many``.
    """
    mode = draw(st.sampled_from(modes)) if setting.bags else ""
    weight = draw(tables if tables is not None else _tables(setting))
    order = _order(draw, setting.ranks)
    rows = weight.shape[0]
    large = rows >= min(_LARGE.values())
    padding_idx = None if large else draw(padding_indices(rows, setting.ranks))
    favoured = [rows - 1] if large else [] if padding_idx is None else [padding_idx % rows]
    if setting.bags:
        shape, starts = _bags(draw, setting.ranks, flat or many or draw(st.booleans()), many)
    else:
        shape, starts = _ids_shape(draw, setting.ranks), None
    ids = draw(index_tensors(rows, shape, setting.ranks, favoured=favoured, out_of_range=out_of_range))
    made = _Call(setting, BAG if setting.bags else EMBEDDING, weight, ids, order, exact=mode != "mean")
    if starts is not None:
        last = draw(rarely(3))
        made.kwargs["offsets"] = [*starts, len(ids)] if last else starts
        made.kwargs |= {"include_last_offset": True} if last else {}
    if padding_idx is not None:
        made.kwargs["padding_idx"] = padding_idx
    if setting.bags:
        made.tags.add(mode)
        made.kwargs |= {"mode": mode} if mode != "sum" else {}
    return made


@st.composite
def _calls_with_max_norm(draw: st.DrawFn, setting: _Setting) -> _Call:
    made = draw(_plain_calls(setting))
    made.kwargs["max_norm"] = draw(st.sampled_from([1.0, 4.0, 8.0, 0.5]))
    made.exact = False
    return made


@st.composite
def _calls_with_norm_type(draw: st.DrawFn, setting: _Setting) -> _Call:
    made = draw(_calls_with_max_norm(setting))
    made.kwargs["norm_type"] = draw(st.sampled_from([inf, 1.0, 3.0]))
    return made


@st.composite
def _calls_with_wrong_ids(draw: st.DrawFn, setting: _Setting) -> _Call:
    made = draw(_plain_calls(setting, out_of_range=True))
    made.tags.add("out-of-range ids")
    return made


@st.composite
def _calls_with_wrong_padding_idx(draw: st.DrawFn, setting: _Setting) -> _Call:
    made = draw(_plain_calls(setting))
    rows = made.weight.shape[0]
    made.kwargs["padding_idx"] = draw(st.sampled_from([rows, -rows - 1]))
    made.tags.add("out-of-range padding_idx")
    return made


def _weigh_samples(draw: st.DrawFn, made: _Call) -> None:
    layout = Layout(requires_grad=made.weight.requires_grad and draw(st.booleans()))
    made.kwargs["per_sample_weights"] = filled(tuple(made.ids.shape), made.weight.dtype, draw(seeds()), layout)


@st.composite
def _bags_with_sample_weights(draw: st.DrawFn, setting: _Setting) -> _Call:
    made = draw(_plain_calls(setting, modes=("sum",)))
    _weigh_samples(draw, made)
    made.exact = made.weight.element_size() >= 4
    return made


@st.composite
def _means_with_sample_weights(draw: st.DrawFn, setting: _Setting) -> _Call:
    """Draw bags that torch refuses: sample weights need mode sum."""
    made = draw(_plain_calls(setting, modes=("mean",)))
    _weigh_samples(draw, made)
    made.tags.add("weights of samples under mean")
    return made


@st.composite
def _bags_of_rounded_ids(draw: st.DrawFn, setting: _Setting) -> _Call:
    """Draw weighted bags of ids that are not exact in the table's dtype, if there is such a dtype.

    There are no gradients. The sum of four products is exact in the dtype.
    """
    narrow = [dtype for dtype in setting.context.dtypes if dtype in _LARGE]
    if not narrow:
        return draw(_bags_with_sample_weights(setting))
    made = draw(_plain_calls(setting, modes=("sum",), tables=_large_tables(setting, narrow)))
    _weigh_samples(draw, made)
    return made


@st.composite
def _bags_with_wrong_offsets(draw: st.DrawFn, setting: _Setting) -> _Call:
    made = draw(_plain_calls(setting, flat=True))
    made.kwargs["offsets"] = [min(1, len(made.ids)), *made.kwargs["offsets"][1:]]
    made.tags.add("offsets of a wrong start")
    return made


def _more_bags_than_ids(setting: _Setting) -> SearchStrategy[_Call]:
    return _plain_calls(setting, many=True)


@st.composite
def _training_steps(draw: st.DrawFn, setting: _Setting) -> _Call:
    ranks, dim = setting.ranks, setting.dim
    dtype = draw(st.sampled_from(setting.context.dtypes))
    few = [size for size in (1, ranks, ranks + 1) if dim == 0 or has_sharded_tensor(size, ranks)]
    rows, columns = draw(_sizes(ranks, dim == 0)), draw(st.sampled_from(few))
    weight = filled((rows, columns), dtype, draw(seeds()))
    shape = (draw(st.integers(1, 3)), ranks * draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    padding_idx = draw(padding_indices(rows, ranks))
    ids = draw(index_tensors(rows, shape, ranks, favoured=[] if padding_idx is None else [padding_idx % rows]))
    mode = draw(st.sampled_from([None, None, "sum", "mean", "max"]))
    norm = draw(st.sampled_from(["none"] * 4 + ["max_norm", "norm_type"]))
    made = _Call(setting, TRAINED, weight, ids, _order(draw, ranks), tags={mode} if mode is not None else set())
    made.exact = mode != "mean" and norm == "none" and weight.element_size() >= 8
    made.kwargs |= {"mode": mode} if mode is not None else {}
    made.kwargs |= {"padding_idx": padding_idx} if padding_idx is not None else {}
    made.kwargs |= {"max_norm": draw(st.sampled_from([4.0, 8.0]))} if norm != "none" else {}
    made.kwargs |= {"norm_type": draw(st.sampled_from([inf, 1.0, 3.0]))} if norm == "norm_type" else {}
    if shape[0] > 1:
        options = [name for name in ("norm_type", "padding_idx") if name in made.kwargs]
        made.tags |= {"several steps", *(f"several steps with {name}" for name in options)}
    return made


@st.composite
def _calls_without_options(draw: st.DrawFn, setting: _Setting) -> _Call:
    """Draw a call with no option but offsets; batches have unequal sizes if the op requires that."""
    ranks, dim = setting.ranks, setting.dim
    unequal = setting.kernel == "unequal_batches"
    bags = draw(st.booleans()) if unequal else setting.bags
    few = [size for size in (ranks, ranks + 1) if dim == 0 or has_sharded_tensor(size, ranks)]
    rows, columns = draw(_sizes(ranks, dim == 0)), draw(st.sampled_from(few))
    steps = [draw(st.integers(1, 2))] if setting.kernel == "training" else []
    flat = unequal and bags and draw(st.booleans())
    inner: list[tuple[int, ...]] = [()] if flat else [(1,), (3,)] if bags else [(), (3,)]
    shape = (*steps, 2 * ranks - unequal, *draw(st.sampled_from(inner)))
    ids = draw(index_tensors(rows, shape, ranks, dtype=torch.int64))
    weight = filled((rows, columns), setting.context.dtypes[0], draw(seeds()))
    made = _Call(setting, TRAINED if steps else BAG if bags else EMBEDDING, weight, ids, list(range(ranks)))
    made.kwargs |= {"offsets": list(range(0, len(ids), 2))} if flat else {}  # a bag for each rank
    made.tags |= {"sum"} if bags else set()
    made.tags |= {"unequal batches"} if unequal else {"several steps"} if steps == [2] else set()
    made.tags |= {"unequal batches with offsets"} if flat else set()
    made.exact = weight.element_size() >= 4
    return made


# --------------------------------------------------------------------------------------------------------------- tables
@st.composite
def _tables(draw: st.DrawFn, setting: _Setting) -> torch.Tensor:
    ranks = setting.ranks
    rows = draw(_sizes(ranks, setting.dim == 0))
    columns = draw(_sizes(ranks, setting.dim == 1, largest=max(5, ranks + 1)))
    dtype = draw(st.sampled_from(setting.context.dtypes))
    return filled((rows, columns), dtype, draw(seeds()), Layout(requires_grad=not draw(rarely(8))))


@st.composite
def _large_tables(draw: st.DrawFn, setting: _Setting, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """Draw a table whose number of rows is not exact in its dtype."""
    dtype = draw(st.sampled_from(dtypes))
    rows = _LARGE[dtype] + draw(st.sampled_from([0, 3]))
    return filled((rows, 1 if setting.dim == 0 else setting.ranks), dtype, draw(seeds()), Layout())


def has_sharded_tensor(size: int, ranks: int) -> bool:
    """Return whether torch makes a ShardedTensor if a ChunkShardingSpec shards a dim of ``size`` over ``ranks``.

    In the metadata a shard starts at its number times the size of the first shard. Torch refuses shards that start
    beyond the end, although they are empty.

    >>> [size for size in range(1, 10) if not has_sharded_tensor(size, 4)]
    [1, 2, 5]
    """
    return -(-size // ranks) * (ranks - 1) <= size


def _sizes(ranks: int, cut: bool, largest: int | None = None) -> SearchStrategy[int]:
    """Return a generator of sizes of a dim of the table, which is sharded if ``cut``."""
    sizes = dim_sizes(ranks, smallest=1, largest=largest)
    return sizes.filter(lambda size: has_sharded_tensor(size, ranks)) if cut else sizes


def _order(draw: st.DrawFn, ranks: int) -> list[int]:
    """Return the ranks in the order of their shards: ascending or permuted."""
    return draw(st.permutations(range(ranks))) if draw(rarely(3)) else list(range(ranks))


def _ids_shape(draw: st.DrawFn, ranks: int) -> tuple[int, ...]:
    """Return a shape of ids that shards evenly over the ranks."""
    return (ranks * draw(st.integers(1, 2)), *draw(st.sampled_from([(), (2,), (3,), (2, 2)])))


def _bags(draw: st.DrawFn, ranks: int, flat: bool, many: bool) -> tuple[tuple[int, ...], list[int] | None]:
    """Return the shape of ids, and where bags start if ``flat``; bags and ids shard evenly over the ranks.

    There are more bags than ids if and only if ``many``.
    """
    if not flat:
        return (ranks * draw(st.integers(1, 2)), draw(st.integers(1, 3))), None
    size = draw(st.integers(1, 4))
    bags = size + draw(st.integers(1, 2)) if many else draw(st.integers(1, min(3, size)))
    inner = [draw(st.lists(st.integers(0, size), min_size=bags - 1, max_size=bags - 1)) for _ in range(ranks)]
    return (ranks * size,), [rank * size + start for rank in range(ranks) for start in [0, *sorted(inner[rank])]]


def _tags(made: _Call) -> set[str]:
    weight, ids, kwargs = made.weight, made.ids, made.kwargs
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
        "permuted shards": made.order != sorted(made.order),
    }
    tags = {tag for tag, holds in found.items() if holds} | set(
        shard_classes(weight.shape[made.setting.dim], (made.setting.ranks,))
    )
    return tags | hazards(weight, ids, kwargs)
