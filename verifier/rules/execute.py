"""Runs an op on the local tensors of one rank: the call split into what stays and what is cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Shard

from verifier.core.case import OpCase
from verifier.core.ops import opaque_results, resolve, written_arguments
from verifier.placements.algebra import coordinates, take_local
from verifier.placements.bounds import shard_bounds
from verifier.placements.partials import split_index, split_partial
from verifier.torch_internals.claims.values import Slot
from verifier.torch_internals.names import pytree
from verifier.torch_internals.placements import Placements, masked_extent, norm_order

__all__ = ["CALL_ERRORS", "Cuts", "LocalCall", "Results", "holds_tensor", "masked_indices", "tensor_groups"]

_OF_TORCH = ("aten", "prims")
CALL_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)
"""What an op raises if it does not take a call; see :class:`LocalCall`."""


@dataclass(slots=True)
class Results:
    """What a call left behind: its tensors, and everything else that it returned.

    ``tensors`` begins with the tensors that are returned; tensors that are written to and not returned follow.
    ``written`` has, for each argument that the op writes to, the index at which it is among them.
    """

    tensors: tuple[torch.Tensor, ...]
    others: tuple[object, ...]
    returned: object
    written: tuple[int, ...] = ()

    @property
    def returned_tensors(self) -> int:
        """How many of the tensors are returned."""
        return sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(self.returned))


class LocalCall:
    """The call of a case, to be made with other tensors.

    Parameters
    ----------
    case
        Its ``call`` names an operator overload, whose schema says which arguments are written to.

    Whatever else an op of the user's own raises, such as an AssertionError, becomes a RuntimeError.
    """

    def __init__(self, case: OpCase) -> None:
        self.op: Callable[..., object] = resolve(case.call)
        self._opaque = frozenset(opaque_results(self.op))
        self.leaves, self._spec = pytree.tree_flatten((tuple(case.args), dict(case.kwargs)))
        self.slots = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [self.leaves[i].detach() for i in self.slots]
        self.in_args = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(tuple(case.args)))
        # Where only lists hold tensors, the arguments can be filled in without walking them: this is the inner loop.
        self._args, self._kwargs = list(case.args), dict(case.kwargs)
        given: list[tuple[int | str, Any]] = [*enumerate(self._args), *self._kwargs.items()]
        self._lists = [key for key, value in given if type(value) is list and holds_tensor(value)]
        self._flat = all(
            not holds_tensor(one)
            for key, value in given
            for one in (value if key in self._lists else [value])
            if not isinstance(one, torch.Tensor)
        )
        self._at = [
            (key, place)
            for key, value in given
            for place, one in (enumerate(value) if key in self._lists else [(-1, value)])
            if isinstance(one, torch.Tensor)
        ]
        self.written = written_arguments(case)
        """Numbers of the tensor arguments that the op writes to."""
        self.buffers = tuple(number for number in self.written if number >= self.in_args)
        """Numbers of those that it only writes to: the ``out=`` arguments."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Results:
        """Run the op with ``tensors`` in the place of its own; those that it writes to are copied first."""
        if self.written:
            tensors = list(tensors)
            for number in self.written:
                tensors[number] = tensors[number].clone()
        if self._flat:
            args, kwargs = self._args.copy(), self._kwargs.copy()
            both: tuple[Any, Any] = args, kwargs
            for key in self._lists:
                holder = both[isinstance(key, str)]
                holder[key] = holder[key].copy()
            for (key, place), tensor in zip(self._at, tensors, strict=True):
                holder = both[isinstance(key, str)]
                if place < 0:
                    holder[key] = tensor
                else:
                    holder[key][place] = tensor
        else:
            args, kwargs = pytree.tree_unflatten(self._with(tensors), self._spec)
        try:
            returned = self.op(*args, **kwargs)
        except CALL_ERRORS:
            raise
        except Exception as error:
            if getattr(self.op, "namespace", "") in _OF_TORCH:
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return self._results(returned, tensors)

    def raise_as_on_meta(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise what the op raises for tensors of such shapes on the device ``meta``, where no kernel reads memory.

        Raises nothing if the op has no function for that device.
        """
        with contextlib.suppress(NotImplementedError):
            self([torch.empty_like(tensor, device="meta") for tensor in tensors])

    def without_buffers(self, tensors: Sequence[torch.Tensor]) -> Results:
        """Run the op with empty tensors to write its results to, which it makes as large as it needs."""
        tensors = list(tensors)
        for number in self.buffers:
            tensors[number] = torch.empty(0, dtype=tensors[number].dtype)
        return self(tensors)

    def place_buffers(self) -> None:
        """Let ``out=`` arguments be placed as other arguments are, unless the op is torch's, which makes them fit."""
        if getattr(self.op, "namespace", "") not in _OF_TORCH:
            self.buffers = ()

    def rewritten(self, op: Callable[..., object], args: Sequence[object], tensors: Sequence[torch.Tensor]) -> Results:
        """Run what DTensor runs instead: ``op`` on ``args``, in which :class:`Slot` stands for a tensor."""
        tensors = list(tensors)
        for number in self.written:
            tensors[number] = tensors[number].clone()
        kwargs = self._kwargs
        if len(tensors) > self.in_args:
            _, kwargs = pytree.tree_unflatten(self._with(tensors), self._spec)
        return self._results(op(*(_filled(arg, tensors) for arg in args), **kwargs), tensors)

    def _with(self, tensors: Sequence[torch.Tensor]) -> list[object]:
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        return leaves

    def _results(self, returned: object, tensors: Sequence[torch.Tensor]) -> Results:
        if isinstance(returned, torch.Tensor) and not self.written:
            return Results((returned,), (), returned)
        plain = isinstance(returned, torch.Tensor)
        flat = [returned] if plain else pytree.tree_leaves(returned)
        made = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        others = tuple(
            leaf for place, leaf in enumerate(flat) if not isinstance(leaf, torch.Tensor) and place not in self._opaque
        )
        written = []
        for number in self.written:
            index = next((i for i, leaf in enumerate(made) if leaf is tensors[number]), None)
            if index is None:
                index = len(made)
                made.append(tensors[number])
            written.append(index)
        return Results(tuple(made), others, returned, tuple(written))


def _filled(value: object, tensors: Sequence[torch.Tensor]) -> object:
    """Return ``value`` with tensors in place of its slots. DTensor makes lists and tuples only; this is the inner loop.

    See :meth:`LocalCall.rewritten`.
    """
    if isinstance(value, Slot):
        return tensors[value.index]
    if type(value) is list or type(value) is tuple:
        return type(value)(_filled(one, tensors) for one in value)
    return value


def tensor_groups(call: LocalCall, case: OpCase, lists_alike: bool = False) -> tuple[tuple[int, ...], ...]:
    """Return which tensors are placed alike: the lists of an op that goes through them element by element.

    What is only written to has the placement of what is written, so it is in no group.

    Parameters
    ----------
    lists_alike
        Whether the tensors of any list are placed alike.
    """
    numbers = [n for n in range(len(call.tensors)) if n not in call.buffers]
    if not (lists_alike or case.op.startswith(("aten._foreach_", "aten._amp_foreach_", "aten._fused_"))):
        return tuple((number,) for number in numbers)
    groups: list[tuple[int, ...]] = []
    count = 0
    for value in [*case.args, *case.kwargs.values()]:
        here = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
        groups.append(tuple(n for n in range(count, count + here) if n in numbers))
        count += here
    return tuple(group for group in groups if group)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def holds_tensor(value: object) -> bool:
    """Return whether ``value`` is a tensor or has one in it."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


class Cuts:
    """The local tensors of a call's arguments under any placements: each split is made once, when first asked for.

    Parameters
    ----------
    tensors
        The global tensors.
    mesh_shape
        Of the mesh.
    seed
        Fixes how Partial arguments are split.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], mesh_shape: tuple[int, ...], seed: int) -> None:
        self.tensors = tensors
        self.mesh_shape = mesh_shape
        self.seed = seed
        self._coordinates = tuple(coordinates(mesh_shape))
        # Integers beside floats are indices, lengths and targets; integers among themselves are numbers to reckon with.
        self._beside_floats = any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
        self._made: dict[tuple[int, Placements], list[torch.Tensor]] = {}
        self._generator = torch.Generator()

    def of(self, number: int, placements: Placements) -> list[torch.Tensor]:
        """Return the local tensors of argument ``number`` on all ranks."""
        key = (number, placements)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._cut(number, placements)
        return made

    def _cut(self, number: int, placements: Placements) -> list[torch.Tensor]:
        value, seed = self.tensors[number], self.seed + number
        if len(placements) > 1:
            return [take_local(value, placements, self.mesh_shape, c, seed) for c in self._coordinates]
        (placement,), (parts,) = placements, self.mesh_shape
        if placement.is_replicate():
            return [value] * parts
        if placement.is_partial() and norm_order(placement) is None:
            split = split_index if self._beside_floats and _is_integer(value) else split_partial
            generator = self._generator.manual_seed(seed & 0x7FFFFFFF)
            return split(value, placement.reduce_op, parts, generator)  # type: ignore[attr-defined]
        if isinstance(placement, Shard):
            dim, size = placement.dim, value.shape[placement.dim]
            bounds = [shard_bounds(size, parts, index) for index in range(parts)]
            return [value.narrow(dim, start, stop - start).clone() for start, stop in bounds]
        return [take_local(value, placements, self.mesh_shape, c, seed) for c in self._coordinates]


def masked_indices(
    indices: torch.Tensor, placements: Placements, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the indices as a rank has them under a masked partial, and the mask of those that are not its own.

    Each rank owns the rows of its shard: ids of other rows become 0, the rest count from the shard's first row. The
    second value is None where no placement is a masked partial.
    """
    mask = None
    for placement, parts, index in zip(placements, mesh_shape, coordinate, strict=True):
        extent = masked_extent(placement)
        if extent is None:
            continue
        start, stop = shard_bounds(extent, parts, index)
        mask = (indices < start) | (indices >= stop)
        indices = torch.where(mask, torch.zeros_like(indices), indices - start)
    return indices, mask
