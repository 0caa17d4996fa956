"""Classes of input that defects hide behind and that OpInfo seldom has: each is a set of changes to a call.

Only what DTensor claims is tried of such calls, because a rule that is missing for them is missing for usual calls too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch

from strategies.opinfo.calls.call import Call, Parameter, parameters
from strategies.opinfo.calls.checked import is_trusting
from strategies.opinfo.calls.op_facts import KEEP_VALUES
from strategies.opinfo.calls.op_names import base_of
from strategies.opinfo.samples.argument_spellings import Variation, equivalent_dim, with_value, with_values
from strategies.opinfo.samples.asking.arguments import (
    argument_branches,
    equal_numbers,
    flags_beside_branches,
    without_tensors,
)
from strategies.opinfo.samples.asking.extents import broadcast_extents, extent_branches, lengths_of_rule
from strategies.opinfo.samples.asking.lists import list_branches
from strategies.opinfo.samples.asking.tensors import branches
from strategies.opinfo.samples.conversions import as_complex, converted
from strategies.opinfo.samples.dim_numbers import batch_dims, batch_dims_of_gradients, dim_numbers, dims_among_many
from strategies.opinfo.samples.index_classes import bounds, ends, index_extents, index_lists, left_out, steps
from strategies.opinfo.samples.size_classes import (
    broadcasts,
    empty,
    factory_sizes,
    fewer_dims,
    has_fixed_sizes,
    narrower,
    ones,
    pooled_sizes,
    tied,
    wider,
    with_changed,
)
from verifier.torch_internals.amending.propagation import is_torchs

__all__ = ["ASKING", "INPUT_CLASSES", "InputClass"]


# -------------------------------------------------------------------------------------------------------------- numbers
def numbers(call: Call) -> Iterator[Variation]:
    """Yield Python numbers in place of tensors, and other scales."""
    if is_trusting(call):
        return
    for parameter in list(parameters(call.op))[1:]:
        given = call.values.get(parameter.name, parameter.default)
        if parameter.out or parameter.written:
            continue
        if isinstance(given, torch.Tensor) and parameter.type in ("Tensor", "Optional[Tensor]"):
            yield _value(parameter.name, 2 if given.dtype != torch.bool else True)
            if given.is_floating_point():
                yield _value(parameter.name, -1.5)
        elif parameter.name in _SCALES and _is_number(parameter):
            yield from (_value(parameter.name, value) for value in (2, -1, 0) if value != given)


_SCALES = ("alpha", "beta", "value", "scalar", "other", "exponent", "weight", "negative_slope", "lambd")


def _is_number(parameter: Parameter) -> bool:
    return "number" in parameter.type or "float" in parameter.type


def _value(name: str, value: object) -> Variation:
    return Variation(f"{name} is {value}", partial(with_value, name=name, value=value))


# --------------------------------------------------------------------------------------------------------------- dtypes
def dtypes(call: Call) -> Iterator[Variation]:
    """Yield conversions: by an argument, and by operands of different dtypes."""
    for parameter in parameters(call.op):
        if parameter.name in ("dtype", "out_dtype") and "int" in parameter.type and not is_trusting(call):
            first = call.tensors[0].dtype
            for dtype in (torch.int64, torch.bool, torch.float64):
                if dtype != call.values.get(parameter.name, first):
                    yield Variation(f"{parameter.name} is {dtype}", partial(_with_dtype, parameter.name, dtype))
    floating = _convertible(call)
    mixed = _can_mix(call, floating)
    if floating:
        if mixed or len(floating) == 1:
            yield _cast((floating[-1],), torch.int64)
        yield _cast(tuple(floating), torch.int64)
        if mixed:
            yield _cast(tuple(floating[:1]), torch.int64)
            yield _cast(tuple(floating[1:]), torch.float32)
        yield _cast(tuple(floating), torch.bool)


def unsigned(call: Call) -> Iterator[Variation]:
    """Yield bytes in place of all floats: no negative is one, and what is below 0 wraps."""
    if floating := _convertible(call):
        yield _cast(tuple(floating), torch.uint8)


def bools_among_others(call: Call) -> Iterator[Variation]:
    """Yield bools in place of the first of several floats: together they are promoted, and a sum of bools is OR."""
    floating = _convertible(call)
    if _can_mix(call, floating):
        yield _cast(tuple(floating[:1]), torch.bool)


def _convertible(call: Call) -> list[int]:
    """Return the numbers of the tensors of floats, if the op may as well have other dtypes."""
    base = base_of(str(call.op)).rstrip("_")
    if base in KEEP_VALUES or is_trusting(call) or any(one.out for one in parameters(call.op)):
        return []  # with an output of float64, an op of integers rounds to float32 in between
    if call.op.namespace == "prims":
        return []  # of integers, the functions of prims for fake tensors and their kernels return other dtypes
    return [number for number, tensor in enumerate(call.tensors) if tensor.is_floating_point()]


def _can_mix(call: Call, floating: Sequence[int]) -> bool:
    """Return whether tensors may have different dtypes.

    A kernel that has nothing to compute takes operands of dtypes that it refuses otherwise.
    """
    return len(floating) > 1 and all(tensor.numel() for tensor in call.tensors)


def _with_dtype(name: str, dtype: torch.dtype, call: Call) -> Call | None:
    return with_value(call, name, dtype)


def _cast(which: tuple[int, ...], dtype: torch.dtype) -> Variation:
    text = "all floats" if len(which) > 1 else f"tensor {which[0]}"
    return Variation(f"{text} as {dtype}", partial(_cast_call, which, dtype))


_WHOLE = {"beta": 2, "alpha": 3}
"""Factors of integers. Torch asks for integers, and not all kernels refuse others if there is something to compute."""


def _cast_call(which: tuple[int, ...], dtype: torch.dtype, call: Call) -> Call | None:
    changed = with_changed(which, partial(converted, dtype=dtype), call)
    if changed is None or any(tensor.is_floating_point() or tensor.is_complex() for tensor in changed.tensors):
        return changed
    whole = {name: _WHOLE[name] for name, given in changed.values.items() if name in _WHOLE and given != 1}
    return Call.of(changed.op, {**changed.values, **whole}) if whole else changed


def complex_numbers(call: Call) -> Iterator[Variation]:
    """Yield complex tensors in place of floats, and with them a complex Python number."""
    if is_trusting(call) or any(parameter.out for parameter in parameters(call.op)):
        return
    floating = tuple(number for number, tensor in enumerate(call.tensors) if tensor.is_floating_point())
    if not floating:
        return
    for parameter in parameters(call.op):
        given = call.values.get(parameter.name, parameter.default)
        if "number" in parameter.type and isinstance(given, int | float) and not isinstance(given, bool):
            yield Variation(f"{parameter.name} is complex", partial(_with_complex, floating, parameter.name))
    yield Variation("complex tensors", partial(with_changed, floating, as_complex))


def _with_complex(which: tuple[int, ...], name: str, call: Call) -> Call | None:
    changed = with_changed(which, as_complex, call)
    return None if changed is None else with_value(changed, name, 0.5 - 1j)


# ----------------------------------------------------------------------------------------------------------------- dims
def numbers_of_dims(call: Call) -> Iterator[Variation]:
    """Yield tensors with more dims, or fewer."""
    base = base_of(str(call.op))
    if base.startswith("native_layer_norm"):  # its kernels trust sizes, and batch dims are of any number
        normalized = call.values["normalized_shape"]
        assert isinstance(normalized, list | tuple)
        change = batch_dims_of_gradients if "backward" in base else batch_dims
        yield from change(call, at_least=len(normalized))
    elif _has_batch(call):
        yield Variation("without a batch", partial(with_changed, tuple(range(len(call.tensors))), _first_of_batch))
    elif not has_fixed_sizes(call):
        yield from dim_numbers(call)


def _has_batch(call: Call) -> bool:
    """Return whether the call is the backward of a pool or a padding, which may come without a batch."""
    base, ndims = base_of(str(call.op)), {tensor.ndim for tensor in call.tensors}
    writes_out = any(parameter.out for parameter in parameters(call.op))
    return "backward" in base and ("pool" in base or "_pad" in base) and len(ndims) == 1 and not writes_out


def _first_of_batch(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor[0].clone() if tensor.ndim > 2 and len(tensor) else None


def list_lengths(call: Call) -> Iterator[Variation]:
    """Yield lists of three tensors and of four: torch's samples of ``cat`` have at most two."""
    yield from _lists_of(call, (3, 4))


def lengths_in_code(call: Call) -> Iterator[Variation]:
    """Yield lists as long as the numbers in the code of a rule of the user's."""
    if not is_torchs(call.op):
        yield from _lists_of(call, lengths_of_rule(call.op))


def _lists_of(call: Call, lengths: Sequence[int]) -> Iterator[Variation]:
    if has_fixed_sizes(call):
        return
    for parameter in parameters(call.op):
        given = call.values.get(parameter.name)
        if parameter.type == "List[Tensor]" and isinstance(given, list | tuple) and given:
            for wanted in dict.fromkeys(lengths):
                if wanted > len(given):
                    yield Variation(f"{wanted} {parameter.name}", partial(_with_more, parameter.name, wanted))


def _with_more(name: str, wanted: int, call: Call) -> Call | None:
    given = call.values[name]
    assert isinstance(given, list | tuple)
    others = [tensor.flatten().roll(1).reshape(tensor.shape) for tensor in given]
    return with_value(call, name, [*given, *others * wanted][:wanted])


def negative_dims(call: Call) -> Iterator[Variation]:
    """Yield dims counted from the end, also in backward ops, to which autograd hands on the dims that users give."""
    if is_trusting(call):
        return  # _fft_c2r ends the process
    for parameter in parameters(call.op):
        given = call.values.get(parameter.name, parameter.default)
        if "dim" not in parameter.name or "int" not in parameter.type or parameter.out:
            continue
        if type(given) is int:
            yield Variation(f"{parameter.name} from the other end", partial(equivalent_dim, parameter.name))
        elif isinstance(given, list | tuple) and given and call.tensors[0].ndim:
            ndim = call.tensors[0].ndim
            turned = [dim - ndim if dim >= 0 else dim + ndim for dim in given]
            yield _value(parameter.name, turned)


def dims_from_the_end(call: Call) -> Iterator[Variation]:
    """Yield dims counted from the end that are not the last one, in ops with rules of the user's.

    A result may have one dim more than the operand, so that a rule may count from another end. Of several dims, each
    alone is also the last one: a rule may compare it with those that are counted from the start.
    """
    if is_torchs(call.op) or is_trusting(call) or not call.tensors or any(one.out for one in parameters(call.op)):
        return
    named = {one.name: call.values.get(one.name, one.default) for one in parameters(call.op)}
    given = {name: dim for name, dim in named.items() if name in _NAMES_OF_DIMS and type(dim) is int}
    for name, before in given.items():
        ends = (-2, -call.tensors[0].ndim, -1)[: 3 if len(given) > 1 else 2]
        yield from (_value(name, dim) for dim in dict.fromkeys(ends) if dim != before)


def other_dims(call: Call) -> Iterator[Variation]:
    """Yield the other dims in place of a dim, or of a list of one dim: the first, one in the middle, the last.

    A tensor that takes the result would have another size than the result has along another dim.
    """
    if is_trusting(call) or not call.tensors or any(parameter.out for parameter in parameters(call.op)):
        return
    ndim = call.tensors[0].ndim
    for parameter in parameters(call.op):
        given = call.values.get(parameter.name, parameter.default)
        if parameter.name not in _NAMES_OF_DIMS or "int" not in parameter.type or parameter.out or ndim < 2:
            continue
        listed = isinstance(given, list | tuple)
        dim = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
        if type(dim) is int:
            for other in dict.fromkeys((0, ndim // 2, ndim - 1)):
                if other != dim % ndim:
                    yield _value(parameter.name, [other] if listed else other)


_NAMES_OF_DIMS = ("dim", "dims", "dim0", "dim1", "dim2")
_CHECKED_HELPERS = ("_fft_r2c", "_fft_c2c")
"""Helper ops that take any dims their first tensor has."""


def several_dims(call: Call) -> Iterator[Variation]:
    """Yield the first two dims, and all, in place of a list; where two go, a dim behind them moves by two.

    Results keep no dims that are reduced, because nothing moves then.
    """
    if base_of(str(call.op)) not in _CHECKED_HELPERS and is_trusting(call):
        return
    if not call.tensors or call.tensors[0].ndim < _USUAL_DIMS or any(one.out for one in parameters(call.op)):
        return
    kept = {one.name: False for one in parameters(call.op) if one.name == "keepdim"}
    for parameter in parameters(call.op):
        if parameter.name in _NAMES_OF_DIMS and "List[int]" in parameter.type:
            yield Variation("the first two dims", partial(with_values, {parameter.name: [0, 1], **kept}))
            every = [*range(call.tensors[0].ndim)]
            yield Variation("all dims", partial(with_values, {parameter.name: every, **kept}))


_USUAL_DIMS = 3


def flags(call: Call) -> Iterator[Variation]:
    """Yield the other choice of a flag that changes results and that callers seldom give, then of all such flags."""
    if is_trusting(call) or any(one.out for one in parameters(call.op)):
        return
    given = {one.name: call.values.get(one.name, one.default) for one in parameters(call.op)}
    # without accumulation, which of two values at one index wins is not defined
    others = {
        name: not value
        for name, value in given.items()
        if name in _FLAGS and type(value) is bool and not (name == "accumulate" and value)
    }
    yield from (_value(name, value) for name, value in others.items())
    if len(others) > 1:
        label = ", ".join(f"{name} is {value}" for name, value in others.items())
        yield Variation(label, partial(with_values, others))
    if "left" in others:
        for values in ({"left": others["left"]}, {**others}):
            label = ", ".join(f"{name} is {value}" for name, value in values.items())
            yield Variation(f"{label}, the last matrix transposed", partial(_on_the_other_side, values))


def _on_the_other_side(values: Mapping[str, object], call: Call) -> Call | None:
    """Return the call with its last matrix transposed, as a product from the other side asks for."""
    turned = call.with_tensors((len(call.tensors) - 1,), lambda one: one.mT.contiguous() if one.ndim > 1 else None)
    return None if turned is None else with_values(values, turned)


_FLAGS = ("invert", "accumulate", "include_self", "left", "adjoint", "unitriangular", "equal_nan", "log_input", "full",
          "out_int32", "right")  # fmt: skip


# ------------------------------------------------------------------------------------------------------ boundary values
def boundaries(call: Call) -> Iterator[Variation]:
    """Yield numbers at the boundary of their domain: orders without an ordinary norm, equal or crossed limits, 0.

    The first number of each argument comes before the second of any.
    """
    if is_trusting(call):
        return
    numbers = [
        [_value(parameter.name, value) for value in _BOUNDARIES.get(parameter.name, ())]
        for parameter in parameters(call.op)
        if (_is_number(parameter) or parameter.name in _COUNTS) and "List" not in parameter.type
    ]
    yield from (change for round_ in zip_longest(*numbers) for change in round_ if change is not None)
    values = call.values
    limits = [values.get(name) for name in ("min", "max")]
    if all(isinstance(limit, int | float) for limit in limits):
        yield _value("min", limits[1])
        yield _value("max", limits[0] - 1)  # type: ignore[operator]


_COUNTS = ("k",)
_BOUNDARIES: dict[str, tuple[object, ...]] = {
    "ord": (math.inf, -math.inf, 0, 0.5, -1, 3),
    "p": (math.inf, -math.inf, 0, 0.5, -1, 3),
    "posinf": (-2.0, 0.0),  # a 0 first would hide that the number stands where an infinity was the largest
    "neginf": (2.0, 0.0),
    "nan": (2.0, -1.0),
    "threshold": (2.0, -1.0, 0.0),
    "value": (1.0, -2.0, 3.0),
    "lambd": (2.0, 0.0),
    "delta": (2.0,),
    "beta": (2.0,),
    "min_val": (1.0,),
    "max_val": (-1.0,),
    "min": (2.0, -2.0),
    "max": (-2.0, 2.0),
    "n": (0, 1),
    "exponent": (0, 1, -1, 3, 0.5),
    "k": (1,),
}
"""Numbers to try for arguments of these names."""


@dataclass(frozen=True)
class InputClass:
    """A class of input: the changes that make a call one of it, and how many such calls of an overload are made.

    Changes are asked for of at most ``samples`` samples, the first ones or ``evenly`` spaced ones; None for no limit.
    With ``elements``, they are asked for of calls alone whose tensors all have elements, because others show nothing of
    values. With ``once``, each change is made to the first call that takes it; otherwise to one call after another.
    With ``again``, second calls follow, to see what the key of DTensor's cache leaves out.
    """

    name: str
    changes: Callable[[Call], Iterator[Variation]]
    most: int
    samples: int | None = None
    elements: bool = False
    evenly: bool = False
    once: bool = False
    again: bool = False

    def of(self, calls: Sequence[Call]) -> list[int]:
        """Return the numbers of the calls of which changes are asked for."""
        fit = [n for n, call in enumerate(calls) if not self.elements or all(tensor.numel() for tensor in call.tensors)]
        if self.evenly and self.samples is not None and len(fit) > self.samples:
            return [fit[place * len(fit) // self.samples] for place in range(self.samples)]
        return fit[: self.samples]


INPUT_CLASSES = (
    InputClass("numbers", numbers, 4),
    InputClass("dtypes", dtypes, 4),
    InputClass("unsigned integers", unsigned, 2),
    InputClass("bools among others", bools_among_others, 2),
    InputClass("complex numbers", complex_numbers, 2),
    InputClass("broadcasts", broadcasts, 6),
    InputClass("fewer dims", fewer_dims, 3),
    InputClass("extents of 1", ones, 3),
    InputClass("wider", wider, 2, samples=3),
    InputClass("narrower", narrower, 12),
    InputClass("empty", empty, 3),
    InputClass("factory sizes", factory_sizes, 2),
    InputClass("pooled sizes", pooled_sizes, 3),
    InputClass("negative dims", negative_dims, 3),
    InputClass("dims from the end", dims_from_the_end, 6),
    InputClass("other dims", other_dims, 3),
    InputClass("several dims", several_dims, 2),
    InputClass("flags", flags, 5),
    InputClass("numbers of dims", numbers_of_dims, 4),
    InputClass("dims among many", dims_among_many, 5, samples=3, elements=True, once=True),
    InputClass("lengths of lists", list_lengths, 2, samples=3),
    InputClass("lengths of lists in code", lengths_in_code, 4, samples=3),
    InputClass("steps", steps, 2),
    InputClass("bounds", bounds, 4),
    InputClass("ends", ends, 3, samples=3, elements=True, once=True),
    InputClass("index lists", index_lists, 6),
    InputClass("extents of indices", index_extents, 14, elements=True, once=True),
    InputClass("arguments left out", left_out, 2),
    InputClass("boundaries", boundaries, 5),
    InputClass("branches of rules", branches, 6, samples=3),
    InputClass("arguments of rules", argument_branches, 6, samples=8, elements=True, evenly=True, again=True),
    InputClass("flags beside them", flags_beside_branches, 4, samples=4, elements=True, evenly=True),
    InputClass("lists of rules", list_branches, 6, samples=6, elements=True, evenly=True),
    InputClass("equal numbers", equal_numbers, 4, samples=3),
    InputClass("optional tensors left out", without_tensors, 8, samples=4, elements=True),
    InputClass("tied extents of 1", tied, 3, samples=3, elements=True),
    InputClass("extents of rules", extent_branches, 6, samples=8, elements=True, evenly=True),
    InputClass("extents of broadcasts", broadcast_extents, 3, samples=6, elements=True, evenly=True),
)
"""The classes, each with its most telling changes first."""
ASKING = (branches, argument_branches, flags_beside_branches, list_branches, extent_branches, broadcast_extents)
"""Changes of classes that depend on what rules claim of calls, which takes long to ask."""
