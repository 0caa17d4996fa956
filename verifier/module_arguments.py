"""What a call of ``verify_module`` is given: checked, and made into what the ranks take."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from verifier.cases import MeshSpec, Placements, parse_placements
from verifier.codec import pack, unpack
from verifier.placements import sharded_dim
from verifier.reference import resolve
from verifier.wording import did_you_mean, plural

__all__ = [
    "DIM_NAMES",
    "Plan",
    "built_model",
    "check_mesh",
    "check_plan",
    "converted",
    "packed_for_ranks",
    "parsed_placements",
    "placements_of",
    "plan_text",
    "spread",
]

Plan = ParallelStyle | Mapping[str, ParallelStyle] | Callable[..., nn.Module | None] | str
"""A plan for ``parallelize_module`` on a 1-D mesh, or ``plan(model, mesh)``, which the ranks import by its name."""

DIM_NAMES = ("pp", "dp", "tp")
"""Names of the mesh dims where a call gives none: the last of these, so that a mesh of one dim is ``tp``."""


def check_mesh(mesh: MeshSpec, names: tuple[str, ...], plan: Plan) -> None:
    """Refuse a mesh that has no processes, that ``names`` do not fit, or that the plan is not for."""
    if mesh.backend == "simulated":
        raise ValueError(f"mesh {mesh}: a model needs a process for each rank; name it as {mesh.shape_text}")
    if len(names) != mesh.ndim or len(set(names)) != len(names):
        raise ValueError(
            f"dim_names {names} do not name the {plural(mesh.ndim, 'dim')} of mesh {mesh}, each by its own"
        )
    if isinstance(plan, ParallelStyle | Mapping) and mesh.ndim != 1:
        raise ValueError(
            f"a plan for parallelize_module is for one mesh dim, mesh {mesh} has {mesh.ndim}; "
            f"give a function plan(model, mesh) that takes mesh[{names[-1]!r}]"
        )


def check_plan(plan: object, model: nn.Module) -> None:
    """Refuse a plan that would leave a submodule as it is without a word, or that no rank could call."""
    if isinstance(plan, str):
        resolve(plan)
    elif isinstance(plan, Mapping):
        if not plan:
            raise ValueError("plan is empty; name a submodule of the model")
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        for key, style in plan.items():
            if not isinstance(style, ParallelStyle):
                raise ValueError(f"plan has {style!r} for {key!r}, which is no ParallelStyle")
            if not any(_names(key, name) for name in names):
                hint = did_you_mean(key, names) or f"; submodules are {', '.join(name for name in names if name)}"
                raise ValueError(f"plan names no submodule of {type(model).__name__} by {key!r}{hint}")
    elif not isinstance(plan, ParallelStyle) and not callable(plan):
        raise ValueError(f"plan {plan!r} is neither a function plan(model, mesh) nor styles by submodule")


def _names(key: str, module: str) -> bool:
    """Return whether ``parallelize_module`` takes a key of its plan for a submodule: name by name, as file names."""
    keys, parts = key.split("."), module.split(".")
    return len(keys) == len(parts) and all(map(fnmatch, parts, keys))


def built_model(model: nn.Module | Callable[[], nn.Module] | str, seed: int, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of the model, or of what a function makes, with floating-point parameters as ``dtype``."""
    built: object = model
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype {dtype} is not one of floating point")
    if not isinstance(model, nn.Module):
        if not isinstance(model, str) and not callable(model):
            raise ValueError(f"model {model!r} is neither a torch.nn.Module nor a function that makes one")
        torch.manual_seed(seed)
        built = resolve(model)() if isinstance(model, str) else model()
    if not isinstance(built, nn.Module):
        raise ValueError(f"model {model!r} made a {type(built).__name__}, not a torch.nn.Module")
    copy: nn.Module = unpack(packed_for_ranks(built, f"model {type(built).__name__}"))
    return copy if dtype is None else copy.to(dtype)


def converted(value: object, dtype: torch.dtype | None) -> object:
    """Return an input as ``dtype`` if it is a tensor of floating point."""
    if dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype).requires_grad_(value.requires_grad)


def packed_for_ranks(value: object, what: str) -> bytes:
    """Return ``value``, which messages call ``what``, for the ranks.

    Raises
    ------
    ValueError
        If they could not import a part of it.
    """
    advice = "put it at the top level of a module that the ranks can import, not of the script itself"
    try:
        data = pack(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"the ranks cannot be given {what}: {error}; {advice}") from error
    if b"__main__" in data:
        raise ValueError(f"the ranks cannot be given {what}: part of it is from __main__; {advice}")
    return data


def spread(text: str, mesh: MeshSpec) -> str:
    """Return placements as text that has ``text`` on every mesh dim."""
    return text if mesh.ndim == 1 else f"({', '.join([text] * mesh.ndim)})"


def parsed_placements(text: str, mesh: MeshSpec, what: str) -> Placements:
    """Return the placements of an argument, called ``what`` in messages; a single R stands for all mesh dims."""
    try:
        parsed = parse_placements(spread(text, mesh) if text == "R" else text)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    if len(parsed) != mesh.ndim:
        raise ValueError(f"{what} {text!r} is for {plural(len(parsed), 'mesh dim')}, mesh {mesh} has {mesh.ndim}")
    return parsed


def placements_of(
    given: str | Sequence[str | None] | None, values: Sequence[object], mesh: MeshSpec
) -> tuple[Placements | None, ...]:
    """Return how each value is placed: one text for all of them, or one each; None for what is no tensor."""
    texts = [given] * len(values) if given is None or isinstance(given, str) else list(given)
    if len(texts) != len(values):
        raise ValueError(
            f"placements has {plural(len(texts), 'entry', 'entries')}; give one for each of inputs and targets, "
            f"of which there {'is' if len(values) == 1 else 'are'} {len(values)}"
        )
    parsed: list[Placements | None] = []
    for number, (text, value) in enumerate(zip(texts, values, strict=True)):
        placements = parsed_placements(text or "R", mesh, "placements") if isinstance(value, torch.Tensor) else None
        cut = {dim for placement in placements or () if (dim := sharded_dim(placement)) is not None}
        if isinstance(value, torch.Tensor) and not cut <= set(range(value.ndim)):
            raise ValueError(f"placements {text!r} of input {number}: it is a tensor of {plural(value.ndim, 'dim')}")
        parsed.append(placements)
    return tuple(parsed)


def plan_text(plan: object) -> str:
    """Return what messages call a plan."""
    if isinstance(plan, Mapping):
        return "a plan for " + ", ".join(map(str, plan))
    if isinstance(plan, partial):
        plan = plan.func
    return plan if isinstance(plan, str) else getattr(plan, "__name__", type(plan).__name__)
