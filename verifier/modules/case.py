"""What a call of ``verify_module`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from verifier.core.case import MeshSpec
from verifier.core.ops import resolve
from verifier.modules.arguments import (
    DIM_NAMES,
    ParallelPlan,
    built_model,
    check_mesh,
    check_plan,
    check_values,
    converted,
    fits,
    kwargs_placements_of,
    output_placements_of,
    packed_for_ranks,
    parsed_placements,
    placements_of,
    plan_text,
    spread,
)
from verifier.modules.data import Assignment, ModuleRun
from verifier.placements.parsing import parse_placements
from verifier.torch_internals.placements import Placements

__all__ = ["ModuleCase"]


@dataclass(frozen=True)
class ModuleCase:
    """The arguments of :func:`verifier.modules.verify.verify_module`, which explains them, without those of processes.

    Raises
    ------
    ValueError
        If an argument does not fit, or the ranks cannot import it.
    """

    model: nn.Module | Callable[[], nn.Module] | str
    plan: ParallelPlan
    inputs: Sequence[object]
    kwargs: Mapping[str, object]
    targets: Sequence[object]
    mesh: MeshSpec
    dim_names: Sequence[str]
    placements: str | Sequence[str | None] | None
    kwargs_placements: Mapping[str, str] | None
    as_dtensors: bool
    outputs: str | Sequence[str] | None
    loss: Callable[..., torch.Tensor] | str
    loss_placements: str | None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None
    steps: int
    dtype: torch.dtype | None
    seed: int
    packed: bytes = field(init=False)
    """``given`` for other processes."""

    def __post_init__(self) -> None:
        check_mesh(self.mesh, self.names, self.plan)
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")
        check_values(self.inputs, self.targets, self.kwargs)
        object.__setattr__(self, "packed", packed_for_ranks(self.given, "plan, loss, optimizer or inputs"))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the mesh dims."""
        return tuple(self.dim_names) or DIM_NAMES[-self.mesh.ndim :]

    @cached_property
    def given(self) -> Assignment:
        """The model, made once, and the values as processes get them."""
        built = built_model(self.model, self.seed, self.dtype)
        check_plan(self.plan, built)
        return Assignment(
            model=built,
            plan=self.plan,
            inputs=tuple(converted(value, self.dtype) for value in self.inputs),
            targets=tuple(converted(value, self.dtype) for value in self.targets),
            placements=placements_of(self.placements, (*self.inputs, *self.targets), self.mesh),
            as_dtensors=self.as_dtensors,
            loss=resolve(self.loss) if isinstance(self.loss, str) else self.loss,  # type: ignore[arg-type]
            optimizer=self.optimizer or partial(torch.optim.SGD, lr=0.1),
            steps=self.steps,
            seed=self.seed,
            kwargs={name: converted(value, self.dtype) for name, value in self.kwargs.items()},
            kwargs_placements=kwargs_placements_of(self.kwargs_placements, self.kwargs, self.mesh),
        )

    @property
    def call(self) -> str:
        """What messages call it."""
        model, mesh = type(self.given.model).__name__, self.mesh
        return f"{model} under {plan_text(self.plan)} on mesh {mesh}, backend {mesh.backend}"

    @property
    def input_placements(self) -> dict[str, Placements | None]:
        """Placements of the inputs, by what messages call them; None for what is no tensor."""
        positional = zip(range(len(self.inputs)), self.given.placements, strict=False)
        placed = {f"input {number}": placements for number, placements in positional}
        return placed | {f"input {name}": p for name, p in self.given.kwargs_placements.items()}

    @property
    def placed(self) -> tuple[Placements | None, ...]:
        """Placements of inputs, then of targets; None for what is no tensor."""
        return (*self.input_placements.values(), *self.given.placements[len(self.inputs) :])

    def output_placements(self, local: ModuleRun) -> tuple[Placements, ...]:
        """Return how each tensor that the model returned stands for the whole where ranks hold it as a plain one."""
        first_input = next((p for p in self.placed if p is not None), parse_placements(spread("R", self.mesh)))
        ndims = [len(held.shape) for held in local.returned.values()]
        return output_placements_of(self.outputs, ndims, first_input, self.mesh)

    def whole_loss(self, outputs: Sequence[Placements]) -> Placements:
        """Return how a plain loss stands for the whole one, given the placements of ``outputs``."""
        averaged = tuple("P(avg)" if placement.is_shard() else "R" for placement in outputs[0])
        text = self.loss_placements or f"({', '.join(averaged)})"
        placements = parsed_placements(text, self.mesh, "loss_placements")
        if not fits(placements, 0):
            what = f"loss_placements {self.loss_placements!r}"
            raise ValueError(f"{what}: a loss has no dim to cut; give P(avg), P(sum) or R")
        return placements
