"""Generators of redistributions, and of sequences of ops and redistributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, permutations
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.redistribution.programs import CHAIN, SEQUENCE, VIEWS, WRITES, operands, sequence, spelled
from strategies.tensors import Layout, dim_sizes, filled, layouts, rarely, seeds, shard_classes
from verifier.core.case import MeshSpec, OpCase
from verifier.execution.patches import BETWEEN_OPS
from verifier.placements.algebra import in_order, is_shard_order, sharded_dim
from verifier.placements.partials import bitwise_reductions, partial_reductions
from verifier.planning.families import DrawContext
from verifier.torch_internals.placements import strided_shard, strides_of
from verifier.torch_internals.redistributing.probes import ASKED, PROGRAM

__all__ = [
    "INPUT_CLASSES",
    "PLANNERS_OP",
    "REDISTRIBUTE",
    "SEQUENCE_OP",
    "next_steps",
    "one_of",
    "redistribution_cases",
    "sequence_case",
    "target_placements",
]

REDISTRIBUTE, SEQUENCE_OP = BETWEEN_OPS
PLANNERS_OP = "dtensor.planners"

_MESH_DIMS = 3
"""Targets are drawn for three mesh dims and then shortened, so that the same choices fit a smaller mesh."""
_ORDERS = tuple(permutations(range(_MESH_DIMS)))
_SPLIT_FACTORS = (2, 3, 4)
"""Split factors of strided shards that are no shard order. DTensor takes any; views leave sizes of preceding dims."""
_LONGEST = 5
_LARGEST_CAT = 32
_GROWING = ("mul", "mul_", "mm", "square")
"""Steps that multiply values. After two of them small integers are still exact in float64."""
STEP_NAMES = (
    *["redistribute"] * 7,
    *("clone", "neg", "sum", "add", "mm", "mul", "square", "cat"),
    *VIEWS,
    *[name for name in reversed(WRITES) for _ in range(4)],
)
"""Steps; more frequent ones occur more often."""
_NUMBERS = {"add_": 3.0, "mul_": -2.0, "add_to_slice": 5.0}
"""Numbers for steps that take a number instead of a value."""
_EXTRA_DTYPES = (torch.int64, torch.bool, torch.complex128)

INPUT_CLASSES = frozenset(
    {
        "0-d tensor",
        "Partial target",
        "bool",
        "cat",
        "complex",
        "empty shard",
        "empty tensor",
        "even shard",
        "in-place",
        "integer",
        "negative dim",
        "nested cut",
        "no grad",
        "no redistribution needed",
        "non-contiguous",
        "parameter",
        "planner",
        "redistributions in a row",
        "ops in a row",
        "result used twice",
        "size-1 dim",
        "slice",
        "square",
        "shard order",
        "strided shard",
        "two results",
        "uneven shard",
        "view",
        "write to a slice",
    }
)
"""Every tag that a case of this family can have.

"nested cut", "shard order" and "strided shard" are about targets; "shard order" means another order than the default.
"""


def redistribution_cases(context: DrawContext) -> SearchStrategy[OpCase]:
    """Return a generator of cases of the ops in ``context``.

    ``dtensor.redistribute`` is one to three redistributions in a row. ``dtensor.sequence`` is one to five steps, each
    an op or a redistribution. ``dtensor.planners`` asks torch's planner for a property, now and then. Shrinks to one
    redistribution of a one-element vector to Replicate.

    Raises
    ------
    ValueError
        If ``context`` names no op or no dtype.
    """
    context.check({REDISTRIBUTE, SEQUENCE_OP, PLANNERS_OP})
    weights = {REDISTRIBUTE: 9, SEQUENCE_OP: 6, PLANNERS_OP: 1}
    kinds = [op for op, weight in weights.items() if op in context.ops for _ in range(weight)]
    generators = {
        REDISTRIBUTE: _chains(context), SEQUENCE_OP: _sequences(context), PLANNERS_OP: _questions(context)
    }  # fmt: skip
    return st.sampled_from(kinds).flatmap(generators.__getitem__)


# -------------------------------------------------------------------------------------------------------------- chains
@st.composite
def _chains(draw: st.DrawFn, context: DrawContext) -> OpCase:
    """Draw a tensor and the targets to which it is redistributed in turn."""
    extra = _EXTRA_DTYPES if context.mesh.device == "cpu" else _EXTRA_DTYPES[:1]
    dtype = draw(st.sampled_from([*context.dtypes * 4, *extra * len(context.dtypes)]))
    ndim = draw(st.sampled_from([1, 1, 2, 2, 2, 2, 3, 3, 0]))
    shape = tuple(draw(dim_sizes(context.mesh.world_size, largest=None if dim < 2 else 5)) for dim in range(ndim))
    trainable = dtype.is_floating_point or dtype.is_complex
    layout = draw(layouts(trainable=trainable))
    seed = draw(seeds())
    reduction = draw(st.sampled_from((*partial_reductions(dtype), *bitwise_reductions(dtype))))
    count = draw(st.sampled_from([1, 1, 1, 2, 2, 3]))
    odd = draw(rarely(4)) and ndim > 0 and dtype in context.dtypes[:2]
    # rarely Partial, which DTensor refuses from most sources, or a negative dim, which it normalises before it plans
    letters = [*_letters(ndim) * 5, *([Shard(-1)] * (ndim > 0)), Partial(reduction)]
    targets = [draw(target_placements(context.mesh, ndim, letters, odd)) for _ in range(count)]
    tensor = _values(shape, dtype, seed, layout)
    tags = _tensor_tags(tensor, context) | _target_tags(targets, context.mesh)
    return OpCase(REDISTRIBUTE, CHAIN, (tensor, targets), {}, "redistribution", True, frozenset(tags))


def _letters(ndim: int) -> list[Placement]:
    """Return the placements without Partial of one mesh dim, for a tensor of ``ndim`` dims."""
    return [Replicate(), *(Shard(dim) for dim in range(ndim))]


@st.composite
def target_placements(
    draw: st.DrawFn, mesh: MeshSpec, ndim: int, letters: Sequence[Placement], odd: bool = False
) -> list[Placement]:
    """Draw the placements of a tensor of ``ndim`` dims out of ``letters``, with any shard order.

    If ``odd``, a mesh dim has a strided shard that need not belong to a shard order.
    """
    placements = tuple([draw(st.sampled_from(letters)) for _ in range(_MESH_DIMS)][: mesh.ndim])
    if draw(rarely(2)):
        order = [mesh_dim for mesh_dim in draw(st.sampled_from(_ORDERS)) if mesh_dim < mesh.ndim]
        placements = in_order(spelled(placements, ndim), mesh.shape, order)
    if not odd:
        return list(placements)
    mesh_dim = draw(st.integers(0, _MESH_DIMS - 1)) % mesh.ndim
    strided = strided_shard(draw(st.integers(0, ndim - 1)), draw(st.sampled_from(_SPLIT_FACTORS)))
    return [*placements[:mesh_dim], strided, *placements[mesh_dim + 1 :]]


def _values(shape: Sequence[int], dtype: torch.dtype, seed: int, layout: Layout) -> torch.Tensor:
    """Return a tensor whose elements differ from their neighbours, also for dtypes without signed integers."""
    if dtype == torch.bool:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(tuple(shape), generator=generator) < 0.5
    if not dtype.is_complex:
        return filled(shape, dtype, seed, layout)
    real = filled(shape, dtype, seed, Layout(contiguous=layout.contiguous))
    tensor = real + 1j * filled(shape, dtype, seed + 1, Layout(contiguous=layout.contiguous))
    return tensor.requires_grad_(layout.requires_grad)


# ------------------------------------------------------------------------------------------------------------ planners
@st.composite
def _questions(draw: st.DrawFn, context: DrawContext) -> OpCase:
    """Draw a tensor and a property for which torch's planner is asked."""
    shape = tuple(draw(st.integers(1, 4)) * context.mesh.world_size for _ in range(draw(st.sampled_from([2, 1, 3]))))
    tensor = filled(shape, draw(st.sampled_from(context.dtypes)), draw(seeds()), Layout())
    arguments = {"asked": draw(st.sampled_from(ASKED))}
    return OpCase(PLANNERS_OP, PROGRAM, (tensor,), arguments, "redistribution", True, frozenset({"planner"}))


# ----------------------------------------------------------------------------------------------------------- sequences
@st.composite
def _sequences(draw: st.DrawFn, context: DrawContext) -> OpCase:
    """Draw two matrices and a list of steps, each of which fits the values of the steps before."""
    wide = [dtype for dtype in context.dtypes if dtype in (torch.float64, torch.float32)] or [torch.float64]
    dtype = draw(st.sampled_from(wide))
    sizes = dim_sizes(context.mesh.world_size, smallest=1)
    rows, columns = draw(sizes), draw(sizes)
    second_shape = draw(st.sampled_from([(rows, columns), (columns, rows), (columns, columns), (1, columns)]))
    seed = draw(seeds())
    first = filled((rows, columns), dtype, seed, draw(layouts(trainable=True)))
    second = filled(second_shape, dtype, seed + 1, draw(layouts(trainable=True)))
    # DTensor refuses a Partial target unless the value is Partial already, so only some sequences have one
    partial = [Partial(draw(st.sampled_from(partial_reductions(dtype))))] if draw(rarely(2)) else []
    steps: list[list[Any]] = []
    values = [first.detach(), second.detach()]
    for _ in range(draw(st.integers(1, _LONGEST))):
        step = draw(one_of(next_steps(values, steps)))
        if step[0] == "redistribute":
            ndim = values[step[1]].ndim
            step = [*step, draw(target_placements(context.mesh, ndim, [*_letters(ndim), *partial]))]
        steps.append(step)
        values.append(sequence(values[0], values[1], steps)[-1])
    return sequence_case(first, second, steps, context)


def one_of(steps: Sequence[list[Any]]) -> SearchStrategy[list[Any]]:
    """Return a generator of one of ``steps``: first its name, then a step of that name.

    Redistributions and writes are more frequent. Shrinks to a redistribution of the last value.
    """
    by_name: dict[str, list[list[Any]]] = {}
    for step in steps:
        by_name.setdefault(step[0], []).append(step)
    # a filter instead of a new list, so that a choice means the same name after Hypothesis removes earlier steps
    names = st.sampled_from(STEP_NAMES).filter(by_name.__contains__)
    return names.flatmap(lambda name: st.sampled_from(by_name[name]))


def next_steps(values: Sequence[torch.Tensor], steps: Sequence[list[Any]]) -> list[list[Any]]:
    """Return the steps that fit ``values``, the values of a sequence so far; redistributions lack their target.

    Values stay exact in float64. No step writes to a value that may share memory with an argument, because the
    arguments are leaves that require a gradient, and autograd refuses in-place writes to leaves. A clone can be
    written to.
    """
    usable, writable = _memory(steps)
    # the last value comes first, so that Hypothesis shrinks to a chain
    order = [position for position in reversed(range(len(values))) if position in usable]
    may_grow = sum(name in _GROWING for name, *_ in steps) < 2
    found: list[list[Any]] = [["redistribute", position] for position in order]
    for position in order:
        value = values[position]
        found += [["neg", position], ["clone", position], *(["sum", position, dim] for dim in range(value.ndim))]
        found += [["square", position]] * may_grow
        found += _views(position, value)
        for other in order:
            found += _of_two(position, value, other, values[other], may_grow)
    for position in (position for position in order if position in writable):
        value = values[position]
        parts = [(dim, start, size - 1) for dim, size in enumerate(value.shape) if size > 1 for start in (0, 1)]
        found += [["add_", position, _NUMBERS["add_"]], *([["mul_", position, _NUMBERS["mul_"]]] * may_grow)]
        found += [["add_to_slice", position, _NUMBERS["add_to_slice"], *part] for part in parts]
        for other in (other for other in order if not _share(position, other, steps)):
            if _fits(values[other].shape, value.shape):
                found += [["add_", position, other], *([["mul_", position, other]] * may_grow)]
            for dim, start, length in parts:
                if _fits(values[other].shape, value.narrow(dim, start, length).shape):
                    found.append(["add_to_slice", position, other, dim, start, length])
    return found


def _views(position: int, value: torch.Tensor) -> list[list[Any]]:
    """Return the steps that make a view of ``value``."""
    found: list[list[Any]] = []
    for dim, size in enumerate(value.shape):
        found += [["narrow", position, dim, start, size - 1] for start in (0, 1) if size > 1]
        found += [["select", position, dim, index] for index in sorted({0, size - 1}) if size and value.ndim > 1]
    if value.ndim == 2:
        found += [["transpose", position, 0, 1], ["t", position], ["flatten", position]]
        shape = [value.shape[1], value.shape[0]]
        found += [["reshape", position, shape], *([["view", position, shape]] * value.is_contiguous())]
    if value.ndim == 1:
        found += [["unsqueeze", position, 0], ["reshape", position, [-1, 1]]]
        found += [["reshape", position, [2, -1]]] * (value.numel() > 0 and value.numel() % 2 == 0)
    return found


def _of_two(position: int, value: torch.Tensor, other: int, beside: torch.Tensor, may_grow: bool) -> list[list[Any]]:
    """Return the steps that compute a new value from two."""
    found: list[list[Any]] = [["add", position, other]] * _broadcasts(value, beside)
    found += [["mul", position, other]] * (may_grow and _broadcasts(value, beside))
    both = value.ndim == beside.ndim == 2
    found += [["mm", position, other]] * (may_grow and both and value.shape[1] == beside.shape[0])
    for dim in range(value.ndim if value.ndim == beside.ndim else 0):
        same = [a == b for d, (a, b) in enumerate(zip(value.shape, beside.shape, strict=True)) if d != dim]
        small = value.shape[dim] + beside.shape[dim] <= _LARGEST_CAT
        found += [["cat", position, other, dim]] * (small and all(same))
    return found


def _memory(steps: Sequence[list[Any]]) -> tuple[set[int], set[int]]:
    """Return the values that later steps may use, and the values among them that later steps may write to.

    The result of a redistribution or a reshape may or may not share memory with its source. So a step writes to a value
    only if later steps do not use the values that may share its memory. No step writes to a value that an earlier step
    has saved for its backward pass.
    """
    owner, used, kept, stale = _owners(steps), set[int](), set[int](), set[int]()
    for number, step in enumerate(steps, 2):
        used.update(operands(step))
        if step[0] in ("mul", "mm", "square"):
            kept.update(owner[position] for position in operands(step))
        elif step[0] == "mul_":  # autograd saves a clone of the value that mul_ writes to
            kept.update(owner[position] for position in operands(step)[1:])
        if step[0] in WRITES:
            stale.update(position for position in range(number) if owner[position] == owner[number])
    usable = set(range(len(owner))) - stale
    shared = {position: [p for p in range(len(owner)) if owner[p] == owner[position]] for position in usable}
    return usable, {
        position
        for position in usable
        if owner[position] > 1
        and owner[position] not in kept
        and all(other in used for other in shared[position] if other != position)
    }


def _owners(steps: Sequence[list[Any]]) -> list[int]:
    """Return, for each value, the first value that may share its memory."""
    owner = [0, 1]
    for number, (name, position, *_) in enumerate(steps, 2):
        owner.append(owner[position] if name in ("redistribute", *VIEWS, *WRITES) else number)
    return owner


def _share(left: int, right: int, steps: Sequence[list[Any]]) -> bool:
    owner = _owners(steps)
    return owner[left] == owner[right]


def _fits(shape: Sequence[int], into: Sequence[int]) -> bool:
    """Return whether a value of ``shape`` can be added to one of shape ``into`` in place."""
    pairs = zip(reversed(shape), reversed(into), strict=False)
    return len(shape) <= len(into) and all(a in (1, b) for a, b in pairs)


def _broadcasts(left: torch.Tensor, right: torch.Tensor) -> bool:
    pairs = zip(reversed(left.shape), reversed(right.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def sequence_case(
    first: torch.Tensor, second: torch.Tensor, steps: list[list[Any]], context: DrawContext, call: str = SEQUENCE
) -> OpCase:
    """Return the case of a sequence of steps; see :func:`strategies.redistribution.programs.sequence`."""
    uses = Counter(position for step in steps for position in operands(step))
    names = {name for name, *_ in steps}
    redistributed = [step[2] for step in steps if step[0] == "redistribute"]
    left = set(range(2, 2 + len(steps))) - set(uses)
    found = {
        "ops in a row": len(steps) > 1,
        "result used twice": any(count > 1 for position, count in uses.items() if position > 1),
        "two results": len(left) > 1,
        "cat": "cat" in names,
        "in-place": bool(names & {"add_", "mul_"}),
        "slice": bool(names & {"narrow", "select"}),
        "view": bool(names & set(VIEWS)),
        "write to a slice": "add_to_slice" in names,
    }
    tags = (
        _tensor_tags(first, context)
        | _target_tags(redistributed, context.mesh)
        | {tag for tag, holds in found.items() if holds}
    )
    exact = first.dtype == torch.float64
    args = (first, second, steps)
    return OpCase(SEQUENCE_OP, call, args, {}, "redistribution", exact, frozenset(tags))


# ---------------------------------------------------------------------------------------------------------------- tags
def _tensor_tags(tensor: torch.Tensor, context: DrawContext) -> set[str]:
    tags = {kind for size in tensor.shape for kind in shard_classes(size, context.mesh.shape)}
    found = {
        "0-d tensor": tensor.ndim == 0,
        "bool": tensor.dtype == torch.bool,
        "complex": tensor.dtype.is_complex,
        "empty tensor": not prod(tensor.shape),
        "integer": not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype != torch.bool,
        "no grad": not tensor.requires_grad,
        "non-contiguous": not tensor.is_contiguous(),
        "parameter": isinstance(tensor, torch.nn.Parameter),
        "size-1 dim": 1 in tensor.shape,
        "square": tensor.ndim > 1 and len(set(tensor.shape)) == 1 and tensor.numel() > 1,
    }
    return tags | {tag for tag, holds in found.items() if holds}


def _target_tags(targets: Sequence[Sequence[Placement]], mesh: MeshSpec) -> set[str]:
    flat = [placement for target in targets for placement in target]
    cuts = [[d for d in map(sharded_dim, target) if d is not None] for target in targets]
    strided = [(any(map(strides_of, target)), is_shard_order(tuple(target), mesh.shape)) for target in targets]
    found = {
        "Partial target": any(placement.is_partial() for placement in flat),
        "negative dim": any(isinstance(p, Shard) and p.dim < 0 for p in flat),
        "nested cut": any(len(set(cut)) < len(cut) for cut in cuts),
        "no redistribution needed": any(left == right for left, right in pairwise(targets)),
        "redistributions in a row": len(targets) > 1,
        "shard order": any(strides and order for strides, order in strided),
        "strided shard": any(strides and not order for strides, order in strided),
    }
    return {tag for tag, holds in found.items() if holds}
