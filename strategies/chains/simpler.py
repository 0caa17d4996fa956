"""The single calls that a chain makes, to find which of them causes a failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from strategies.chains.steps import left_over, meant, run_steps, taken_by
from verifier.core.arguments import tensor_arguments
from verifier.core.case import OpCase, Trial
from verifier.placements.alphabet import Alphabet
from verifier.programs import SimplerCall
from verifier.torch_internals.names import OpOverload, pytree
from verifier.torch_internals.placements import Placements

__all__ = ["simpler_steps"]

_OPS = "torch.ops."
_MOST = 24
"""The most combinations of placements that are tried for one call."""


def simpler_steps(trial: Trial, placed: Mapping[int, Placements]) -> Iterator[SimplerCall]:
    """Yield the call of each overload in a chain, on every placement that its arguments may have had.

    A call of a function that is no overload is left out, because a failure is filed under an overload.
    """
    case = trial.case
    steps: Any = case.args[0]
    given: dict[str, Any] = dict(case.kwargs)
    places = dict(zip(given, trial.combination, strict=True))
    numbers = {name: number for number, name in enumerate(left_over(steps, run_steps(steps, _plain(given))))}
    values = _plain(given)
    for name, path, args, options in steps:
        before = _plain(values)
        wanted = meant(args, before), {key: meant(value, before) for key, value in options.items()}
        values = run_steps([[name, path, args, options]], values)
        if path.startswith(_OPS):
            outputs = tuple(number for made, number in numbers.items() if made.partition(".")[0] == name)
            yield from _alone(trial, path, wanted, before, places, outputs)
    yield from _branches(trial, list(numbers))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with copies of the tensors; a tensor with two names is one copy."""
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return copies.setdefault(id(tensor), tensor.detach().clone())

    return {name: pytree.tree_map_only(torch.Tensor, copied, value) for name, value in values.items()}


def _alone(
    trial: Trial,
    path: str,
    wanted: tuple[Any, dict[str, Any]],
    values: Mapping[str, Any],
    places: Mapping[str, Placements],
    outputs: tuple[int, ...],
) -> Iterator[SimplerCall]:
    """Yield the call of one step; an argument with unknown placements is tried on each."""
    args, options = wanted
    op = _overload(path)
    if op is None:
        return
    names = {id(value): name for name, value in values.items() if isinstance(value, torch.Tensor)}
    tensors = tensor_arguments(args, options)
    wants = any(tensor.requires_grad for tensor in tensor_arguments(trial.case.args, trial.case.kwargs))
    if not op._schema.is_mutable:
        for tensor in tensors:
            tensor.requires_grad_(tensor.is_floating_point() and wants)
    case = OpCase(path.removeprefix(_OPS), path, tuple(args), options, trial.case.family, False)
    known = [places.get(names[id(tensor)]) for tensor in tensors]
    choices = [
        [placements] if placements is not None else list(_placements(tensor, trial.mesh.ndim))
        for tensor, placements in zip(tensors, known, strict=True)
    ]
    for combination in islice(product(*choices), _MOST):
        yield SimplerCall(case, combination, outputs)


def _branches(trial: Trial, results: list[str]) -> Iterator[SimplerCall]:
    """Yield the chain of each result, without the steps that only other results need; none if a step writes."""
    steps: Any = trial.case.args[0]
    if len(results) < 2 or any(_writes(path) for _, path, _, _ in steps):
        return
    for number, result in enumerate(results):
        wanted = {result.partition(".")[0]}
        kept: list[Any] = []
        for step in reversed(steps):
            if step[0] in wanted:
                kept.insert(0, step)
                wanted |= {name.partition(".")[0] for name in taken_by([step])}
        tensors = {name: tensor for name, tensor in trial.case.kwargs.items() if name in wanted}
        places = dict(zip(trial.case.kwargs, trial.combination, strict=True))
        case = replace(trial.case, args=(kept,), kwargs=tensors)
        if len(kept) < len(steps):
            yield SimplerCall(case, tuple(places[name] for name in tensors), (number,))


def _writes(path: str) -> bool:
    """Return whether a function writes to its first argument, by its name."""
    op = path.removeprefix(_OPS + "aten.").partition(".")[0] if path.startswith(_OPS) else path.rpartition(".")[2]
    return op.endswith("_") and op != "__getitem__"


def _placements(tensor: torch.Tensor, ndim: int) -> Iterator[Placements]:
    """Yield placements with at most one mesh dim that is not replicated."""
    letters: Sequence[Placement] = Alphabet().placements(tensor.ndim, tensor.dtype)
    everywhere: Placements = (Replicate(),) * ndim
    for mesh_dim in range(ndim):
        yield from ((*everywhere[:mesh_dim], letter, *everywhere[mesh_dim + 1 :]) for letter in letters)


def _overload(path: str) -> OpOverload | None:
    found: Any = torch.ops
    for part in path.removeprefix(_OPS).split("."):
        found = getattr(found, part)
    return found if isinstance(found, OpOverload) else None
