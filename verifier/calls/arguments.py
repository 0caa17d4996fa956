"""A call as a user writes it, made into a case and combinations: ops by object or path, placements by text or name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed.tensor.placement_types import Placement

from verifier.core.arguments import tensor_arguments, unsupported_reason
from verifier.core.case import MeshSpec, OpCase
from verifier.core.ops import argument_names, resolve
from verifier.core.placement_text import format_placements
from verifier.core.wording import did_you_mean, plural
from verifier.oracle.reference import Reference
from verifier.placements.alphabet import Alphabet
from verifier.placements.parsing import parse_placement, parse_placements
from verifier.torch_internals.names import pytree
from verifier.torch_internals.ops import selected_overload
from verifier.torch_internals.placements import Combination, Placements

__all__ = ["CombinationLike", "PlacementsLike", "cotangent_passes", "make_case", "make_combination"]

PlacementsLike = str | Placement | Sequence[str | Placement]
"""Placements of one tensor: ``"S(0)"``, ``Shard(0)``, or one of these per mesh dim; ``"(S(0), R)"`` as well."""

CombinationLike = Sequence[PlacementsLike] | Mapping[str, PlacementsLike]
"""One entry per tensor argument, in order or by name; by name, what is not named is replicated."""


# ------------------------------------------------------------------------------------------------------------ the call
def make_case(
    op: OpCase | Callable[..., object] | str, args: tuple[object, ...], kwargs: dict[str, object], exact: bool
) -> OpCase:
    """Return the case of a call as a user writes it.

    Of an operator by its name alone, and of a function that was made a custom op, it is the overload that the arguments
    select.

    Raises
    ------
    ValueError
        If the ranks cannot import the op, or there is no tensor, or one that cannot be sharded.

    >>> make_case(torch.ops.aten.mm.default, (torch.eye(2), torch.eye(2)), {}, exact=True).op
    'aten.mm.default'
    >>> make_case(torch.ops.aten.sum, (torch.eye(2),), {"dim": [0]}, exact=True).op
    'aten.sum.dim_IntList'
    """
    if not isinstance(op, OpCase):
        call = _dotted_path(op, args, kwargs)
        case = OpCase(call.removeprefix("torch.ops."), call, args, kwargs, exact=exact)
    elif args or kwargs:
        raise ValueError("an OpCase has its own arguments; give none beside it")
    else:
        case = op
    _check_tensors(case)
    return case


_NAMESPACES = ("torch", "torch.nn.functional", "torch.linalg", "torch.special", "torch.fft", "torch.Tensor")


def _dotted_path(op: Callable[..., object] | str, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    """Return a path under which every rank finds what ``op`` runs with these arguments."""
    path = ""
    if isinstance(op, str):
        path = f"torch.ops.{op}" if op.startswith("aten.") else op
        op = resolve(path)
    overload = selected_overload(op, args, kwargs)
    if overload is not None or path:
        return path if overload is None else f"torch.ops.{overload}"
    paths = [f"torch.ops.{op}"]
    if module := getattr(op, "__module__", None):  # methods that are written in C have none
        paths.append(f"{module}.{getattr(op, '__qualname__', '')}")
    paths += [f"{namespace}.{getattr(op, '__name__', '')}" for namespace in _NAMESPACES]
    for path in paths:
        try:
            found = resolve(path)
        except ValueError:
            continue
        if found is op:
            return path
    raise ValueError(f"the ranks cannot import {op!r}; define it at the top level of a module, or give its dotted path")


def _check_tensors(case: OpCase) -> None:
    tensors = [leaf for leaf in pytree.tree_leaves((case.args, dict(case.kwargs))) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise ValueError(f"{case.op} is called without a tensor; there is nothing to shard")
    for name, tensor in zip(argument_names(case), tensors, strict=True):
        if reason := unsupported_reason(tensor):
            raise ValueError(f"{name} cannot be sharded: {reason}")


# ------------------------------------------------------------------------------------------------------ the placements
def _placements(like: PlacementsLike, mesh: MeshSpec, ndim: int, dtype: torch.dtype, name: str) -> Placements:
    """Return placements as the user gave them, if a tensor of ``ndim`` dims can be placed so."""
    if isinstance(like, str):
        placements = parse_placements(like)
    elif isinstance(like, Placement):
        placements = (like,)
    else:
        placements = tuple(parse_placement(one) if isinstance(one, str) else one for one in like)
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{name}: {plural(len(placements), 'placement')} for the {plural(mesh.ndim, 'mesh dim')} of mesh {mesh}"
        )
    for placement in placements:
        if not Alphabet.admits(placement, ndim, dtype):
            letters = Alphabet().placements(ndim, dtype)
            raise ValueError(f"{name}: {placement} is none of {', '.join(map(str, letters))}")
    if not Alphabet.legal(placements):
        raise ValueError(f"{name}: {format_placements(placements)} mixes reductions, which have no defined order")
    return placements


def make_combination(like: CombinationLike, case: OpCase, mesh: MeshSpec) -> Combination:
    """Return the combination that ``like`` spells.

    Raises
    ------
    ValueError
        If it does not fit the tensors of ``case`` or the mesh, with what would.

    >>> case = make_case("torch.mm", (torch.eye(2), torch.eye(2)), {}, exact=True)
    >>> make_combination(["S(0)", "R"], case, MeshSpec((2,)))
    ((Shard(dim=0),), (Replicate(),))
    """
    tensors, names = tensor_arguments(case.args, case.kwargs), argument_names(case)
    if isinstance(like, Mapping):
        for name in like:
            if name not in names:
                hint = did_you_mean(name, names)
                raise ValueError(f"placements: {name!r} is none of the tensors {', '.join(names)}{hint}")
        entries: list[PlacementsLike] = [like.get(name, ["R"] * mesh.ndim) for name in names]
    else:
        entries = [like] if isinstance(like, str | Placement) else list(like)
    if len(entries) != len(tensors):
        given = plural(len(entries), "entry", "entries")
        raise ValueError(f"placements: {given} for {plural(len(tensors), 'tensor')} ({', '.join(names)})")
    return tuple(
        _placements(entry, mesh, tensor.ndim, tensor.dtype, name)
        for entry, tensor, name in zip(entries, tensors, names, strict=True)
    )


def cotangent_passes(
    likes: Sequence[PlacementsLike | Sequence[PlacementsLike]] | None, reference: Reference, mesh: MeshSpec
) -> tuple[tuple[Placements, ...], ...]:
    """Return the placements of the cotangents, one entry per backward pass and differentiable output, as spelled.

    Raises
    ------
    ValueError
        If they do not fit the outputs or the mesh, or no gradient flows.
    """
    outputs = [reference.outputs[i] for i in reference.differentiable]
    if likes is None:
        return ()
    if likes and not (outputs and reference.wanted):
        raise ValueError("cotangents: no argument requires a gradient that an output has; give cotangents=None")
    passes = []
    for like in likes:
        entries: list[PlacementsLike] = [like] if len(outputs) == 1 else list(like)  # type: ignore[list-item,arg-type]
        if len(entries) != len(outputs):
            given = plural(len(entries), "entry", "entries")
            raise ValueError(f"cotangents: {given} in a backward pass of {plural(len(outputs), 'output')}")
        passes.append(
            tuple(
                _placements(entry, mesh, output.ndim, output.dtype, "cotangent")
                for entry, output in zip(entries, outputs, strict=True)
            )
        )
    return tuple(passes)
