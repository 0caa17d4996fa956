"""The local reference: the results of a call on the global values in one process, and the names of its tensors.

Nothing here knows DTensor's rules.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from verifier.core.case import OpCase
from verifier.core.ops import argument_names, resolve, with_written
from verifier.core.verdict import Phase
from verifier.oracle.comparison import Spot, compare
from verifier.torch_internals.names import pytree

__all__ = [
    "Reference",
    "expected_value",
    "make_reference",
    "output_names",
]

_CPU = torch.device("cpu")


@dataclass
class Reference:
    """The results of the call on the global values, in one process.

    ``inputs`` are copies of the tensor arguments; the case's own tensors are never changed. ``outputs`` are the tensors
    among the results, then the arguments that the op writes to and does not return. ``structure`` is the pytree of the
    results, ``raised`` the exception if there are no results.
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
        """Torch's message if it has no gradient of the results, which only a backward pass shows; empty otherwise.

        Any other exception of a backward pass is left to the trials.
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
        """Whether each input has the same values after the call as before."""
        leaves = pytree.tree_leaves((self.case.args, dict(self.case.kwargs)))
        originals = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return [compare(own, original, 0.0) is None for own, original in zip(self.inputs, originals, strict=True)]

    def cotangents(self, seed: int) -> list[torch.Tensor]:
        """Return one cotangent for each differentiable output: small integers without 0, of mixed sign.

        There are only a few sets of cotangents, so that trials of one case can share gradients.
        """
        draw = seed % _COTANGENT_DRAWS
        if draw not in self._cotangents:
            self._cotangents[draw] = [_cotangent(self.outputs[i], draw, i) for i in self.differentiable]
        return self._cotangents[draw]

    def gradients(self, seed: int) -> list[torch.Tensor | None]:
        """Return the gradient of each wanted input under the cotangents of ``seed``; None for an unused input."""
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
    return (magnitude * sign).to(output.device, output.dtype)


def make_reference(case: OpCase, device: torch.device = _CPU) -> Reference:
    """Run the call of ``case`` on copies of its values, which are on ``device``.

    Raises
    ------
    ValueError
        If ``case.call`` cannot be resolved. An exception of the call itself is part of the reference.
    """
    call = resolve(case.call)
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    copies: list[object] = []
    inputs: list[torch.Tensor] = []
    seen: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            copies.append(device if leaf == _CPU else leaf)  # a call is drawn on the CPU, and means its own device
            continue
        if id(leaf) not in seen:
            copy = leaf.detach().to(device, copy=True, memory_format=torch.preserve_format)
            seen[id(leaf)] = copy.requires_grad_(leaf.requires_grad)
        copies.append(seen[id(leaf)])
        inputs.append(seen[id(leaf)])
    args, kwargs = pytree.tree_unflatten(copies, spec)
    reference = Reference(case, inputs)
    try:
        result = call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the sharded call must raise the same
        reference.raised = error
        return reference
    flat, reference.structure = pytree.tree_flatten(result)
    reference.outputs = with_written([leaf for leaf in flat if isinstance(leaf, torch.Tensor)], case, inputs)
    return reference


def expected_value(reference: Reference, spot: Spot, seed: int) -> torch.Tensor | None:
    """Return the reference of an output, of an input after the call, or of the gradient of an input; a dense one."""
    if spot.phase is Phase.INPUTS:
        return reference.inputs[reference.names.index(spot.subject)]
    if spot.backward is None:
        return reference.outputs[output_names(reference).index(spot.subject)]
    gradients = reference.gradients(seed + spot.backward)
    wanted = [f"{reference.names[i]}.grad" for i in reference.wanted]
    gradient = gradients[wanted.index(spot.subject)]
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def output_names(reference: Reference) -> list[str]:
    """Return a name for each output tensor: ``output``, or ``output 0``, ``output 1`` … if there are several."""
    if len(reference.outputs) == 1:
        return ["output"]
    return [f"output {i}" for i in range(len(reference.outputs))]
