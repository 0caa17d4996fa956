"""What processes note of a module that they run: plain data, which is packed between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from verifier.meshes.tasks import TaskOutcome
from verifier.modules.leaves import Plain
from verifier.torch_internals.placements import Placements

__all__ = [
    "NOTES",
    "OUTSIDE",
    "PHASES",
    "Disturbance",
    "Held",
    "ModuleCollective",
    "ModuleObservation",
    "ModuleRun",
    "Recorded",
]

OUTSIDE = ""
"""The module to which a collective belongs that none of the submodules issues: the model itself, and the optimiser."""
PHASES = ("forward", "backward", "step")
"""Of a step, in order."""
NOTES = ("raised in the submodule ", "raised in the backward pass, ", "warned by the plan: ")
"""How the notes begin that an exception of a rank gets."""


@dataclass(frozen=True)
class Disturbance:
    """How far off gradients are before each step, to see what an optimiser makes of rounding.

    Attributes
    ----------
    share
        Of the largest gradient of all; an element is off by half of that to one and a half times.
    draw
        Which of several: an odd one is off in the other direction than the even one before. The first two are off in
        the same direction in every step, later ones are not.
    touched
        Where a gradient that is 0 in the local model is not 0 on some rank, as masks by parameter. Where it is 0
        everywhere, it is not off.
    """

    share: float
    draw: int
    touched: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Held:
    """What a process holds of one tensor.

    ``placements`` is None for a plain tensor, or where a placement is not understood, which ``reason`` then names.
    ``mesh_dims`` are the names of the mesh dims that the placements are on, if they have any, ``shape`` the global
    shape.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    dtensor: bool = False
    placements: Placements | None = None
    mesh_dims: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Recorded:
    """A tensor that one call of a submodule returned, or the gradient of it.

    ``call`` counts the calls of the same submodule, ``leaf`` the tensors among what it returned.
    """

    module: str
    call: int
    leaf: int
    held: Held

    @property
    def key(self) -> tuple[str, int, int]:
        return self.module, self.call, self.leaf


@dataclass(frozen=True)
class ModuleCollective:
    """How often a collective ran in one submodule, those within it not counted, in one phase of one step.

    Attributes
    ----------
    module
        Name of the submodule; empty for the model itself, and for what runs after the gradients are there.
    phase
        ``forward``, ``backward`` or ``step``, the last of these for the optimiser.
    """

    module: str
    phase: str
    name: str
    count: int


@dataclass(frozen=True)
class ModuleRun:
    """What a process saw of a model: the first step in detail, losses of all, the state after the last.

    ``result`` has what the model returned by its place in it, ``input_gradients`` the gradient of each input, first
    the positional ones, by what messages call it, ``warnings`` what the plan warned of. ``eps`` is that of the coarsest
    dtype that values have had on the way, which is known of the local model only.
    """

    modules: Mapping[str, str]
    outputs: tuple[Recorded, ...]
    output_gradients: tuple[Recorded, ...]
    result: Mapping[str, Held | Plain]
    losses: tuple[Held, ...]
    gradients: Mapping[str, Held | None]
    input_gradients: Mapping[str, Held | None]
    state: Mapping[str, Held]
    tied: tuple[tuple[str, ...], ...]
    collectives: tuple[ModuleCollective, ...]
    warnings: tuple[str, ...] = ()
    eps: float = 0.0

    @property
    def returned(self) -> dict[str, Held]:
        """The tensors that the model returned, by their place."""
        return {place: leaf for place, leaf in self.result.items() if isinstance(leaf, Held)}


@dataclass(frozen=True)
class ModuleObservation:
    """What the local model did, and what came of the ranks.

    ``outputs`` and ``loss`` say how plain tensors of the ranks stand for the whole ones: each tensor that the local
    model returned, in order, and the loss.
    """

    local: ModuleRun
    outputs: tuple[Placements, ...]
    loss: Placements
    outcome: TaskOutcome

    @property
    def ranks(self) -> Sequence[ModuleRun]:
        """What the ranks did, in order, if all of them came to an end."""
        return cast("Sequence[ModuleRun]", self.outcome.returned)
