"""From a call and a mesh to every combination of placements, and from a combination to DTensors.

Generalises the ``DTensorConverter`` of torch's own test helpers: uneven and empty shards, Partial of every kind, meshes
of any number of dims, bool and integer tensors, a seeded pairwise cover where there are too many combinations, and a
reason for every tensor that it leaves alone. Making the DTensors communicates nothing.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from verifier.core.arguments import unsupported_reason
from verifier.core.wording import plural
from verifier.placements.algebra import coordinates, take_local, view_local
from verifier.placements.alphabet import Alphabet
from verifier.placements.combinations import CombinationSpace
from verifier.torch_internals.dtensors import describe_dtensor, make_dtensor, make_rank_tensors
from verifier.torch_internals.names import DTensorSpec, pytree
from verifier.torch_internals.placements import PLAIN_PLACEMENTS, Combination, Placements
from verifier.torch_internals.simulation import paused_simulation, simulated_ranks

__all__ = [
    "DTensorConverter",
]


class DTensorConverter:
    """Yield a call's arguments as DTensors, once for every combination of placements.

    Parameters
    ----------
    mesh
        The mesh on which the DTensors live. Under torch's ``LocalTensorMode`` the local tensors of all ranks are made.
    args, kwargs
        The call. They are walked as pytrees; tensors and ``nn.Parameter`` become DTensors, everything else is left
        alone. Values are global, and the same on every rank; they may be written to, but have to keep their shapes.
    alphabet, cap, seed
        See :class:`CombinationSpace`; ``seed`` also fixes how Partial arguments are split.

    Attributes
    ----------
    converted
        How many tensors have been made DTensors so far.
    left_alone
        How many were not, by reason.

    Examples
    --------
    >>> converter = DTensorConverter(mesh, (weight, indices))            # doctest: +SKIP
    >>> len(converter)                                                   # doctest: +SKIP
    56
    >>> for args, kwargs in converter:                                   # doctest: +SKIP
    ...     torch.ops.aten.embedding(*args, **kwargs)
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        args: Sequence[object],
        kwargs: Mapping[str, object] | None = None,
        *,
        alphabet: Alphabet | None = None,
        cap: int | None = None,
        seed: int = 0,
    ) -> None:
        self.mesh = mesh
        self.seed = seed
        named = dict(kwargs or {})
        self._leaves, self._spec = pytree.tree_flatten((tuple(args), named))
        given = [*args, *named.values()]
        flat = len(given) == len(self._leaves) and all(map(operator.is_, given, self._leaves))
        self._names = list(named) if flat else None
        self._reasons = [unsupported_reason(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in self._leaves]
        tensors = [
            leaf
            for leaf, reason in zip(self._leaves, self._reasons, strict=True)
            if isinstance(leaf, torch.Tensor) and reason is None
        ]
        self.space = CombinationSpace(tensors, mesh.ndim, alphabet or Alphabet(), cap, seed)
        self.converted = 0
        self.left_alone: Counter[str] = Counter()
        self._placed: dict[tuple[int, Placements], _Placed] = {}

    def __len__(self) -> int:
        return self.space.total if self.space.cap is None else min(self.space.total, self.space.cap)

    def describe(self) -> str:
        """Return how many combinations will come, of how many, and what cannot be converted."""
        text = f"{self.space.describe()} of {plural(len(self.space.tensors), 'tensor')}"
        reasons = [reason for reason in self._reasons if reason]
        return text + (f"; {len(reasons)} left alone: {'; '.join(reasons)}" if reasons else "")

    def __iter__(self) -> Iterator[tuple[tuple[object, ...], dict[str, object]]]:
        for combination in self.space:
            yield self.convert(combination)

    def convert(
        self, combination: Combination, seed: int | None = None
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return ``(args, kwargs)`` with the tensors placed as ``combination`` says, without any communication.

        A tensor that occurs twice in the call becomes one DTensor if both places agree on its placements. ``seed`` is
        for this time instead of the converter's.

        Raises
        ------
        ValueError
            If the combination has not one entry per tensor, or not one placement per mesh dim.
        """
        return self.rebuild(self.place_leaves(combination, self.seed if seed is None else seed))

    def place_leaves(self, combination: Combination, seed: int) -> list[object]:
        """Return the leaves of the call's pytree as :meth:`convert` has them."""
        if len(combination) != len(self.space.tensors):
            placed = plural(len(combination), "tensor")
            raise ValueError(f"the combination places {placed}, but the call has {len(self.space.tensors)}")
        made: dict[tuple[int, Placements], torch.Tensor] = {}
        leaves: list[object] = []
        position = 0
        for leaf, reason in zip(self._leaves, self._reasons, strict=True):
            if isinstance(leaf, torch.device) and leaf.type == "cpu":
                # the call is drawn on the CPU, and means the device that it is on
                leaves.append(torch.device(self.mesh.device_type))
                continue
            if not isinstance(leaf, torch.Tensor):
                leaves.append(leaf)
                continue
            if reason is not None:
                self.left_alone[reason] += 1
                leaves.append(leaf)
                continue
            placements = combination[position]
            key = (id(leaf), placements)
            if key not in made:
                made[key] = self.place(leaf, placements, seed + position)
            leaves.append(made[key])
            self.converted += 1
            position += 1
        return leaves

    def rebuild(self, leaves: Sequence[object]) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return ``(args, kwargs)`` with ``leaves`` in the places of those of the call."""
        if self._names is not None:  # most calls are flat, and to walk a pytree takes as long as to make a DTensor
            count = len(leaves) - len(self._names)
            return tuple(leaves[:count]), dict(zip(self._names, leaves[count:], strict=True))
        args, kwargs = pytree.tree_unflatten(list(leaves), self._spec)
        return args, kwargs

    def place(self, value: torch.Tensor, placements: Placements, seed: int) -> torch.Tensor:
        """Return ``value`` as a DTensor (an ``nn.Parameter`` of one for a parameter), a leaf of the autograd graph."""
        known = self._placed.get((id(value), placements))
        if known is None:
            known = self._placed[id(value), placements] = self._prepare(value, placements)
        shape, spec = known.mesh_shape, known.spec
        if known.piece is not None:
            local = known.piece.clone(memory_format=torch.preserve_format)
        elif simulated_ranks() is None:
            local = take_local(value, placements, shape, self._coordinate(), seed).to(self.mesh.device_type)
        else:
            with paused_simulation():
                local = make_rank_tensors([take_local(value, placements, shape, c, seed) for c in coordinates(shape)])
        result = make_dtensor(local, describe_dtensor(value, self.mesh, placements) if spec is None else spec)
        if known.parameter:
            return nn.Parameter(result, requires_grad=value.requires_grad)
        return result.requires_grad_(value.requires_grad)

    def _prepare(self, value: torch.Tensor, placements: Placements) -> _Placed:
        """Return what does not change when ``value`` is placed like this again."""
        if len(placements) != self.mesh.ndim:
            raise ValueError(f"{plural(len(placements), 'placement')} for a mesh of {plural(self.mesh.ndim, 'dim')}")
        mesh_shape = tuple(self.mesh.shape)
        plain = all(type(placement) in PLAIN_PLACEMENTS for placement in placements)
        spec = describe_dtensor(value, self.mesh, placements) if plain else None
        piece = None
        if plain and simulated_ranks() is None and not any(placement.is_partial() for placement in placements):
            piece = view_local(value, placements, mesh_shape, self._coordinate(), seed=0).to(self.mesh.device_type)
        return _Placed(value, mesh_shape, isinstance(value, nn.Parameter), spec, piece)

    def _coordinate(self) -> Sequence[int]:
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None, "this rank is not part of the mesh"
        return coordinate


@dataclass(frozen=True)
class _Placed:
    """What making a DTensor of ``value`` takes most of its time for, to be used again.

    ``spec`` is None where DTensors must not share it, ``piece`` where what this rank holds depends on the seed or is
    not a view of ``value``.
    """

    value: torch.Tensor
    mesh_shape: tuple[int, ...]
    parameter: bool
    spec: DTensorSpec | None
    piece: torch.Tensor | None
