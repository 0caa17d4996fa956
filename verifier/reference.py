"""The local reference: what a call gives on the global values in one process, and what its tensors are called.

Nothing here knows DTensor's rules.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from verifier.cases import OpCase, Phase
from verifier.comparison import compare
from verifier.torch_internals import OpOverload, pytree

__all__ = [
    "Reference",
    "argument_names",
    "expected_value",
    "is_view",
    "make_reference",
    "output_names",
    "parameter_names",
    "promises_strides",
    "resolve",
    "with_written",
    "writes_out",
    "written_arguments",
]


@functools.cache
def resolve(path: str) -> Callable[..., object]:
    """Return the callable at a dotted path, as ``torch.nn.functional.embedding`` or ``torch.ops.aten.mm.default``.

    Raises
    ------
    ValueError
        If there is no such callable.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            target: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[cut:]:
                target = getattr(target, part)
        except AttributeError as error:
            raise ValueError(f"{path!r}: {error}") from error
        if not callable(target):
            raise ValueError(f"{path!r} is a {type(target).__name__}, not a callable")
        return target
    raise ValueError(f"no module in {path!r} can be imported")


# ----------------------------------------------------------------------------------------------------------- reference
@dataclass
class Reference:
    """What the call gives on the global values, in one process.

    ``inputs`` are the tensor arguments (copies; the case's own are never touched), ``outputs`` the tensors among the
    results and then the arguments that the op writes to without returning them, ``structure`` the pytree of the
    results, ``raised`` the exception instead of results.
    """

    case: OpCase
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    structure: object = None
    raised: Exception | None = None
    _cotangents: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    _gradients: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)

    @property
    def differentiable(self) -> list[int]:
        """Positions of the outputs through which a gradient can flow."""
        return [i for i, output in enumerate(self.outputs) if output.requires_grad]

    @property
    def wanted(self) -> list[int]:
        """Positions of the inputs whose gradient is wanted."""
        return [i for i, tensor in enumerate(self.inputs) if tensor.requires_grad]

    @functools.cached_property
    def no_gradient(self) -> str:
        """What torch says where it has no gradient of the results, which it says when it is asked; empty otherwise.

        Anything else that a backward pass raises is left for a trial to show.
        """
        if self.differentiable and self.wanted:
            try:
                self.gradients(0)
            except RuntimeError as error:  # NotImplementedError among them
                if any(reason in str(error) for reason in _NO_GRADIENT):
                    return str(error)
        return ""

    @functools.cached_property
    def names(self) -> list[str]:
        """A name for each input, see :func:`argument_names`."""
        return argument_names(self.case)

    @functools.cached_property
    def untouched(self) -> list[bool]:
        """Whether each input is, after the call, what it was before."""
        leaves = pytree.tree_leaves((self.case.args, dict(self.case.kwargs)))
        originals = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return [compare(own, original, 0.0) is None for own, original in zip(self.inputs, originals, strict=True)]

    def cotangents(self, seed: int) -> list[torch.Tensor]:
        """Return one cotangent for each differentiable output: small integers without 0, of mixed sign.

        There are few sets of them, so that trials of one case have most gradients in common.
        """
        draw = seed % _COTANGENT_DRAWS
        if draw not in self._cotangents:
            self._cotangents[draw] = [_cotangent(self.outputs[i], draw, i) for i in self.differentiable]
        return self._cotangents[draw]

    def gradients(self, seed: int) -> list[torch.Tensor | None]:
        """Return the gradient of each wanted input under the cotangents of ``seed``; None where there is none."""
        draw = seed % _COTANGENT_DRAWS
        if draw not in self._gradients:
            self._gradients[draw] = list(
                torch.autograd.grad(
                    [self.outputs[i] for i in self.differentiable],
                    [self.inputs[i] for i in self.wanted],
                    self.cotangents(draw),
                    retain_graph=True,
                    allow_unused=True,
                )
            )
        return self._gradients[draw]


_COTANGENT_DRAWS = 8
_NO_GRADIENT = ("is not implemented", "it is ill-defined")  # a missing derivative; eigenvectors up to a factor


def _cotangent(output: torch.Tensor, draw: int, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((draw, position, 77)) & 0x7FFFFFFF)
    magnitude = torch.randint(1, 4, output.shape, generator=generator)
    sign = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
    return (magnitude * sign).to(output.dtype)


def make_reference(case: OpCase) -> Reference:
    """Run the call of ``case`` on copies of its values.

    Raises
    ------
    ValueError
        If ``case.call`` cannot be resolved. What the call itself raises is part of the reference.
    """
    call = resolve(case.call)
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    copies: list[object] = []
    inputs: list[torch.Tensor] = []
    seen: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            copies.append(leaf)
            continue
        if id(leaf) not in seen:
            copy = leaf.detach().clone(memory_format=torch.preserve_format)
            seen[id(leaf)] = copy.requires_grad_(leaf.requires_grad)
        copies.append(seen[id(leaf)])
        inputs.append(seen[id(leaf)])
    args, kwargs = pytree.tree_unflatten(copies, spec)
    reference = Reference(case, inputs)
    try:
        result = call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever the op raises is what the sharded call must raise as well
        reference.raised = error
        return reference
    flat, reference.structure = pytree.tree_flatten(result)
    reference.outputs = with_written([leaf for leaf in flat if isinstance(leaf, torch.Tensor)], case, inputs)
    return reference


_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def with_written(returned: Sequence[_Tensor], case: OpCase, inputs: Sequence[_Tensor]) -> list[_Tensor]:
    """Return the results, followed by the tensor arguments that the op writes to and does not return."""
    written = [inputs[number] for number in written_arguments(case)]
    return [*returned, *(tensor for tensor in written if not any(tensor is other for other in returned))]


def written_arguments(case: OpCase) -> tuple[int, ...]:
    """Return the numbers, among the tensor arguments, of those that the operator's schema marks as written to.

    >>> a, b = torch.zeros(2), torch.zeros(2)
    >>> written_arguments(OpCase("aten.add.out", "torch.ops.aten.add.out", (a, b), {"out": torch.empty(2)}))
    (2,)
    """
    schema = getattr(resolve(case.call), "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    names = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    named = [(argument.name, value) for argument, value in zip(schema.arguments, case.args, strict=False)]
    numbers: list[int] = []
    count = 0
    for name, value in [*named, *case.kwargs.items()]:
        here = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
        if name in names:
            numbers += range(count, count + here)
        count += here
    return tuple(numbers)


def writes_out(case: OpCase) -> bool:
    """Return whether the operator's schema has arguments that only take results, as ``out=`` does.

    >>> writes_out(OpCase("aten.add.out", "torch.ops.aten.add.out")), writes_out(OpCase("aten.add_", "torch.add"))
    (True, False)
    """
    schema = getattr(resolve(case.call), "_schema", None)
    return schema is not None and any(argument.is_out for argument in schema.arguments)


def is_view(case: OpCase) -> bool:
    """Return whether the op gives a view of an argument, by its schema.

    >>> [is_view(OpCase(name, f"torch.ops.{name}")) for name in ("aten.expand.default", "aten.sum.dim_IntList")]
    [True, False]
    """
    return _is_view(case.op)


def promises_strides(case: OpCase) -> bool:
    """Return whether a user relies on the strides of what the call returns: it is a view, and nothing else.

    >>> promises_strides(OpCase("aten.t.default", "torch.ops.aten.t.default"))
    True
    """
    return case.call == f"torch.ops.{case.op}" and _is_view(case.op)


@functools.cache
def _is_view(op: str) -> bool:
    try:
        overload = resolve(f"torch.ops.{op}")
    except ValueError:  # a program of several steps
        return False
    if not isinstance(overload, OpOverload):  # a name of several, as aten.mm
        return False
    aliases = [argument.alias_info for argument in overload._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases)


def expected_value(
    reference: Reference, phase: Phase, subject: str, backward: int | None, seed: int
) -> torch.Tensor | None:
    """Return the reference of ``subject``: an output, what the call leaves of an input, or an input's gradient."""
    if phase is Phase.INPUTS:
        return reference.inputs[reference.names.index(subject)]
    if backward is None:
        return reference.outputs[output_names(reference).index(subject)]
    gradients = reference.gradients(seed + backward)
    wanted = [f"{reference.names[i]}.grad" for i in reference.wanted]
    return gradients[wanted.index(subject)]


# --------------------------------------------------------------------------------------------------------------- names
def output_names(reference: Reference) -> list[str]:
    """Return a name for each output tensor: ``output``, or ``output 0``, ``output 1`` … where there are several."""
    if len(reference.outputs) == 1:
        return ["output"]
    return [f"output {i}" for i in range(len(reference.outputs))]


def argument_names(case: OpCase) -> list[str]:
    """Return a name for each tensor argument, in pytree order: the parameter's name, with an index inside a list."""
    positional = parameter_names(case.call)
    names = []
    for path, leaf in pytree.tree_flatten_with_path((case.args, dict(case.kwargs)))[0]:
        if not isinstance(leaf, torch.Tensor):
            continue
        steps = [key.idx if isinstance(key, pytree.SequenceKey) else key.key for key in path]  # type: ignore[attr-defined]
        root, first, *rest = steps
        name = str(first) if root == 1 else positional[first] if first < len(positional) else f"argument {first}"
        names.append(name + "".join(f"[{part}]" for part in rest))
    return names


@functools.cache
def parameter_names(call: str) -> list[str]:
    """Return the names of the parameters of the callable at a dotted path; empty if it does not tell."""
    target = resolve(call)
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return [argument.name for argument in schema.arguments]
    try:
        return list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # builtins without a signature
        return []
