"""Checks the arguments of ``verify_module`` and makes a :class:`ModuleCase` of them."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from verifier.core.case import MeshSpec
from verifier.core.ops import resolve
from verifier.core.placement_text import format_placements
from verifier.core.wording import did_you_mean, plural
from verifier.execution.packing import pack, unpack
from verifier.modules.data import Disturbance
from verifier.placements.algebra import sharded_dim
from verifier.placements.alphabet import Alphabet
from verifier.placements.parsing import parse_placements
from verifier.torch_internals.placements import Placements

__all__ = [
    "DIM_NAMES",
    "ModuleCase",
    "ParallelPlan",
    "built_model",
    "converted_kwargs",
    "converted_values",
    "fits",
    "kwargs_placements_of",
    "misfit",
    "packed_for_ranks",
    "placements_of",
    "wrong_keyword",
]

ParallelPlan = ParallelStyle | Mapping[str, ParallelStyle] | Callable[..., nn.Module | None] | str
"""A plan for ``parallelize_module`` on a 1-D mesh, or a function ``plan(model, mesh)``; ranks import it by its name."""

DIM_NAMES = ("pp", "dp", "tp")
"""Default names of the mesh dims. A mesh takes the last ones, so the dim of a 1-D mesh is ``tp``."""

_Text = TypeVar("_Text", str, str | None)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ModuleCase:
    """A model, the plan that shards it, and its arguments; it is packed and sent to the ranks.

    Attributes
    ----------
    inputs, targets, kwargs
        Global values. ``placements`` has one entry for each input, then for each target; ``kwargs_placements`` has one
        for each of ``kwargs``. The entry of a value that is no tensor is None.
    outputs, loss_placements
        The placements, as text, of plain tensors that the ranks return as output and as loss; None for the default.
    disturbed
        How the gradients of a local model are perturbed.

    Raises
    ------
    ValueError
        If the mesh, the plan or the number of steps does not fit.
    """

    model: nn.Module
    plan: ParallelPlan
    inputs: tuple[object, ...]
    targets: tuple[object, ...]
    mesh: MeshSpec
    dim_names: tuple[str, ...]
    placements: tuple[Placements | None, ...]
    as_dtensors: bool
    loss: Callable[..., torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int
    seed: int
    kwargs: Mapping[str, object] = field(default_factory=dict)
    kwargs_placements: Mapping[str, Placements | None] = field(default_factory=dict)
    outputs: str | Sequence[str] | None = None
    loss_placements: str | None = None
    disturbed: Disturbance | None = None

    def __post_init__(self) -> None:
        _check_mesh(self.mesh, self.dim_names, self.plan)
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")
        _check_plan(self.plan, self.model)

    def __str__(self) -> str:
        model = type(self.model).__name__
        return f"{model} under {_plan_text(self.plan)} on mesh {self.mesh}, backend {self.mesh.backend}"

    @property
    def input_placements(self) -> dict[str, Placements | None]:
        """The placements of the inputs, by their names in messages."""
        positional = enumerate(self.placements[: len(self.inputs)])
        return {f"input {name}": p for name, p in (*positional, *self.kwargs_placements.items())}

    @property
    def placed(self) -> tuple[Placements | None, ...]:
        """The placements of the inputs, then of the targets."""
        return (*self.input_placements.values(), *self.placements[len(self.inputs) :])

    def output_placements(self, ndims: Sequence[int]) -> tuple[Placements, ...]:
        """Return the placements of each tensor that the model returns, for ranks on which it is a plain tensor.

        ``ndims`` has the number of dims of each tensor. If ``outputs`` is one text for all tensors, it need not fit
        all of them, because some may be DTensors on the ranks.
        """
        if self.outputs is None:
            replicated = parse_placements(_spread("R", self.mesh))
            return (next((p for p in self.placed if p is not None), replicated),) * len(ndims)
        texts = _one_each(self.outputs, len(ndims), "outputs", "tensor that the model returns")
        parsed = [_parsed_placements(text, self.mesh, "outputs") for text in texts]
        for number, (placements, ndim) in enumerate(zip(parsed, ndims, strict=True)):
            if not fits(placements, ndim) and not (isinstance(self.outputs, str) and any(map(fits, parsed, ndims))):
                raise misfit(placements, ndim, number)
        return tuple(parsed)

    def whole_loss(self, outputs: Sequence[Placements]) -> Placements:
        """Return the placements of a plain loss, given the placements of the outputs."""
        averaged = ", ".join("P(avg)" if placement.is_shard() else "R" for placement in outputs[0])
        placements = _parsed_placements(self.loss_placements or f"({averaged})", self.mesh, "loss_placements")
        if not fits(placements, 0):
            what = f"loss_placements {self.loss_placements!r}"
            raise ValueError(f"{what}: a loss has no dim to cut; give P(avg), P(sum) or R")
        return placements


def _check_mesh(mesh: MeshSpec, names: tuple[str, ...], plan: ParallelPlan) -> None:
    """Refuse a mesh without processes, or one that does not fit ``names`` or the plan."""
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


def converted_values(values: object, what: str, dtype: torch.dtype | None) -> tuple[object, ...]:
    """Return inputs or targets, each as :func:`converted`; ``what`` is their name in messages."""
    if isinstance(values, torch.Tensor):
        raise ValueError(f"{what} is one tensor; give a sequence of them, as [{what[:-1]}]")
    if isinstance(values, Mapping) and what == "inputs":
        raise ValueError("inputs is a mapping; give what the model takes by name as kwargs, and [] as inputs")
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{what} is of type {type(values).__name__}; give a sequence, as [{what[:-1]}]")
    return tuple(converted(value, dtype) for value in values)


def converted_kwargs(kwargs: object, dtype: torch.dtype | None) -> dict[str, object]:
    """Return the keyword arguments of the model, each as :func:`converted`."""
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"kwargs is of type {type(kwargs).__name__}; give a mapping from names, as {{'mask': mask}}")
    return {name: converted(value, dtype) for name, value in kwargs.items()}


def wrong_keyword(model: nn.Module, positional: int, kwargs: Mapping[str, object]) -> str:
    """Return what is wrong with a name in ``kwargs`` behind ``positional`` inputs; empty if nothing is wrong."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return ""
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    taken = named[:positional]
    free = [name for name in by_name if name not in taken]
    for name in kwargs:
        if name in taken and name in by_name:
            return f"kwargs has {name!r}, which is input {taken.index(name)} already"
        if name not in free and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            hint = did_you_mean(name, free) or (f"; it takes {', '.join(free)}" if free else "; it takes no more")
            return f"kwargs has {name!r}, which the forward of {type(model).__name__} does not take{hint}"
    return ""


def _check_plan(plan: object, model: nn.Module) -> None:
    """Refuse a plan that no rank can call, or that names no submodule and so would silently leave it unsharded."""
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
    """Return whether a key of a plan matches a submodule, as ``parallelize_module`` does: part by part, with globs."""
    keys, parts = key.split("."), module.split(".")
    return len(keys) == len(parts) and all(map(fnmatch, parts, keys))


def built_model(model: nn.Module | Callable[[], nn.Module] | str, seed: int, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of the model, which a function may make, with parameters and buffers as :func:`converted`."""
    built: object = model
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype {dtype} is not one of floating point")
    if not isinstance(model, nn.Module):
        if not isinstance(model, str) and not callable(model):
            raise ValueError(f"model {model!r} is neither a torch.nn.Module nor a function that makes one")
        with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it is
            torch.manual_seed(seed)
            built = resolve(model)() if isinstance(model, str) else model()
    if not isinstance(built, nn.Module):
        raise ValueError(f"model {model!r} made a {type(built).__name__}, not a torch.nn.Module")
    copy: nn.Module = unpack(packed_for_ranks(built, f"model {type(built).__name__}"))
    # Module.to(dtype) would keep only the real parts of complex numbers
    copy._apply(lambda tensor: converted(tensor, dtype))  # type: ignore[no-untyped-call]
    return copy


def converted(value: _Value, dtype: torch.dtype | None) -> _Value:
    """Return a floating-point tensor as ``dtype``, a complex one as the matching complex dtype, and others unchanged.

    >>> converted(torch.ones(2, dtype=torch.complex64), torch.float64).dtype
    torch.complex128
    """
    if dtype is None or not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():  # few ops take complex numbers with parts of less than 32 bits
        dtype = torch.complex128 if dtype is torch.float64 else torch.complex64
    elif not value.is_floating_point():
        return value
    return cast(_Value, value.detach().to(dtype).requires_grad_(value.requires_grad))


def packed_for_ranks(value: object, what: str) -> bytes:
    """Return ``value``, which messages call ``what``, packed; raise a ValueError if ranks could not import it."""
    advice = "put it at the top level of a module that the ranks can import, not of the script itself"
    try:
        data = pack(value)
    except (pickle.PicklingError, AttributeError) as error:
        raise ValueError(f"the ranks cannot be given {what}: {error}; {advice}") from error
    except (TypeError, RuntimeError) as error:  # never picklable, such as parametrized modules
        raise ValueError(f"the ranks cannot be given {what}: {error}") from error
    if b"__main__" in data:
        raise ValueError(f"the ranks cannot be given {what}: part of it is from __main__; {advice}")
    return data


def _spread(text: str, mesh: MeshSpec) -> str:
    """Return the text of placements that are ``text`` on every mesh dim."""
    return text if mesh.ndim == 1 else f"({', '.join([text] * mesh.ndim)})"


def _parsed_placements(text: str, mesh: MeshSpec, what: str) -> Placements:
    """Return the placements in ``text``; a single R stands for all mesh dims. Messages call the argument ``what``."""
    if not isinstance(text, str):
        raise ValueError(f"{what}: {text!r} is no text such as 'S(0)' or '(S(0), R)'")
    try:
        parsed = parse_placements(_spread(text, mesh) if text == "R" else text)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    if len(parsed) != mesh.ndim:
        raise ValueError(f"{what} {text!r} is for {plural(len(parsed), 'mesh dim')}, mesh {mesh} has {mesh.ndim}")
    if not Alphabet.legal(parsed):
        raise ValueError(f"{what} {text!r} mixes reductions, which have no defined order")
    return parsed


def fits(placements: Placements, ndim: int) -> bool:
    """Return whether a tensor of ``ndim`` dims has the dims that ``placements`` shard."""
    return all((dim := sharded_dim(placement)) is None or 0 <= dim < ndim for placement in placements)


def placements_of(
    given: str | Sequence[str | None] | None, values: Sequence[object], mesh: MeshSpec
) -> tuple[Placements | None, ...]:
    """Return the placements of each value, None for no tensor; ``given`` is one text for all values or one each."""
    texts = _one_each(given, len(values), "placements", "of inputs and targets")
    return tuple(
        _placed_as(text, value, mesh, "placements", f"input {number}")
        for number, (text, value) in enumerate(zip(texts, values, strict=True))
    )


def kwargs_placements_of(
    given: Mapping[str, str] | None, kwargs: Mapping[str, object], mesh: MeshSpec
) -> dict[str, Placements | None]:
    """Return the placements of each value of ``kwargs``, replicated if ``given`` has none; None if it is no tensor."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"kwargs_placements is {given!r}; give a mapping from names, as {{'mask': 'S(0)'}}")
    texts = given or {}
    for name, text in texts.items():
        if name not in kwargs:
            hint = did_you_mean(str(name), kwargs) or f"; there are {', '.join(kwargs) or 'none'}"
            raise ValueError(f"kwargs_placements has {name!r}, which is none of kwargs{hint}")
        if not isinstance(kwargs[name], torch.Tensor):
            raise ValueError(
                f"kwargs_placements {text!r} of {name!r}: it is no tensor but of type {type(kwargs[name]).__name__}"
            )
    return {
        name: _placed_as(texts.get(name), value, mesh, "kwargs_placements", repr(name))
        for name, value in kwargs.items()
    }


def _one_each(given: _Text | Sequence[_Text], count: int, what: str, each: str) -> list[_Text]:
    """Return ``count`` texts; one text stands for all values. Messages call the values ``what`` and ``each``."""
    if given is None or isinstance(given, str):
        return [given] * count
    if not isinstance(given, Sequence):
        raise ValueError(f"{what}: {given!r} is no text such as 'S(0)', and no sequence of them")
    if len(given) != count:
        entries, there = plural(len(given), "entry", "entries"), "there is" if count == 1 else "there are"
        raise ValueError(f"{what} has {entries}; give one for each {each}, of which {there} {count}")
    return list(given)


def _placed_as(text: str | None, value: object, mesh: MeshSpec, what: str, which: str) -> Placements | None:
    if not isinstance(value, torch.Tensor):
        return None
    placements = _parsed_placements("R" if text is None else text, mesh, what)
    if not fits(placements, value.ndim):
        raise ValueError(f"{what} {text!r} of {which}: it is a tensor of {plural(value.ndim, 'dim')}")
    return placements


def misfit(placements: Placements, ndim: int, number: int, source: str = "") -> ValueError:
    """Return the exception for an output that lacks a dim that its placements shard."""
    return ValueError(
        f"outputs {format_placements(placements)!r}{source} of output {number}: it is a tensor of {plural(ndim, 'dim')}"
        "; give outputs that fit, as one text or one each"
    )


def _plan_text(plan: object) -> str:
    """Return the name of a plan in messages."""
    if isinstance(plan, Mapping):
        return "a plan for " + ", ".join(map(str, plan))
    if isinstance(plan, partial):
        plan = plan.func
    return plan if isinstance(plan, str) else getattr(plan, "__name__", type(plan).__name__)
