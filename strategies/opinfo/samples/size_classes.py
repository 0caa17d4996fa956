"""Classes of sizes that OpInfo seldom has: broadcast, wide, narrow, empty, and sizes that are arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from strategies.opinfo.calls.call import Call, attempt, parameters
from strategies.opinfo.calls.checked import is_unchecked
from strategies.opinfo.calls.op_facts import KEEP_VALUES
from strategies.opinfo.calls.op_names import base_of
from strategies.opinfo.samples.argument_spellings import Variation, with_value
from strategies.opinfo.samples.asking.extents import tied_ones

__all__ = [
    "broadcasts",
    "empty",
    "factory_sizes",
    "fewer_dims",
    "has_fixed_sizes",
    "narrower",
    "ones",
    "pooled_sizes",
    "tied",
    "wider",
    "with_changed",
]


def has_fixed_sizes(call: Call) -> bool:
    """Return whether sizes stay.

    Values depend on them, no kernel checks them, a list has separate calls, or torch would resize an output.
    """
    return is_unchecked(call) or base_of(str(call.op)).rstrip("_") in KEEP_VALUES


def broadcasts(call: Call) -> Iterator[Variation]:
    """Yield operands of which one has an extent of 1, or fewer dims, and is broadcast: results keep their shapes."""
    shapes = _shapes(call)
    yield from (change for change in _with_fewer(call) if _shapes(change.apply(call)) == shapes)


def ones(call: Call) -> Iterator[Variation]:
    """Yield operands of which one has an extent of 1, or fewer dims, and the results with it."""
    shapes = _shapes(call)
    yield from (change for change in _with_fewer(call) if _shapes(change.apply(call)) not in (None, shapes))


def tied(call: Call) -> Iterator[Variation]:
    if not is_unchecked(call):
        yield from tied_ones(call)


def _shapes(call: Call | None) -> list[torch.Size] | None:
    """Return the shapes of the results; None if the call raises."""
    results = None if call is None else attempt(call)
    return None if results is None else [result.shape for result in results]


def _with_fewer(call: Call) -> Iterator[Variation]:
    if has_fixed_sizes(call):
        return
    for number in range(len(call.tensors)):
        for dim in range(call.tensors[number].ndim):
            yield _resized(number, dim, "is 1", _one)
        if len(call.tensors) > 1:
            yield Variation(f"tensor {number} without its first dim", partial(with_changed, (number,), _without_first))


def wider(call: Call) -> Iterator[Variation]:
    """Yield tensors with 3 elements in dims in which they have 1, each alone and all together.

    Many images of OpInfo have one channel, which one rank has whole: a rule may cut channels where blocks of them end.
    """
    if has_fixed_sizes(call) or torch.Tag.pointwise in call.op.tags:
        return
    dims = sorted({dim for tensor in call.tensors for dim, extent in enumerate(tensor.shape) if extent == 1})
    everywhere = tuple(range(len(call.tensors)))
    for some in ([dims] if len(dims) > 1 else []) + [[dim] for dim in dims]:
        text = f"dim{'s' if len(some) > 1 else ''} {', '.join(map(str, some))} of extent 1 is 3"
        yield Variation(text, partial(with_changed, everywhere, partial(_widened, some)))


def _widened(dims: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat([3 if dim in dims and extent == 1 else 1 for dim, extent in enumerate(tensor.shape)])


def fewer_dims(call: Call) -> Iterator[Variation]:
    """Yield one of three tensors or more, which else have one shape, without its first dim.

    Where extents are equal, a rule that counts its dims from the front cuts another dim than it does of the others.
    """
    shapes = {tensor.shape for tensor in call.tensors}
    if len(call.tensors) > 2 and len(shapes) == 1 and call.tensors[0].ndim > 1 and not has_fixed_sizes(call):
        for number in range(len(call.tensors)):
            yield Variation(
                f"tensor {number} of equal ones without its first dim", partial(with_changed, (number,), _without_first)
            )


def narrower(call: Call) -> Iterator[Variation]:
    """Yield operands of which one, or all but the first, are narrower than the others, or the last one wider."""
    if has_fixed_sizes(call):
        return
    count = len(call.tensors)
    if count < 2:
        return
    dims = range(call.tensors[-1].ndim)
    for dim in dims:
        yield _resized(count - 1, dim, "is wider", _wider)
        if count > 2:
            change = partial(with_changed, tuple(range(1, count)), partial(_narrower, dim=dim))
            yield Variation(f"dim {dim} of all but the first is narrower", change)
        for number in range(1, count):
            yield _resized(number, dim, "is narrower", _narrower)
    for dim in dims:
        yield _resized(0, dim, "is narrower", _narrower)


def empty(call: Call) -> Iterator[Variation]:
    """Yield operands of which one, or all, have an empty dim, and sizes with a 0."""
    if has_fixed_sizes(call):
        return
    yield from _empty_sizes(call)
    for dim in range(max(tensor.ndim for tensor in call.tensors)):
        change = partial(with_changed, tuple(range(len(call.tensors))), partial(_empty, dim=dim))
        yield Variation(f"dim {dim} of all is empty", change)
        for number in reversed(range(len(call.tensors))):
            yield _resized(number, dim, "is empty", _empty)


def _empty_sizes(call: Call) -> Iterator[Variation]:
    """Yield tensors with an empty dim to be viewed in sizes of which one is 0."""
    for parameter in parameters(call.op):
        sizes = call.values.get(parameter.name)
        if parameter.name not in _SIZES or not isinstance(sizes, list | tuple) or len(call.tensors) != 1:
            continue
        for place in reversed(range(len(sizes))):
            for dim in range(call.tensors[0].ndim):
                new = [0 if number == place else abs(size) for number, size in enumerate(sizes)]
                yield Variation(
                    f"dim {dim} and {parameter.name}[{place}] are 0", partial(_emptied, parameter.name, new, dim)
                )


_SIZES = ("size", "shape", "sizes")


def _emptied(name: str, sizes: list[int], dim: int, call: Call) -> Call | None:
    changed = with_changed((0,), partial(_empty, dim=dim), call)
    return None if changed is None else with_value(changed, name, sizes)


def _resized(number: int, dim: int, label: str, resize: Callable[..., torch.Tensor | None]) -> Variation:
    return Variation(
        f"dim {dim} of tensor {number} {label}", partial(with_changed, (number,), partial(resize, dim=dim))
    )


def _one(tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
    return tensor.narrow(dim, 0, 1).clone() if tensor.ndim > dim and tensor.shape[dim] > 1 else None


def _narrower(tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
    extent = tensor.shape[dim] if tensor.ndim > dim else 0
    return tensor.narrow(dim, 0, extent - 1).clone() if extent > 2 else None


def _wider(tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return a tensor twice as wide; one more would often be cut at the same places."""
    return torch.cat([tensor, tensor], dim) if tensor.ndim > dim and tensor.shape[dim] > 1 else None


def _empty(tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
    return tensor.narrow(dim, 0, 0).clone() if tensor.ndim > dim and tensor.shape[dim] else None


def _without_first(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor[0].clone() if tensor.ndim and tensor.shape[0] else None


def factory_sizes(call: Call) -> Iterator[Variation]:
    """Yield sizes of the results of factories: the tensor's own size, and a larger one."""
    for parameter in parameters(call.op):
        if parameter.name == "size" and "List[int]" in parameter.type and base_of(str(call.op)).startswith("new_"):
            yield Variation("its own size", partial(_with_size, parameter.name, 0))
            yield Variation("a larger size", partial(_with_size, parameter.name, 1))


def _with_size(name: str, more: int, call: Call) -> Call | None:
    return with_value(call, name, [extent + more for extent in call.tensors[0].shape])


def pooled_sizes(call: Call) -> Iterator[Variation]:
    """Yield sizes of what pools and interpolates: 1, the extents of the input, and half of them.

    A rule may shard what it pools for some of these alone.
    """
    base = base_of(str(call.op))
    given = call.values.get("output_size")
    if not isinstance(given, list | tuple) or not base.startswith(("adaptive_", "_adaptive_", "upsample_")):
        return
    if "backward" in base or any(parameter.out for parameter in parameters(call.op)):
        return
    one = [1] * len(given)
    yield Variation(f"output_size is {one}", partial(with_value, name="output_size", value=one))
    yield Variation("output_size is that of the input", partial(_with_pooled_size, 1))
    yield Variation("output_size is half that of the input", partial(_with_pooled_size, 2))


def _with_pooled_size(divisor: int, call: Call) -> Call | None:
    given = call.values["output_size"]
    assert isinstance(given, list | tuple)
    extents = call.tensors[0].shape[-len(given) :]
    return with_value(call, "output_size", [max(1, extent // divisor) for extent in extents])


def with_changed(
    which: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor | None], call: Call
) -> Call | None:
    return call.with_tensors(which, change)
