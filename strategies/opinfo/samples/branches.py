"""Dtypes, extents, strides and numbers of dims on which a rule branches, so that DTensor claims what it else does not.

A rule that raises for some of them branches, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from strategies.opinfo.calls.call import Call, attempt
from strategies.opinfo.samples.argument_spellings import Variation
from verifier.core.case import OpCase
from verifier.rules.claims import claims_and_failures
from verifier.torch_internals.amending.propagation import is_torchs

__all__ = ["branches"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
_FACTORS = (8, 64)
_MOST_ELEMENTS = 1 << 16
_MOST_DIMS = 5
_USUAL_DIMS = 3
"""Of an op that goes through elements, a call of so many dims is made in any case."""
_EXTENT = 2


def branches(call: Call) -> Iterator[Variation]:
    """Yield the changes of a call at which the op's rules, of the user's, claim what they do not claim of the call.

    Changes at which rules raise, and do not raise for the call, are yielded, too.

    Torch's own rules are left out, because there are hundreds of them.
    """
    if is_torchs(call.op):
        return
    usual = _claimed(call)
    for variation in (*_dtypes(call), *_extents()):
        if _claimed(variation.apply(call)) - usual:
            yield variation
    kinds = _kinds(usual)
    for variation in _strides(call):
        if _kinds(_claimed(variation.apply(call))) - kinds:
            yield variation
    few = max((tensor.ndim for tensor in call.tensors), default=0) < _USUAL_DIMS
    for ndim, variation in enumerate(_dims(call)):
        if (few and ndim == _USUAL_DIMS) or _kinds(_claimed(variation.apply(call))) - kinds:
            yield variation


def _claimed(call: Call | None) -> frozenset[str]:
    if call is None or attempt(call) is None:
        return frozenset()
    case = OpCase(str(call.op), f"torch.ops.{call.op}", call.args, call.kwargs, "opinfo")
    return claims_and_failures(case, _EXTENT)


def _kinds(rules: frozenset[str]) -> frozenset[str]:
    """Return rules without the dims that they shard: these are others where a tensor has another number of dims."""
    digits = str.maketrans("", "", "0123456789")
    return frozenset(rule.translate(digits) for rule in rules)


# ------------------------------------------------------------------------------------------------------------- changes
def _dtypes(call: Call) -> Iterator[Variation]:
    given = {tensor.dtype for tensor in call.tensors}
    for dtype in _DTYPES:
        if dtype not in given:
            yield Variation(f"all floats as {dtype}", partial(_each, partial(_converted, dtype=dtype)))


def _extents() -> Iterator[Variation]:
    for factor in _FACTORS:
        yield Variation(f"all extents {factor} times as large", partial(_each, partial(_larger, factor=factor)))


def _strides(call: Call) -> Iterator[Variation]:
    if any(tensor.ndim > 1 for tensor in call.tensors):
        yield Variation("the first dim is the innermost", partial(_each, _first_innermost), strided=True)
    elif _goes_through_elements(call):
        yield Variation("2 dims, the first is the innermost", partial(_each, _columns), strided=True)


def _dims(call: Call) -> Iterator[Variation]:
    if _goes_through_elements(call):
        for ndim in range(_MOST_DIMS + 1):
            yield Variation(f"{ndim} dims", partial(_each, partial(_with_dims, ndim=ndim)))


def _goes_through_elements(call: Call) -> bool:
    return torch.Tag.pointwise in call.op.tags and all(tensor.ndim for tensor in call.tensors)


def _each(change: Callable[[torch.Tensor], torch.Tensor], call: Call) -> Call | None:
    leaves = [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
    if sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)) > _MOST_ELEMENTS:
        return None
    return call.with_leaves(leaves)


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _larger(tensor: torch.Tensor, factor: int) -> torch.Tensor:
    """Return a tensor with the same values, repeated, so that indices stay within bounds; extents of 1 stay."""
    shape = [extent * factor if extent > 1 else extent for extent in tensor.shape]
    if math.prod(shape) > _MOST_ELEMENTS or not tensor.numel():
        return tensor
    return tensor.repeat([new // old for new, old in zip(shape, tensor.shape, strict=True)])


def _first_innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same values, of whose elements neighbours on the first dim are neighbours in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.ndim > 1 else tensor


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    return _first_innermost(_with_dims(tensor, 2))


def _with_dims(tensor: torch.Tensor, ndim: int) -> torch.Tensor:
    """Return a tensor of ``ndim`` dims with the same values: the first ones are merged, or new ones have 2 copies."""
    if not ndim:
        return tensor.flatten()[0]
    if tensor.ndim > ndim:
        return tensor.reshape(-1, *tensor.shape[tensor.ndim - ndim + 1 :])
    return tensor.expand(*(2,) * (ndim - tensor.ndim), *tensor.shape).clone()
