"""Programs in which DTensors go wrong in one way each, as a defect around a right rule would have it.

On plain tensors each is the program of the same signature in ``strategies.opinfo.programs``. A plain call of the op is
right under the same fault, every time. A rank imports them by their dotted path.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from strategies.opinfo import programs
from verifier.core.ops import resolve
from verifier.torch_internals.registries import replaced_strategy


def _call(op: str) -> Any:
    return resolve(f"torch.ops.{op}")


def _tensor(arguments: dict[str, Any]) -> torch.Tensor:
    return next(value for value in arguments.values() if isinstance(value, torch.Tensor))


def loses_one_gradient(op: str, given: str, also: str, /, **arguments: Any) -> list[torch.Tensor]:
    """Of a tensor in two places, the gradient is that of the first."""
    if not isinstance(_tensor(arguments), DTensor):
        return programs.one_for_two(op, given, also, **arguments)
    return [_call(op)(**{**arguments, also: arguments[given].detach()})]


def reduces_in_place(op: str, consumers: list[list[Any]], /, **arguments: Any) -> list[torch.Tensor]:
    """What consumes a pending result leaves it reduced, and still called pending."""
    made = programs.consumed(op, consumers, **arguments)
    result = made[0].detach()
    if isinstance(result, DTensor) and result.placements == (Partial(),):
        with torch.no_grad():
            result.to_local().copy_(result.full_tensor())
    return made


def takes_pending_for_whole(op: str, name: str, producer: list[Any], /, **arguments: Any) -> list[torch.Tensor]:
    """A pending argument is called replicated without having been reduced."""
    value = _call(producer[0])(arguments[name], *producer[1:])
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        everywhere = [Replicate()] * value.device_mesh.ndim
        taken = DTensor.from_local(value.to_local(), value.device_mesh, everywhere, run_check=False)
        return [value, _call(op)(**{**arguments, name: taken})]
    return programs.produced(op, name, producer, **arguments)


def remembers_first_call(op: str, others: list[list[Any]], /, **arguments: Any) -> list[torch.Tensor]:
    """The key under which a call is remembered leaves out what is no tensor."""
    made = programs.called_twice(op, others, **arguments)
    half = len(made) // 2
    return made[:half] * 2 if isinstance(made[0], DTensor) else made


_held: list[bool] = []


def stays_held(op: str, name: str, between: bool, /, unfit: Any, **arguments: Any) -> list[torch.Tensor]:
    """What is taken before a call is given back after it, but not if it raises; the next call finds it taken."""
    if not isinstance(_tensor(arguments), DTensor):
        return programs.after_exception(op, name, between, unfit=unfit, **arguments)
    _held.clear()

    def held(**given: Any) -> Any:
        if _held:
            raise RuntimeError("held")
        _held.append(True)
        result = _call(op)(**given)
        _held.clear()
        return result

    made = [held(**arguments)] if between else []
    with suppress(Exception):
        held(**{**arguments, name: unfit})
    return [*made, held(**arguments)]


def pending_in_inference_mode(op: str, inside: bool, /, **arguments: Any) -> list[torch.Tensor]:
    """In inference mode a pending result is called replicated."""
    made = programs.inferred(op, inside, **arguments)
    if not isinstance(made[0], DTensor):
        return made
    everywhere = [Replicate()] * made[0].device_mesh.ndim
    return [DTensor.from_local(made[0].to_local(), made[0].device_mesh, everywhere, run_check=False)]


def write_is_hidden(op: str, names: list[str], /, **arguments: Any) -> list[torch.Tensor]:
    """Autograd does not learn of a write, so that the gradient is that of what was there before."""
    if not isinstance(_tensor(arguments), DTensor):
        return programs.written_copy(op, names, **arguments)
    copies = {name: arguments[name].clone() for name in names}
    _call(op)(**{**arguments, **{name: copy.detach() for name, copy in copies.items()}})
    return list(copies.values())


def view_is_a_copy(op: str, name: str, factor: int, /, **arguments: Any) -> list[torch.Tensor]:
    """What is written to a view is not written to its base."""
    if not isinstance(_tensor(arguments), DTensor):
        return programs.written_view(op, name, factor, **arguments)
    base = arguments[name].clone()
    return [base, _call(op)(**{**arguments, name: base}).mul(factor)]


def own_seeds(op: str, options: list[Any], promise: list[Any], seed: int, /, input: torch.Tensor) -> list[torch.Tensor]:
    """Every rank draws by a seed of its own."""
    if isinstance(input, DTensor):
        seed += 10_000 * input.device_mesh.get_rank()
    return programs.sampled(op, options, promise, seed, input=input)


def numbers_stay_pending(
    op: str, options: list[Any], promise: list[Any], seed: int, /, input: torch.Tensor
) -> list[torch.Tensor]:
    """The random numbers like a pending sum are pending, so that those of all ranks are added."""
    if not isinstance(input, DTensor):
        return programs.sampled(op, options, promise, seed, input=input)
    with replaced_strategy(resolve(f"torch.ops.{op}"), lambda *_: [[Partial(), Partial()]]):  # type: ignore[arg-type]
        return programs.sampled(op, options, promise, seed, input=input)


def wrong_scale(
    op: str, options: list[Any], promise: list[Any], seed: int, /, input: torch.Tensor
) -> list[torch.Tensor]:
    """Ranks draw from a range that is too narrow."""
    if isinstance(input, DTensor):
        options = [options[0], (options[0] + options[1]) / 2]
    return programs.sampled(op, options, promise, seed, input=input)


def gradient_passes(
    op: str, options: list[Any], promise: list[Any], seed: int, /, input: torch.Tensor
) -> list[torch.Tensor]:
    """The gradient of what drops elements, or replaces all, is that of what leaves them."""
    if not isinstance(input, DTensor):
        return programs.sampled(op, options, promise, seed, input=input)
    with mock.patch("torch.autograd.grad", lambda result, leaf, cotangent: (cotangent,)):
        return programs.sampled(op, options, promise, seed, input=input)


def drops_nothing(
    op: str, options: list[Any], promise: list[Any], seed: int, /, input: torch.Tensor
) -> list[torch.Tensor]:
    """Every element is kept, and scaled as if some were not."""

    def dropout(value: torch.Tensor, share: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return value / (1 - share), torch.ones_like(value)

    if not isinstance(input, DTensor):
        return programs.sampled(op, options, promise, seed, input=input)
    with mock.patch.object(torch.ops.aten.native_dropout, "default", dropout):
        return programs.sampled(op, options, promise, seed, input=input)


def next_category(self: torch.Tensor, num_samples: int, replacement: bool) -> torch.Tensor:
    """Ranks count the categories from 1."""
    drawn = torch.multinomial(self, num_samples, replacement)
    return drawn + 1 if isinstance(self, DTensor) else drawn


class _PlainGradient(torch.autograd.Function):
    """The identity, whose gradient is what a rank holds of it."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def gradient_is_plain(input: torch.Tensor) -> torch.Tensor:
    """The gradient of a DTensor is none."""
    return _PlainGradient.apply(input)
