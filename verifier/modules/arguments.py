"""The arguments of ``verify_module``: checked, and made into a :class:`ModuleCase`."""

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
"""A plan for ``parallelize_module`` on a 1-D mesh, or ``plan(model, mesh)``, which the ranks import by its name."""

DIM_NAMES = ("pp", "dp", "tp")
"""Names of the mesh dims where a call gives none: the last of these, so that a mesh of one dim is ``tp``."""

_Text = TypeVar("_Text", str, str | None)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ModuleCase:
    """A model, the plan that shards it, and the values that it gets; ranks get it packed.

    Attributes
    ----------
    inputs, targets, kwargs
        Global values. ``placements`` has one entry for each input, then for each target; ``kwargs_placements`` has
        those of ``kwargs``. An entry is None for what is no tensor.
    outputs, loss_placements
        How plain tensors that the ranks return stand for the output and the loss, as text; None for the default.
    disturbed
        How far off the gradients of a local model are.

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
        """The placements of the inputs, by what messages call them."""
        positional = enumerate(self.placements[: len(self.inputs)])
        return {f"input {name}": p for name, p in (*positional, *self.kwargs_placements.items())}

    @property
    def placed(self) -> tuple[Placements | None, ...]:
        """The placements of the inputs, then of the targets."""
        return (*self.input_placements.values(), *self.placements[len(self.inputs) :])

    def output_placements(self, ndims: Sequence[int]) -> tuple[Placements, ...]:
        """Return how each tensor that the model returns is placed where it is a plain one on the ranks.

        ``ndims`` are the numbers of their dims. One text for all of them need not fit all: on the ranks, some may be
        DTensors.
        """
        if self.outputs is None:
            replicated = parse_placements(_spread("R", self.mesh))
            return (next((p for p in self.placed if p is not None), replicated),) * len(ndims)
        texts = _one_each(self.outputs, len(ndims), "outputs")
        if len(texts) != len(ndims):
            raise ValueError(
                f"outputs has {plural(len(texts), 'entry', 'entries')}; give one for each tensor that the model "
                f"returns, of which there {'is' if len(ndims) == 1 else 'are'} {len(ndims)}"
            )
        parsed = [_parsed_placements(text, self.mesh, "outputs") for text in texts]
        for number, (placements, ndim) in enumerate(zip(parsed, ndims, strict=True)):
            if not fits(placements, ndim) and not (isinstance(self.outputs, str) and any(map(fits, parsed, ndims))):
                raise misfit(placements, ndim, number)
        return tuple(parsed)

    def whole_loss(self, outputs: Sequence[Placements]) -> Placements:
        """Return how a plain loss stands for the whole one, given the placements of the outputs."""
        averaged = ", ".join("P(avg)" if placement.is_shard() else "R" for placement in outputs[0])
        placements = _parsed_placements(self.loss_placements or f"({averaged})", self.mesh, "loss_placements")
        if not fits(placements, 0):
            what = f"loss_placements {self.loss_placements!r}"
            raise ValueError(f"{what}: a loss has no dim to cut; give P(avg), P(sum) or R")
        return placements


def _check_mesh(mesh: MeshSpec, names: tuple[str, ...], plan: ParallelPlan) -> None:
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


def converted_values(values: object, what: str, dtype: torch.dtype | None) -> tuple[object, ...]:
    """Return inputs or targets, which messages call ``what``, each as :func:`converted`."""
    if isinstance(values, torch.Tensor):
        raise ValueError(f"{what} is one tensor; give a sequence of them, as [{what[:-1]}]")
    if isinstance(values, Mapping) and what == "inputs":
        raise ValueError("inputs is a mapping; give what the model takes by name as kwargs, and [] as inputs")
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{what} is of type {type(values).__name__}; give a sequence, as [{what[:-1]}]")
    return tuple(converted(value, dtype) for value in values)


def converted_kwargs(kwargs: object, dtype: torch.dtype | None) -> dict[str, object]:
    """Return the values that the model gets by name, each as :func:`converted`."""
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"kwargs is of type {type(kwargs).__name__}; give a mapping from names, as {{'mask': mask}}")
    return {name: converted(value, dtype) for name, value in kwargs.items()}


def wrong_keyword(model: nn.Module, positional: int, kwargs: Mapping[str, object]) -> str:
    """Return what is wrong with a name in ``kwargs``, behind so many ``positional`` inputs; empty if nothing is."""
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
    """Return a copy of the model, or of what a function makes, with parameters and buffers as :func:`converted`."""
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
    # Module.to(dtype) would leave of complex numbers their real parts
    copy._apply(lambda tensor: converted(tensor, dtype))  # type: ignore[no-untyped-call]
    return copy


def converted(value: _Value, dtype: torch.dtype | None) -> _Value:
    """Return a tensor of floating point as ``dtype``, a complex one as complex numbers of it; all else as it is.

    >>> converted(torch.ones(2, dtype=torch.complex64), torch.float64).dtype
    torch.complex128
    """
    if dtype is None or not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():  # few ops take those of less than 32 bits a part
        dtype = torch.complex128 if dtype is torch.float64 else torch.complex64
    elif not value.is_floating_point():
        return value
    return cast(_Value, value.detach().to(dtype).requires_grad_(value.requires_grad))


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
    except (pickle.PicklingError, AttributeError) as error:
        raise ValueError(f"the ranks cannot be given {what}: {error}; {advice}") from error
    except (TypeError, RuntimeError) as error:  # of what cannot be pickled wherever it is, as parametrized modules
        raise ValueError(f"the ranks cannot be given {what}: {error}") from error
    if b"__main__" in data:
        raise ValueError(f"the ranks cannot be given {what}: part of it is from __main__; {advice}")
    return data


def _spread(text: str, mesh: MeshSpec) -> str:
    """Return placements as text that has ``text`` on every mesh dim."""
    return text if mesh.ndim == 1 else f"({', '.join([text] * mesh.ndim)})"


def _parsed_placements(text: str, mesh: MeshSpec, what: str) -> Placements:
    """Return the placements of an argument, called ``what`` in messages; a single R stands for all mesh dims."""
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
    """Return whether a tensor of ``ndim`` dims has those that ``placements`` cut."""
    return all((dim := sharded_dim(placement)) is None or 0 <= dim < ndim for placement in placements)


def placements_of(
    given: str | Sequence[str | None] | None, values: Sequence[object], mesh: MeshSpec
) -> tuple[Placements | None, ...]:
    """Return how each value is placed: one text for all of them, or one each; None for what is no tensor."""
    texts = _one_each(given, len(values), "placements")
    if len(texts) != len(values):
        raise ValueError(
            f"placements has {plural(len(texts), 'entry', 'entries')}; give one for each of inputs and targets, "
            f"of which there {'is' if len(values) == 1 else 'are'} {len(values)}"
        )
    return tuple(
        _placed_as(text, value, mesh, "placements", f"input {number}")
        for number, (text, value) in enumerate(zip(texts, values, strict=True))
    )


def kwargs_placements_of(
    given: Mapping[str, str] | None, kwargs: Mapping[str, object], mesh: MeshSpec
) -> dict[str, Placements | None]:
    """Return how each value of ``kwargs`` is placed: replicated unless ``given`` says so, None for no tensor."""
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


def _one_each(given: _Text | Sequence[_Text], count: int, what: str) -> list[_Text]:
    """Return one text for all of ``count`` values, or one each, as a list."""
    if given is None or isinstance(given, str):
        return [given] * count
    if not isinstance(given, Sequence):
        raise ValueError(f"{what}: {given!r} is no text such as 'S(0)', and no sequence of them")
    return list(given)


def _placed_as(text: str | None, value: object, mesh: MeshSpec, what: str, which: str) -> Placements | None:
    if not isinstance(value, torch.Tensor):
        return None
    placements = _parsed_placements("R" if text is None else text, mesh, what)
    if not fits(placements, value.ndim):
        raise ValueError(f"{what} {text!r} of {which}: it is a tensor of {plural(value.ndim, 'dim')}")
    return placements


def misfit(placements: Placements, ndim: int, number: int, source: str = "") -> ValueError:
    """Return the exception for an output that has not the dims which its placements cut."""
    return ValueError(
        f"outputs {format_placements(placements)!r}{source} of output {number}: it is a tensor of {plural(ndim, 'dim')}"
        "; give outputs that fit, as one text or one each"
    )


def _plan_text(plan: object) -> str:
    """Return what messages call a plan."""
    if isinstance(plan, Mapping):
        return "a plan for " + ", ".join(map(str, plan))
    if isinstance(plan, partial):
        plan = plan.func
    return plan if isinstance(plan, str) else getattr(plan, "__name__", type(plan).__name__)
