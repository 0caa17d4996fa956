"""Runs calls of a user's op, which may do anything: write to what it does not declare, or refuse what it is given."""

from __future__ import annotations

import torch

from strategies.opinfo.calls.call import Call, attempt, outcome, parameters, quiet, tensors_of
from verifier.torch_internals.ops import fake_tensors

__all__ = ["accepts", "copied", "has_other_dtypes", "has_other_shapes", "resizes", "same_as_fake", "undeclared_write"]


def copied(call: Call) -> Call:
    """Return the call on copies of its tensors."""
    return call.with_leaves([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves])


def accepts(call: Call, on_fake_tensors: bool = False) -> bool:
    """Return whether the op takes the call, and its fake kernel, if it has one, says the same of the results.

    A call with a tensor for a result that the op has to resize is not taken; torch warns of such calls, too.

    With ``on_fake_tensors`` it has to take the call there, too, or DTensor does not come to ask any rule.
    """
    with quiet():
        results = attempt(copied(call))
    if results is None or resizes(call, results):
        return False
    same = same_as_fake(call, results)
    return same is not False and (same is True or not on_fake_tensors)


def resizes(call: Call, results: list[torch.Tensor]) -> bool:
    """Return whether a tensor that is given as ``out`` and has elements gets another shape.

    ``results`` are those of the call, and then what it has written to.
    """
    written = [parameter for parameter in parameters(call.op) if parameter.written]
    before = [(one.out, tensor) for one in written for tensor in tensors_of(call.values.get(one.name))]
    after = results[len(results) - len(before) :]
    pairs = zip(before, after, strict=True)
    return any(out and one.numel() and one.shape != other.shape for (out, one), other in pairs)


def same_as_fake(call: Call, results: list[torch.Tensor]) -> bool | None:
    """Return whether the op on fake tensors has results of these shapes and dtypes; None if it fails on them."""
    made = _on_fake_tensors(call)
    return None if made is None else _described(made) == _described(results)


def has_other_shapes(call: Call) -> bool:
    """Return whether the op takes the call, and has results of other shapes, but not dtypes, on fake tensors."""
    pairs = _beside_fake(call)
    return all(one.dtype == other.dtype for one, other in pairs) and any(
        one.shape != other.shape for one, other in pairs
    )


def has_other_dtypes(call: Call) -> bool:
    """Return whether the op takes the call, and has results of other dtypes on fake tensors."""
    return any(one.dtype != other.dtype for one, other in _beside_fake(call))


def _beside_fake(call: Call) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each result of the call beside that on fake tensors; none if it fails, or has another number of them."""
    with quiet():
        results = attempt(copied(call))
    made = None if results is None else _on_fake_tensors(call)
    if made is None or results is None or len(made) != len(results):
        return []
    return [*zip(results, made, strict=True)]


def _on_fake_tensors(call: Call) -> list[torch.Tensor] | None:
    with quiet():
        try:
            with fake_tensors() as fake:
                leaves = [fake(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
                return outcome(call.with_leaves(leaves))
        except Exception:  # noqa: BLE001 - the user's fake kernel may raise anything, and there may be none
            return None


def _described(tensors: list[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def undeclared_write(call: Call) -> str:
    """Return the parameter that the op writes to though its schema does not say so; empty if there is none."""
    fresh = copied(call)
    with quiet():
        try:
            fresh.op(*fresh.args, **fresh.kwargs)
        except Exception:  # noqa: BLE001 - the user's kernel may raise anything
            return ""
    declared = {parameter.name for parameter in parameters(call.op) if parameter.written}
    places = zip(call.leaves, fresh.leaves, call.parameter_of, strict=True)
    written = (name for before, after, name in places if name not in declared and _differ(before, after))
    return next(written, "")


def _differ(before: object, after: object) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.shape != after.shape or not torch.equal(before.nan_to_num(), after.nan_to_num())
