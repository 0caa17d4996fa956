"""Classes of input for ops that select: bounds in other spellings, indices on other dims, arguments left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from strategies.opinfo.calls.call import Call, attempt, parameters
from strategies.opinfo.calls.checked import is_trusting
from strategies.opinfo.calls.op_names import base_of
from strategies.opinfo.samples.argument_spellings import Variation, with_value, with_values
from verifier.torch_internals.amending.propagation import is_torchs

__all__ = ["bounds", "ends", "index_extents", "index_lists", "left_out", "steps"]

_SELECTING = (
    "slice",
    "slice_scatter",
    "slice_copy",
    "select",
    "select_scatter",
    "select_copy",
    "narrow",
    "narrow_copy",
)
_LARGEST = 2**63 - 1


# --------------------------------------------------------------------------------------------------------------- bounds
def bounds(call: Call) -> Iterator[Variation]:
    """Yield the bounds of slices and selections counted from the end, past the end, and left open."""
    if base_of(str(call.op)) not in _SELECTING:
        return
    names = {parameter.name for parameter in parameters(call.op)}
    for name in ("end", "start", "index"):
        if name in names:
            yield Variation(f"{name} from the end", partial(_from_the_end, name))
    if "end" in names:
        yield Variation("end is past the end", partial(_past_the_end, 3))
        yield Variation("end is the largest integer", partial(_past_the_end, _LARGEST))
        yield Variation("end is None", partial(with_value, name="end", value=None))


def ends(call: Call) -> Iterator[Variation]:
    """Yield the last elements, all but the first ones, and all but the last ones: both bounds change together.

    One bound that is left open makes a rule take the whole dim for selected, if it does not look at the other one.
    """
    if {"start", "end", "step"} <= {one.name for one in parameters(call.op)} and "backward" not in str(call.op):
        for label, sign, last in (("the last elements", -1, False), ("all but the first", 1, False), ("", -1, True)):
            yield Variation(label or "all but the last", partial(_end_of, sign, last))


def _end_of(sign: int, last: bool, call: Call) -> Call | None:
    if (extent := _extent(call)) < 2:
        return None
    bound = sign * max(1, extent // 3)
    changed: dict[str, object] = {"start": None if last else bound, "end": bound if last else None, "step": 1}
    if "src" in call.values:
        tensor = call.tensors[0]
        dim = call.values.get("dim", 0)
        part = attempt(Call(torch.ops.aten.slice.Tensor, (tensor, dim, *changed.values()), {}))
        if part is None:
            return None
        changed["src"] = part[0].flip(0).clone()
    return with_values(changed, call)


def steps(call: Call) -> Iterator[Variation]:
    """Yield larger steps through a whole dim: the rows of a rank begin anywhere between two of those that are taken."""
    if is_trusting(call):
        return
    for parameter in parameters(call.op):
        given = call.values.get(parameter.name, parameter.default)
        if parameter.name == "step" and type(given) is int and not parameter.out:
            yield from (Variation(f"in steps of {step}", partial(_in_steps, step)) for step in (2, 3) if step != given)


def _in_steps(step: int, call: Call) -> Call | None:
    ends = {one.name: None for one in parameters(call.op) if one.name in ("start", "end") and "Optional" in one.type}
    return Call.of(call.op, {**call.values, **ends, "step": step})


def _extent(call: Call) -> int:
    """Return the extent of the dim from which the call selects; 0 if there is no such dim."""
    tensor, dim = call.tensors[0], call.values.get("dim", 0)
    return tensor.shape[dim] if isinstance(dim, int) and -tensor.ndim <= dim < tensor.ndim else 0


def _from_the_end(name: str, call: Call) -> Call | None:
    given, extent = call.values.get(name), _extent(call)
    if not isinstance(given, int) or not 0 <= given < extent or (name == "end" and not given):
        return None
    return with_value(call, name, given - extent)


def _past_the_end(more: int, call: Call) -> Call | None:
    """Return the call with a bound that torch takes for the extent, if its bound is the extent."""
    given, extent = call.values.get("end"), _extent(call)
    if given is None or (isinstance(given, int) and given >= extent > 0):
        return with_value(call, "end", min(extent + more, _LARGEST))
    return None


# -------------------------------------------------------------------------------------------------------------- indices
_PLACED: tuple[tuple[int, ...], ...] = ((0, 2), (1, 2), (1,), (0, 1), (3,))
"""On which of four dims an index stands: apart, together, and alone."""


def index_lists(call: Call) -> Iterator[Variation]:
    """Yield lists of indices on other dims: apart, together and alone, of one dim and of two that are broadcast.

    For ops that write, masks of two dims are among them, as in ``x[mask] = 0``; what others return has a size that
    depends on the values.
    """
    types = {parameter.name: parameter.type for parameter in parameters(call.op)}
    if "Optional[Tensor]" not in types.get("indices", "") or any(one.out for one in parameters(call.op)):
        return
    if "values" in types:
        for first in (0, 1):
            yield Variation(f"a mask of dims {first} and {first + 1} of 3", partial(_masked, first))
    for dims in _PLACED:
        for wide in (False, True):
            text = "broadcast indices" if wide else "indices"
            label = f"{text} on dims {', '.join(map(str, dims))} of 4"
            if not wide or len(dims) > 1:
                yield Variation(label, partial(_indexed, dims, wide))


def _indexed(dims: Sequence[int], wide: bool, call: Call) -> Call | None:
    """Return the call on a tensor of four dims of different extents, with its first index on each of ``dims``."""
    given = call.values.get("indices")
    found = [one for one in given if isinstance(one, torch.Tensor)] if isinstance(given, list | tuple) else []
    tensor = call.tensors[0]
    if not found or found[0].dtype == torch.bool or found[0].ndim != 1 or not tensor.ndim:
        return None
    index, extent = found[0], tensor.shape[0]
    shape = (extent, extent + 1, extent + 2, extent + 3)  # the index is legal on each dim
    cube = torch.arange(math.prod(shape)).view(shape).to(tensor.dtype)
    indices: list[torch.Tensor | None] = [None] * (1 + max(dims))
    for place, dim in enumerate(dims):
        indices[dim] = index[:, None].clone() if wide and place == 0 else index.clone()
    changed = {**call.values, next(iter(call.values)): cube, "indices": indices}
    if "values" in call.values:
        selected = attempt(Call(torch.ops.aten.index.Tensor, (cube, indices), {}))
        if selected is None:
            return None
        changed["values"] = selected[0].flip(0).clone()
    return Call.of(call.op, changed)


_LENGTHS: tuple[tuple[int, tuple[str, ...], str], ...] = (
    (0, ("n", "1"), "all"),
    (0, ("1", "n"), "all"),
    (0, ("n", "n"), "one row"),
    (1, ("n", "1"), "all"),
    (0, ("n", "n"), "all"),
    (0, ("n x 1", "n"), "one row"),
    (0, ("n",), "one"),
)
"""The first dim with an index, the shapes of the indices, and the values that are written."""


def index_extents(call: Call) -> Iterator[Variation]:
    """Yield writes at as many different indices as the first dim has, beside a single index, for rules of the user's.

    An index of one element is broadcast, and so are values of one row. Torch's samples have one list of two indices.
    """
    types = {parameter.name: parameter.type for parameter in parameters(call.op)}
    if is_torchs(call.op) or not {"indices", "values", "accumulate"} <= set(types):
        return
    if any(one.out for one in parameters(call.op)):
        return
    for accumulate in (True, False):
        for first, shapes, values in _LENGTHS:
            label = f"indices {', '.join(shapes)} from dim {first} on, {values} of the values"
            label += f", accumulate is {accumulate}"
            yield Variation(label, partial(_of_lengths, first, shapes, values, accumulate))


def _of_lengths(first: int, shapes: Sequence[str], values: str, accumulate: bool, call: Call) -> Call | None:
    tensor = call.tensors[0]
    if not tensor.ndim or not (extent := tensor.shape[0]):
        return None
    shape = (extent, extent + 1, extent + 2, extent + 3)
    cube = torch.arange(math.prod(shape)).view(shape).to(tensor.dtype)
    every = torch.arange(extent).flip(0)  # no index twice, so that the order of writes does not matter
    of_shape = {"n": every, "1": every[:1], "n x 1": every[:, None]}
    indices = [None] * first + [of_shape[one].clone() for one in shapes]
    selected = attempt(Call(torch.ops.aten.index.Tensor, (cube, indices), {}))
    if selected is None:
        return None
    given = selected[0].flip(0).clone()
    written = {"all": given, "one row": given[:1].clone(), "one": given.flatten()[0].clone()}[values]
    changed = {"indices": indices, "values": written, "accumulate": accumulate}
    return Call.of(call.op, {**call.values, next(iter(call.values)): cube, **changed})


def _masked(first: int, call: Call) -> Call | None:
    """Return the call on a tensor of three dims, with a mask that goes through two of them from ``first`` on."""
    extent = max(2, min(5, max(call.tensors[0].shape, default=2)))
    shape = (extent, extent + 1, extent + 2)
    cube = torch.arange(math.prod(shape)).view(shape).to(call.tensors[0].dtype)
    mask = torch.arange(math.prod(shape[first : first + 2])).view(shape[first : first + 2]) % 3 != 1
    changed = {**call.values, next(iter(call.values)): cube, "indices": [None] * first + [mask]}
    return Call.of(call.op, {**changed, "values": torch.ones((), dtype=cube.dtype)})


# ------------------------------------------------------------------------------------------------------------- defaults
def left_out(call: Call) -> Iterator[Variation]:
    """Yield the call with fewer arguments: all that have a default left out, then only the last ones."""
    given = [parameter for parameter in parameters(call.op) if parameter.name in call.values]
    if any(parameter.out for parameter in parameters(call.op)) or base_of(str(call.op)).startswith("_"):
        return
    optional = [one for one in given if one.has_default and not isinstance(call.values[one.name], torch.Tensor)]
    for start in range(len(optional)):
        names = tuple(one.name for one in optional[start:])
        if any(call.values[one.name] != one.default for one in optional[start:]):
            yield Variation(f"without {', '.join(names)}", partial(_without, names))


def _without(names: Sequence[str], call: Call) -> Call | None:
    return Call.of(call.op, {name: value for name, value in call.values.items() if name not in names})
