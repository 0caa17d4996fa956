"""Builds a chain step by step, and runs it on plain tensors meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

import torch

from strategies.chains.programs import CHAIN
from strategies.chains.steps import run_steps, taken_by
from strategies.tensors import filled
from verifier.core.case import MeshSpec, OpCase
from verifier.oracle.reference import make_reference

__all__ = ["SPECIAL", "STRIDED", "Building", "Part", "UnfitError", "checked"]

STRIDED = "strided shard"
"""The tag of chains whose tensors may begin with strided shards, as views leave them."""
SPECIAL = "special"
"""The tag of chains that are about a NaN or an infinity; all others keep to finite numbers."""
_Choice = TypeVar("_Choice")
_CLEAR = 1e-3
"""Fraction of the largest magnitude: rounding may change the order of values that are closer than this."""


class UnfitError(Exception):
    """A step does not fit the value that it would get."""


class Building:
    """A chain that is being built: its tensors, its steps, and the values that they have on plain tensors.

    Parameters
    ----------
    dtype
        The dtype of tensors of floats.
    seed
        Fixes every choice and all values.
    """

    def __init__(self, mesh: MeshSpec, dtype: torch.dtype, seed: int) -> None:
        self.mesh, self.dtype = mesh, dtype
        self.rng = Random(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        self.steps: list[list[Any]] = []
        self.values: dict[str, Any] = {}
        self._strided = self.chance(0.12)
        self._written: dict[str, int] = {}
        self._program: tuple[str, tuple[object, ...]] | None = None
        self.exact = dtype == torch.float64
        self.special = False
        ranks = mesh.world_size
        sizes = sorted({2, 3, 4, 5, ranks - 1, ranks, ranks + 1} - {0, 1})
        self.rows, self.columns = self.pick(sizes), self.pick(sizes)
        if self.chance(0.4):
            self.columns = self.rows
        self.pending = self.pick(sorted({1, 2, 3, ranks, ranks + 1}))
        """The size of dims over which producers reduce."""

    def pick(self, options: Sequence[_Choice]) -> _Choice:
        """Return one of ``options``, or give up if there is none."""
        if not options:
            raise UnfitError("no choice")
        return self.rng.choice(options)

    def way(self, *ways: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return one of several ways to call something: a path or a name, and the arguments that follow."""
        return self.pick(ways)

    def chance(self, share: float) -> bool:
        """Return True in this share of calls."""
        return self.rng.random() < share

    def size(self) -> tuple[int, int]:
        """Return the rows and columns of results."""
        return self.rows, self.columns

    # -------------------------------------------------------------------------------------------------------- tensors
    def given(self, tensor: torch.Tensor) -> str:
        """Add a tensor argument, and return its name."""
        name = "xyzwuvabcd"[len(self.tensors)]
        self.tensors[name] = tensor
        self.values[name] = tensor.detach().clone()
        return name

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> str:
        """Add a tensor of small integers without 0; most of these require a gradient."""
        tensor = filled(shape, dtype or self.dtype, self.rng.getrandbits(16))
        return self.given(tensor.requires_grad_(tensor.is_floating_point() and self.chance(0.9)))

    def positive(self, *shape: int) -> str:
        """Add a tensor of fractions between 0 and 1."""
        self.exact = False
        generator = torch.Generator().manual_seed(self.rng.getrandbits(16))
        tensor = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
        return self.given(tensor.to(self.dtype).requires_grad_(self.chance(0.8)))

    def ids(self, *shape: int, below: int) -> str:
        """Add a tensor of integers from 0 on, and below ``below``."""
        generator = torch.Generator().manual_seed(self.rng.getrandbits(16))
        return self.given(torch.randint(0, below, shape, generator=generator))

    def bools(self, *shape: int, true: float = 0.5) -> str:
        """Add a tensor of bools, of which the share ``true`` is True."""
        generator = torch.Generator().manual_seed(self.rng.getrandbits(16))
        return self.given(torch.rand(shape, generator=generator) < true)

    def like(self, name: str, *shape: int) -> str:
        """Add a tensor of the dtype of another value, and of its shape if there is no ``shape``."""
        value = self.of(name)
        shape = shape or tuple(value.shape)
        if value.dtype == torch.bool:
            return self.bools(*shape)
        return self.floats(*shape, dtype=value.dtype)

    # ---------------------------------------------------------------------------------------------------------- steps
    def call(self, path: str, *given: object, **options: object) -> str:
        """Add a step, and return the name of its value. A path without ``torch.`` is that of an overload of aten.

        Raises
        ------
        UnfitError
            If torch refuses the step.
        """
        path = path if path.startswith("torch.") else f"torch.ops.aten.{path}"
        name = f"step{len(self.steps) + 1}"
        step = [name, path, list(given), options]
        before = self._held()
        try:
            self.values = run_steps([step], self.values)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
            raise UnfitError(str(error)) from error
        self.steps.append(step)
        for known, value in before.items():
            if not torch.equal(value.nan_to_num(), self.of(known).nan_to_num()):
                self._written[known] = len(self.steps)
        return name

    def _held(self) -> dict[str, torch.Tensor]:
        """Return copies of the tensors that steps have made, without views.

        Versions do not tell what is written to: a norm's statistics keep theirs.
        """
        return {
            name: value.detach().clone()
            for name, value in self.values.items()
            if name not in self.tensors and isinstance(value, torch.Tensor) and not value._is_view()
        }

    def _read_what_was_written(self) -> None:
        """Read each tensor that a step wrote to and that nothing returns, such as a norm's statistics."""
        taken = taken_by(self.steps)
        for name, step in list(self._written.items()):
            value = self.values[name]
            returned = any(other is value for known, other in self.values.items() if known not in taken)
            if not returned and not any(name in taken_by([later]) for later in self.steps[step:]):
                self.call("torch.clone", name)

    def program(self, path: str, *args: object) -> None:
        """Make the case a call of the program at ``path``, with ``args`` and with all tensors by name."""
        self._program = path, args

    def of(self, name: str) -> torch.Tensor:
        """Return the tensor of a name, or give up if it is no tensor."""
        value = self.values[name]
        if not isinstance(value, torch.Tensor):
            raise UnfitError("no tensor")
        return value

    def dim(self, name: str) -> int:
        """Return a dim of a value, counted from either end."""
        ndim = self.of(name).ndim
        return self.pick(range(-ndim, ndim))

    def rounds(self) -> None:
        """Note that the values from here on are not exact."""
        self.exact = False

    def decides(self, name: str) -> None:
        """Give up if rounding could decide what an op that is not continuous makes of a value."""
        value = self.of(name)
        if self.exact or not (value.is_floating_point() or value.is_complex()):
            return
        flat = torch.cat([value.detach().abs().flatten(), value.detach().flatten()]) if value.numel() else value
        largest = float(flat.abs().max()) if flat.numel() else 0.0
        apart = (
            torch.tensor(sorted(set(flat.tolist())), dtype=flat.dtype).diff() if not flat.is_complex() else flat.abs()
        )
        if not largest or not bool((apart > _CLEAR * largest).all()) or float(value.abs().min()) < _CLEAR * largest:
            raise UnfitError("rounding would decide")

    # ----------------------------------------------------------------------------------------------------------- end
    def case(self, op: str) -> OpCase:
        """Return the case of the chain; give up if it makes no tensor that shows anything."""
        if self._program is not None:
            path, args = self._program
            return checked(OpCase(op, path, args, self.tensors, "chains", False))
        self._read_what_was_written()
        used = taken_by(self.steps)
        tensors = {name: tensor for name, tensor in self.tensors.items() if name in used}
        tags = frozenset(tag for tag, holds in ((STRIDED, self._strided), (SPECIAL, self.special)) if holds)
        case = OpCase(op, CHAIN, (self.steps,), tensors, "chains", False, tags)
        return checked(case)


def checked(case: OpCase) -> OpCase:
    """Return ``case``; give up if torch refuses it or its gradient, or if its results show nothing."""
    reference = make_reference(case)
    if reference.raised is not None:
        raise UnfitError(str(reference.raised))
    found = [output.detach() for output in reference.outputs]
    try:
        if reference.differentiable and reference.wanted:
            found += [gradient for gradient in reference.gradients(0) if gradient is not None]
    except RuntimeError as error:  # a value that the backward pass needs was written to
        raise UnfitError(str(error)) from error
    finite = SPECIAL in case.tags or all(map(_is_finite, found))
    if not finite or not any(map(_shows, found)) or any(map(_is_rounding, found)):
        raise UnfitError("shows nothing")
    return case


Part = Callable[..., str]
"""Adds steps to a chain and returns the name of the last value."""


def _is_finite(value: torch.Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())


def _is_rounding(value: torch.Tensor) -> bool:
    """Return whether a result is what rounding leaves of numbers that cancel: arguments are of the order of 1."""
    if not (value.is_floating_point() or value.is_complex()):
        return False
    largest = float(value.abs().max()) if value.numel() else 0.0
    return 0 < largest < 64 * torch.finfo(value.dtype).eps


def _shows(value: torch.Tensor) -> bool:
    return value.numel() > 0 and bool((value != 0).any())
