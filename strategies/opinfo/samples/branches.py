"""Dtypes, extents, strides and numbers of dims on which a rule branches, so that DTensor claims what it else does not.

A rule that raises for some of them branches, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, permutations, zip_longest

import torch

from strategies.opinfo.calls.call import Call, Parameter, attempt, parameters
from strategies.opinfo.calls.checked import codes_of, is_trusting, is_unchecked
from strategies.opinfo.calls.op_facts import COMPARED, KEEP_VALUES
from strategies.opinfo.calls.op_names import base_of
from strategies.opinfo.samples.argument_spellings import DIMS, Variation, with_value, with_values
from strategies.opinfo.samples.conversions import converted
from strategies.opinfo.samples.extents import Extents, Group
from verifier.core.case import OpCase
from verifier.records.memory import with_strides
from verifier.rules.claims import claims_and_failures
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.amending.rule_code import constants_of_rule, reads_strides
from verifier.torch_internals.names import OpOverload

__all__ = [
    "argument_branches",
    "branches",
    "broadcast_extents",
    "claimed",
    "equal_numbers",
    "extent_branches",
    "kinds_of",
    "near_numbers",
    "tied_ones",
    "without_tensors",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
_USUAL_INTEGERS = (torch.int64, torch.uint8, torch.bool)
_INTEGERS = (torch.int32, torch.int8, torch.int16)
"""Those that calls have in any case, and others."""
_FACTORS = (8, 64, 1024)
_MOST_ELEMENTS = 1 << 20
_MOST_DIMS = 5
_USUAL_DIMS = 3
"""Of an op that goes through elements, a call of so many dims is made in any case."""
_IMAGES = 4
"""The dims of a batch of images, whose channels may be the innermost ones."""
_EXTENT = 2
_NUMBERS = (0, 1, -1, 2, 0.5, -0.5, math.inf, -math.inf)
"""Numbers on which rules branch, beside those in their code."""
_BESIDE = 0.5
"""A number in the code of a rule is a bound; so far from it are numbers on both sides."""
_KINDS = {"dtype", "out_dtype", "layout", "device", "memory_format", "pin_memory", "generator"}
"""Arguments that are numbers in the schema alone."""
_COUNTS = ("group", "num", "size", "stride", "dilation", "heads", "factor", "step", "N", "C", "HxW")
"""Parts of the names of arguments by which kernels divide, some without a look at them: 0 would end the process."""
_MOST_OPTIONAL = 4
_MOST_SHARED = 4
_MOST_LENGTHS, _LONGEST_LIST = 2, 12
_MOST_CONSTANTS = 8
_LARGEST = 64
"""Larger integers in the code of a rule are not given as arguments: an extent of that size would take long."""


def branches(call: Call) -> Iterator[Variation]:
    """Yield the changes of a call at which the op's rules, of the user's, claim what they do not claim of the call.

    Changes at which rules raise, and do not raise for the call, are yielded, too.

    Torch's own rules are left out, because there are hundreds of them.
    """
    if is_torchs(call.op):
        return
    usual = claimed(call)
    for variation in (*_dtypes(call), *_extents()):
        if claimed(variation.apply(call)) - usual:
            yield variation
    of_integers = usual.union(*(claimed(_as_integers(dtype).apply(call)) for dtype in _USUAL_INTEGERS))
    for variation in map(_as_integers, _INTEGERS):
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


def _is_shaped_as(changed: Call | None, call: Call) -> bool:
    """Return whether the tensors of a changed call have the same shapes, so that its rules name the same dims."""
    return changed is not None and [one.shape for one in changed.tensors] == [one.shape for one in call.tensors]


def argument_branches(call: Call) -> Iterator[Variation]:
    """Yield the values of arguments other than tensors at which the op's rules, of the user's, claim something else.

    Dims are left out, of which any other one is another claim.
    """
    if is_torchs(call.op):
        return
    constants = sorted(constants_of_rule(call.op), key=lambda one: (isinstance(one, str), str(one)))
    for label, base in (("", _same), ("by default, ", _with_defaults)):
        start = base(call)
        if start is None:
            continue
        usual = claimed(start)
        for parameter in parameters(call.op):
            given = start.values.get(parameter.name, parameter.default)
            for value in dict.fromkeys(_candidates(parameter, given, start, constants)):
                change = partial(_with_argument, base, parameter.name, value)
                if value != given and not _may_read_none(call, parameter.name) and claimed(change(call)) - usual:
                    yield Variation(f"{label}{parameter.name} is {value}", change)


def equal_numbers(call: Call) -> Iterator[Variation]:
    """Yield calls of ops of the user's in which one number has the value of another, as ``min`` that of ``max``.

    An op may then do something else, as ``histc`` does, which takes the range from the values.
    """
    if is_torchs(call.op):
        return
    kinds = {one.name: one.type for one in parameters(call.op) if one.type in ("number", "float")}
    given = {one.name: call.values.get(one.name, one.default) for one in parameters(call.op) if one.name in kinds}
    for name, other in permutations(given, 2):
        if given[name] != given[other] and kinds[name] == kinds[other]:
            yield Variation(f"{name} is {other}", partial(_with_argument, _same, name, given[other]))


def _same(call: Call) -> Call | None:
    return call


def _with_defaults(call: Call) -> Call | None:
    """Return the call with the default of each argument that has one and is no tensor; None if it is the same call."""
    changed = call
    for parameter in parameters(call.op):
        given = call.values.get(parameter.name, parameter.default)
        if parameter.has_default and given != parameter.default and not isinstance(given, torch.Tensor | list | tuple):
            changed = with_value(changed, parameter.name, parameter.default) or changed
        elif parameter.has_default and isinstance(given, list | tuple) and parameter.default is None:
            changed = with_value(changed, parameter.name, None) or changed
    return changed if changed is not call else None


def _with_argument(base: Callable[[Call], Call | None], name: str, value: object, call: Call) -> Call | None:
    start = base(call)
    return None if start is None else with_value(start, name, value)


def without_tensors(call: Call) -> Iterator[Variation]:
    """Yield the calls without some of the tensors that may be left out, of ops with rules of the user's.

    A rule may hold for each of two optional tensors, and not where one is there without the other. A tensor is not left
    out where others have values that belong to it, as a sequence and what sorts it.
    """
    if is_torchs(call.op):
        return
    belongs = base_of(str(call.op)) in KEEP_VALUES
    names = [
        one.name for one in parameters(call.op) if isinstance(call.values.get(one.name), torch.Tensor) and one.optional
    ][:_MOST_OPTIONAL]
    for count in range(1, len(names) + 1):
        for some in combinations(names, count):
            if not (belongs or is_trusting(call)) or _are_not_needed(frozenset(some), call):
                yield Variation(f"without {', '.join(some)}", partial(with_values, dict.fromkeys(some)))


def _are_not_needed(names: frozenset[str], call: Call) -> bool:
    """Return whether a kernel that checks no arguments takes the call without these tensors."""
    if "backward" in base_of(str(call.op)) or not names <= _NEVER_NEEDED | _STATISTICS:
        return False
    return not names & _STATISTICS or (names >= _STATISTICS and any(call.values.get(one) is True for one in _TRAINING))


def _may_read_none(call: Call, name: str) -> bool:
    """Return whether another value of the argument ``name`` may let a kernel read statistics that are not there."""
    return name in _TRAINING and any(call.values.get(one, call) is None for one in _STATISTICS)


_NEVER_NEEDED = frozenset({"weight", "bias", "per_sample_weights"})
_STATISTICS = frozenset({"running_mean", "running_var"})
_TRAINING = ("training", "train")


def extent_branches(call: Call) -> Iterator[Variation]:
    """Yield the extents at which the op's rules claim something else.

    Those are tried that are near a number in the code of the rules, or equal to, twice or half another extent, or that
    make a product, a quotient or a sum of another extent such a number. Only the user's rules are asked.
    """
    if is_torchs(call.op) or is_unchecked(call) or not all(tensor.numel() for tensor in call.tensors):
        return
    constants = sorted(one for one in constants_of_rule(call.op) if type(one) is int and 0 < one <= _LARGEST)
    near = [one + more for more in (0, 1) for one in (1, *constants[:_MOST_CONSTANTS])]
    usual, extents = claimed(call), Extents.of(call)
    others = sorted({extents.extent(group) for group in extents.groups})
    factors = dict.fromkeys((2, *(one for one in constants[:_MOST_CONSTANTS] if one > 1)))
    near += [new for one in others for new in (one, 2 * one, one // 2) if 0 < new <= _LARGEST]
    near += [new for f in factors for one in others for new in (f * one, one // f, f - one) if 0 < new <= _LARGEST]
    for number, group in enumerate(_alone_too(extents)):
        for extent in dict.fromkeys(near):
            if extent != extents.extent(group) and claimed(extents.other(group, extent)) - usual:
                yield Variation(f"extent {number} is {extent}", partial(_with_extent, number, extent))


def broadcast_extents(call: Call) -> Iterator[Variation]:
    """Yield the calls in which a tensor lacks its first dim and two extents are equal, if rules claim more there.

    A rule may take a dim for another one that has the same extent.
    """
    if is_torchs(call.op) or is_unchecked(call) or len(call.tensors) < 2:
        return
    for number in range(len(call.tensors)):
        fewer = _without_first(number, call)
        if fewer is None or (usual := claimed(fewer)) == claimed(None):
            continue
        extents = Extents.of(fewer)
        equal = sorted({extents.extent(group) for group in extents.groups})
        for place, group in enumerate(extents.groups):
            for extent in equal:
                if extent != extents.extent(group) and claimed(extents.other(group, extent)) - usual:
                    change = partial(_broadcast_with_extent, number, place, extent)
                    yield Variation(f"tensor {number} without its first dim, extent {place} is {extent}", change)


def _without_first(number: int, call: Call) -> Call | None:
    return call.with_tensors((number,), lambda one: one[0].clone() if one.ndim and len(one) else None)


def _broadcast_with_extent(number: int, place: int, extent: int, call: Call) -> Call | None:
    fewer = _without_first(number, call)
    return None if fewer is None else _with_extent(place, extent, fewer)


def lengths_of_rule(op: OpOverload) -> list[int]:
    """Return lengths of lists at which a rule may branch: the whole numbers in its code, and one more."""
    found = sorted(one for one in constants_of_rule(op) if type(one) is int and 2 < one <= _LONGEST_LIST)
    return [length for one in found[:_MOST_LENGTHS] for length in (one, one + 1)]


def _alone_too(extents: Extents) -> list[Group]:
    """Return the places of each extent, and then each of several places alone: a rule may compare them."""
    shared = [group for group in extents.groups if len(group) > 1]
    return [*extents.groups, *((place,) for group in shared[:_MOST_SHARED] for place in group[:_MOST_SHARED])]


def _with_extent(number: int, extent: int, call: Call) -> Call | None:
    extents = Extents.of(call)
    groups = _alone_too(extents)
    return extents.other(groups[number], extent) if number < len(groups) else None


def tied_ones(call: Call) -> Iterator[Variation]:
    """Yield calls of ops of the user's in which two dims of one extent, which may have to be equal, have one element.

    The inner dim of a product or both dims of a square matrix cannot have one alone.
    """
    if is_torchs(call.op) or is_unchecked(call) or torch.Tag.pointwise in call.op.tags:
        return
    dims = [(n, dim, e) for n, tensor in enumerate(call.tensors) for dim, e in enumerate(tensor.shape) if e > 1]
    for one, other in combinations(dims, 2):
        if one[2] == other[2]:
            change = partial(_narrowed, (one[:2], other[:2]))
            changed = change(call)
            if changed is not None and attempt(changed) is not None:
                named = " and ".join(f"dim {dim} of tensor {number}" for number, dim, _ in (one, other))
                yield Variation(f"{named} are 1", change)


def _narrowed(dims: Sequence[tuple[int, int]], call: Call) -> Call | None:
    """Return the call with the first slice along each of ``dims``, the numbers of tensors and of their dims."""
    places = [place for place, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)]
    leaves = list(call.leaves)
    for number, dim in dims:
        tensor = leaves[places[number]]
        assert isinstance(tensor, torch.Tensor)
        if dim >= tensor.ndim or not tensor.shape[dim]:
            return None
        leaves[places[number]] = tensor.narrow(dim, 0, 1).clone()
    return call.with_leaves(leaves)


def _candidates(
    parameter: Parameter, given: object, call: Call, constants: Sequence[int | float | str]
) -> Iterator[int | float | str | bool | None]:
    kind = parameter.type.removeprefix("Optional[").removesuffix("]")
    if parameter.name in DIMS | _KINDS or parameter.out or isinstance(given, torch.Tensor) or kind.startswith("List"):
        return
    numbers = near_numbers(constants)
    if parameter.type.startswith("Optional["):
        yield None
    if kind == "bool":
        yield not given
    elif kind in ("int", "SymInt") and (codes := codes_of(call.op, parameter.name)):
        yield from codes
    elif kind in ("int", "SymInt"):
        if is_trusting(call) and parameter.name not in COMPARED:
            return  # such as a size of which the kernel reads or writes as many elements
        extents = {extent for tensor in call.tensors[:1] for extent in tensor.shape}
        least = 1 if any(part in parameter.name for part in _COUNTS) else -_LARGEST
        more = sorted({extent + one for extent in extents for one in (-1, 0)})
        yield from (one for one in (*_NUMBERS, *numbers, *more) if isinstance(one, int) and one >= least)
    elif kind in ("float", "number"):
        yield from (*_NUMBERS, *numbers)
    elif kind == "str":
        yield from [one for one in constants if isinstance(one, str)][:_MOST_CONSTANTS]


def near_numbers(constants: Sequence[int | float | str]) -> list[int | float]:
    """Return the numbers among the constants of a rule's code that may be arguments, then such on both sides of each.

    A bool is no number, and large ones would take long as an extent.
    """
    numbers = [one for one in constants if not isinstance(one, str | bool) and abs(one) <= _LARGEST][:_MOST_CONSTANTS]
    return [*numbers, *(one + more for one in numbers for more in (-_BESIDE, _BESIDE))]


def claimed(call: Call | None) -> frozenset[str]:
    """Return the rules that DTensor claims of a call on two ranks, or how it fails; none if the op does not take it."""
    if call is None or attempt(call) is None:
        return frozenset()
    case = OpCase(str(call.op), f"torch.ops.{call.op}", call.args, call.kwargs, "opinfo")
    return claims_and_failures(case, _EXTENT)


def kinds_of(rules: frozenset[str]) -> frozenset[str]:
    """Return rules without the dims that they shard: these are others where a tensor has another number of dims."""
    digits = str.maketrans("", "", "0123456789")
    return frozenset(rule.translate(digits) for rule in rules)


# ------------------------------------------------------------------------------------------------------------- changes
def _as_integers(dtype: torch.dtype) -> Variation:
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


def _integers_as(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if dtype == torch.bool:
        return tensor > tensor.double().nan_to_num().mean()
    return (tensor if dtype.is_signed else tensor.abs()).to(dtype)


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
        return tensor.flatten()[0]
    if tensor.ndim > ndim:
        return tensor.reshape(-1, *tensor.shape[tensor.ndim - ndim + 1 :])
    return tensor.expand(*(2,) * (ndim - tensor.ndim), *tensor.shape).clone()
