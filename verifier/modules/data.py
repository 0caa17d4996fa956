"""What a process observes of a module that it runs, as plain data that processes can send to each other."""

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
"""The module of collectives that no submodule issues, but the model itself or the optimiser."""
PHASES = ("forward", "backward", "step")
"""The phases of a step, in order."""
NOTES = ("raised in the submodule ", "raised in the backward pass, ", "warned by the plan: ")
"""The beginnings of the notes that are added to an exception of a rank."""


@dataclass(frozen=True)
class Disturbance:
    """How gradients are perturbed before each step, to see how an optimiser amplifies rounding.

    Attributes
    ----------
    share
        Size of the perturbation as a share of the largest gradient; each element gets 0.5 to 1.5 times this size.
    draw
        Number of the draw. An odd draw has the opposite direction of the even draw before. Draws 0 and 1 keep their
        direction in every step; later draws do not.
    touched
        Masks by parameter, true where a gradient is not 0 on some rank. Elements that are 0 on all ranks and in the
        local model are not perturbed.
    """

    share: float
    draw: int
    touched: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Held:
    """The local tensor that a process holds.

    ``placements`` is None for a plain tensor, and for a placement that is not understood; ``reason`` then names it.
    ``mesh_dims`` has the names of the mesh dims of a DTensor, if they have names. ``shape`` is the global shape.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    dtensor: bool = False
    placements: Placements | None = None
    mesh_dims: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Recorded:
    """A tensor that one call of a submodule returned, or its gradient.

    ``call`` is the number of the call among those of the submodule, ``leaf`` the number of the tensor in its result.
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
    """How often a collective ran in one submodule, without its own submodules, in one phase of one step.

    Attributes
    ----------
    module
        Name of the submodule; empty for the model itself, and for collectives after the backward pass.
    phase
        ``forward``, ``backward``, or ``step`` for the optimiser.
    """

    module: str
    phase: str
    name: str
    count: int


@dataclass(frozen=True)
class ModuleRun:
    """What a process saw of a model: the first step in detail, the losses of all steps, and the final state.

    ``result`` has the leaves of the model's result by path. ``input_gradients`` has the gradient of each input by its
    name in messages, positional inputs first. ``warnings`` are the plan's. ``eps`` is the largest eps of the dtypes
    that values have had on the way; it is known only for the local model.
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
        """The tensors that the model returned, by path."""
        return {place: leaf for place, leaf in self.result.items() if isinstance(leaf, Held)}


@dataclass(frozen=True)
class ModuleObservation:
    """The run of the local model and the outcome of the ranks.

    ``outputs`` has the placements of plain output tensors on the ranks, in the order in which the local model returns
    them. ``loss`` has those of a plain loss.
    """

    local: ModuleRun
    outputs: tuple[Placements, ...]
    loss: Placements
    outcome: TaskOutcome

    @property
    def ranks(self) -> Sequence[ModuleRun]:
        """The runs of the ranks, in order; only if all ranks completed."""
        return cast("Sequence[ModuleRun]", self.outcome.returned)
