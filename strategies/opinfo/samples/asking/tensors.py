"""Dtypes, strides and numbers of dims on which a rule of the user's branches; a rule that raises branches, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest

import torch

from strategies.opinfo.calls.call import Call
from strategies.opinfo.calls.checked import is_trusting, is_unchecked
from strategies.opinfo.samples.argument_spellings import Variation
from strategies.opinfo.samples.asking.claimed import claimed, kinds_of
from strategies.opinfo.samples.conversions import converted
from strategies.opinfo.samples.extents import Extents
from verifier.records.memory import with_strides
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.rule_code.constants import reads_strides

__all__ = ["as_floats", "as_integers", "branches", "other_tensors"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
_USUAL_INTEGERS = (torch.int64, torch.uint8, torch.bool)
_INTEGERS = (torch.int32, torch.int8, torch.int16)
"""Those that calls have in any case, and others."""
_FACTORS = (8, 64, 1024)
_LONG = 4099
"""A long extent, which is no multiple of anything; a matrix with as many rows and columns still fits into memory."""
_MOST_ELEMENTS = 1 << 20
_MOST_DIMS = 5
_USUAL_DIMS = 3
"""Of an op that goes through elements, a call of so many dims is made in any case."""
_IMAGES = 4
"""The dims of a batch of images, whose channels may be the innermost ones."""


def branches(call: Call) -> Iterator[Variation]:
    """Yield the changes of a call at which the op's rules, of the user's, claim what they do not claim of the call.

    Changes at which rules raise, and do not raise for the call, are yielded, too.

    Torch's own rules are left out, because there are hundreds of them.
    """
    if is_torchs(call.op):
        return
    usual = claimed(call)
    for variation in (*_dtypes(call), *_short_indices(call), *_extents(), *_long_dims(call)):
        if claimed(variation.apply(call)) - usual:
            yield variation
    of_integers = usual.union(*(claimed(as_integers(dtype).apply(call)) for dtype in _USUAL_INTEGERS))
    for variation in map(as_integers, _INTEGERS):
        if claimed(variation.apply(call)) - of_integers:
            yield variation
    for variation in _of_integers(call):
        if claimed(variation.apply(call)) - usual:
            yield variation
    kinds = kinds_of(usual)
    for variation in _strides(call):
        strided = variation.apply(call)
        now = claimed(strided)
        if now - usual if _is_shaped_as(strided, call) else kinds_of(now) - kinds:
            yield variation
    few = max((tensor.ndim for tensor in call.tensors), default=0) < _USUAL_DIMS
    for ndim, variation in enumerate(_dims(call)):
        if (few and ndim == _USUAL_DIMS) or kinds_of(claimed(variation.apply(call))) - kinds:
            yield variation


def other_tensors(call: Call) -> Iterator[Variation]:
    """Yield the call with other dtypes, strides, numbers of dims and much larger extents, on which rules may branch."""
    yield from (
        *_dtypes(call),
        *_short_indices(call),
        *map(as_integers, (*_USUAL_INTEGERS, *_INTEGERS)),
        *_of_integers(call),
    )
    yield from (*_dims(call), *_strides(call), *_extents(), *_long_dims(call))


def _is_shaped_as(changed: Call | None, call: Call) -> bool:
    """Return whether the tensors of a changed call have the same shapes, so that its rules name the same dims."""
    return changed is not None and [one.shape for one in changed.tensors] == [one.shape for one in call.tensors]


def as_floats(dtype: torch.dtype) -> Variation:
    """Return the change of a call that has other floating or complex numbers in place of floats."""
    return Variation(f"all floats as {dtype}", partial(_each, partial(_converted, dtype=dtype)))


def as_integers(dtype: torch.dtype) -> Variation:
    """Return the change of a call that has integers of a dtype in place of floats."""
    return Variation(f"all floats as {dtype}", partial(_whole, dtype))


def _whole(dtype: torch.dtype, call: Call) -> Call | None:
    """Return the call with integers in place of floats; None if it has no floats, or its kernel checks nothing."""
    floats = tuple(number for number, tensor in enumerate(call.tensors) if tensor.is_floating_point())
    return None if is_trusting(call) or not floats else call.with_tensors(floats, partial(converted, dtype=dtype))


def _of_integers(call: Call) -> Iterator[Variation]:
    """Yield a call of integers alone, as ops of bits take, with bools and with integers of other sizes."""
    if is_trusting(call) or not all(tensor.dtype == torch.int64 for tensor in call.tensors):
        return
    for dtype in (*_USUAL_INTEGERS[1:], *_INTEGERS):
        yield Variation(f"all integers as {dtype}", partial(_each, partial(_integers_as, dtype)))


def _short_indices(call: Call) -> Iterator[Variation]:
    """Yield a call with integers of 32 bits beside tensors of other dtypes, as indices may be."""
    kinds = {tensor.dtype for tensor in call.tensors}
    if torch.int64 in kinds and len(kinds) > 1 and not is_trusting(call):
        yield Variation("indices of 32 bits", partial(_each, _short))


def _short(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.int() if tensor.dtype == torch.int64 else tensor


def _integers_as(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if dtype == torch.bool:
        return tensor > tensor.double().nan_to_num().mean()
    return (tensor if dtype.is_signed else tensor.abs()).to(dtype)


def _dtypes(call: Call) -> Iterator[Variation]:
    given = {tensor.dtype for tensor in call.tensors}
    for dtype in _DTYPES:
        if dtype not in given:
            yield as_floats(dtype)


def _extents() -> Iterator[Variation]:
    for factor in _FACTORS:
        yield Variation(f"all extents {factor} times as large", partial(_each, partial(_larger, factor=factor)))


def _long_dims(call: Call) -> Iterator[Variation]:
    """Yield a long extent for each one that no two dims of a tensor share: kernels for square matrices take long."""
    if is_unchecked(call) or not all(tensor.numel() for tensor in call.tensors):
        return
    for number, group in enumerate(Extents.of(call).groups):
        if len({place for place, _ in group}) == len(group):
            yield Variation(f"extent {number} is {_LONG}", partial(_with_long_dim, number))


def _with_long_dim(number: int, call: Call) -> Call | None:
    extents = Extents.of(call)
    if number >= len(extents.groups) or not 0 < extents.extent(group := extents.groups[number]) < _LONG:
        return None
    # at another size of the call, dims may have one extent that have several here
    if len({place for place, _ in group}) != len(group) or extents.elements({group: _LONG}) > _MOST_ELEMENTS:
        return None
    return extents.other(group, _LONG)


def _strides(call: Call) -> Iterator[Variation]:
    if any(tensor.ndim > 1 for tensor in call.tensors):
        yield Variation("the first dim is the innermost", partial(_each, _first_innermost), strided=True)
    elif _goes_through_elements(call):
        yield Variation("2 dims, the first is the innermost", partial(_each, _columns), strided=True)
    if any(tensor.ndim == _IMAGES for tensor in call.tensors):
        yield Variation("the second of 4 dims is the innermost", partial(_each, _channels_last), strided=True)
    elif _goes_through_elements(call):
        yield Variation("4 dims, the second is the innermost", partial(_each, _images), strided=True)
    if reads_strides(call.op):
        for ndim in (2, 3) if _goes_through_elements(call) else (None,):
            for label, change in _LAYOUTS:
                text = label if ndim is None else f"{ndim} dims, {label}"
                yield Variation(text, partial(_each, partial(_laid_out, change, ndim)), strided=True)


def _expanded(dim: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the first slice along a dim everywhere, which is there once."""
    return tensor.narrow(dim, 0, 1).clone().expand_as(tensor) if tensor.ndim and tensor.numel() else tensor


def _last_swapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same values, of whose elements neighbours on the last dim but one are neighbours."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.ndim > 1 else tensor


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same values that is part of one with twice as many columns."""
    return torch.cat([tensor, tensor], -1).narrow(-1, 0, tensor.shape[-1]) if tensor.ndim else tensor


def _windows(tensor: torch.Tensor) -> torch.Tensor:
    """Return windows of one vector, each of which begins an element after the one before."""
    if tensor.ndim < 2 or not tensor.numel():
        return tensor
    return with_strides(tensor, [*tensor.contiguous().stride()[:-2], 1, 1])


def _laid_out(change: Callable[[torch.Tensor], torch.Tensor], ndim: int | None, tensor: torch.Tensor) -> torch.Tensor:
    return change(tensor if ndim is None else _with_dims(tensor, ndim))


_LAYOUTS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("expanded along the first dim", partial(_expanded, 0)),
    ("expanded along the last dim", partial(_expanded, -1)),
    ("the last dims swapped in memory", _last_swapped),
    ("gaps in memory", _with_gaps),
    ("overlapping windows", _windows),
)
"""Memory that only rules which look at strides are given."""


def _dims(call: Call) -> Iterator[Variation]:
    if _goes_through_elements(call):
        for ndim in range(_MOST_DIMS + 1):
            yield Variation(f"{ndim} dims", partial(_each, partial(_with_dims, ndim=ndim)))


def _goes_through_elements(call: Call) -> bool:
    return torch.Tag.pointwise in call.op.tags and all(tensor.ndim for tensor in call.tensors)


def _each(change: Callable[[torch.Tensor], torch.Tensor], call: Call) -> Call | None:
    leaves = [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if sum(tensor.numel() for tensor in tensors) > _MOST_ELEMENTS or _broadcast(tensors) > _MOST_ELEMENTS:
        return None
    return call.with_leaves(leaves)


def _broadcast(tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of elements of what tensors are broadcast to; 0 if they cannot be."""
    extents = [set(one) - {1} for one in zip_longest(*(tensor.shape[::-1] for tensor in tensors), fillvalue=1)]
    return math.prod(max(one, default=1) for one in extents) if all(len(one) < 2 for one in extents) else 0


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


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == _IMAGES else tensor


def _images(tensor: torch.Tensor) -> torch.Tensor:
    return _channels_last(_with_dims(tensor, _IMAGES))


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    return _first_innermost(_with_dims(tensor, 2))


def _with_dims(tensor: torch.Tensor, ndim: int) -> torch.Tensor:
    """Return a tensor of ``ndim`` dims with the same values: the first ones are merged, or new ones have 2 copies."""
    if not ndim:
        return tensor.flatten()[0] if tensor.numel() else tensor.new_zeros(())
    if tensor.ndim > ndim:
        return tensor.flatten(0, tensor.ndim - ndim)
    return tensor.expand(*(2,) * (ndim - tensor.ndim), *tensor.shape).clone()
