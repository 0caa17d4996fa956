"""Captures the aten calls that OpInfo's samples dispatch in their forward and backward passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch

from strategies.opinfo.calls.call import REFUSALS, Call, quiet
from strategies.opinfo.calls.op_facts import FOREACH_SHAPES, NO_BACKWARD, SIZES
from strategies.opinfo.samples.derived_overloads import families_with_rule, family
from verifier.torch_internals.names import OpOverload, pytree
from verifier.torch_internals.opinfo import capture_calls, opinfo_entries, opinfo_samples, opinfo_sizes
from verifier.torch_internals.ops import cache_by_rules, has_decomposition, is_composite, registered_overloads

__all__ = [
    "MOST_CAPTURED",
    "Origin",
    "captured",
    "entries_of",
    "hidden",
    "run_backward",
    "sharded",
    "usable_dtype",
    "whole_calls",
]

MOST_CAPTURED = 64
"""Of so many samples of an OpInfo, evenly spaced, calls are captured."""
_LARGEST = 4096
"""Calls with a tensor of more elements are not captured."""
_CUT_TO = (13, 7, 5)
"""Extents to which a larger tensor of a sample is narrowed; further dims are narrowed to 3."""
_FALLBACK_DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128, torch.complex64)


@dataclass(frozen=True, order=True)
class Origin:
    """The origin of a captured call: the ``occurrence``-th call of ``op`` in a sample of an OpInfo."""

    entry: int
    sample: int
    op: str
    occurrence: int


def entries_of(row: str) -> tuple[tuple[int, Any], ...]:
    """Return the OpInfos called ``row``, with their index in :func:`opinfo_entries`."""
    return _entries().get(row, ())


@cache
def _entries() -> dict[str, tuple[tuple[int, Any], ...]]:
    """Return the OpInfos by name, and not by a search for each name: that takes 0.7 s for all names."""
    found: dict[str, tuple[tuple[int, Any], ...]] = {}
    for place, entry in enumerate(opinfo_entries()):
        found[entry.name] = (*found.get(entry.name, ()), (place, entry))
    return found


@cache_by_rules
def sharded(op: OpOverload) -> bool:
    """Return whether DTensor has a rule for ``op`` or for its decomposition."""
    return op.namespace == "aten" and (op in _registered() or has_decomposition(op))


@cache_by_rules
def _registered() -> frozenset[OpOverload]:
    return registered_overloads()


@cache_by_rules
def hidden(op: OpOverload) -> bool:
    """Return whether autograd decomposes ``op`` before DTensor sees it, and DTensor has a rule for it or a sibling."""
    return is_composite(op) and (op in _registered() or family(op) in families_with_rule())


def usable_dtype(entry: Any, dtype: torch.dtype) -> torch.dtype | None:
    """Return ``dtype`` if the OpInfo supports it on CPU, else a dtype that the OpInfo supports."""
    supported = entry.supported_dtypes("cpu")
    return next((choice for choice in (dtype, *_FALLBACK_DTYPES) if choice in supported), None)


def captured(
    entry: Any,
    dtype: torch.dtype,
    *,
    size: int,
    seed: int,
    wanted: Callable[[OpOverload], bool],
    composite: bool = False,
    only: Collection[int] | None = None,
    most: int = MOST_CAPTURED,
) -> dict[int, list[Call]]:
    """Return the calls of wanted overloads that an OpInfo's samples dispatch, by the sample's number.

    Parameters
    ----------
    size
        Which of :data:`~strategies.opinfo.calls.op_facts.SIZES` the arguments have.
    seed
        Fixes the values.
    composite
        Also collect, in inference mode, the overloads that autograd otherwise decomposes before DTensor sees them.
    only
        Numbers of the samples to run; if None, up to ``most`` of them, evenly spaced.
    """
    usable = usable_dtype(entry, dtype)
    calls: dict[int, list[Call]] = {}
    if usable is None:
        return calls
    # a backward pass of foreach ops dispatches nothing new, and some of their samples cannot have one
    foreach = entry.name.startswith("_foreach")
    differentiable = (
        usable.is_floating_point and entry.supports_autograd and not foreach and entry.name not in NO_BACKWARD
    )
    with opinfo_sizes(SIZES[size], FOREACH_SHAPES[size]), _own_random_state(), quiet():
        samples = _generated(entry, usable, differentiable, seed, None if only is None else max(only, default=-1))
        if only is None:
            step = max(1, -(-len(samples) // most))
            only = range(0, len(samples), step)
        for number in sorted(only):
            if number < len(samples):
                _reseed(seed, number)
                calls[number] = _calls(entry, _cut(samples[number]), differentiable, wanted, composite)
    return calls


def whole_calls(entry: Any, dtype: torch.dtype, *, size: int, seed: int, most: int) -> dict[int, Call]:
    """Return calls of composite overloads for which DTensor has no rule, by the number of an OpInfo's sample.

    Each is the first call that the sample makes in inference mode. Arguments are as for :func:`captured`. With every
    second seed the numbers are complex, if the OpInfo supports them.
    """
    usable = usable_dtype(entry, dtype)
    if usable == dtype and seed % 2 and (wide := dtype.to_complex()) in entry.supported_dtypes("cpu"):
        usable = wide
    found: dict[int, Call] = {}
    if usable is None or entry.name.startswith("_foreach"):
        return found
    with opinfo_sizes(SIZES[size], FOREACH_SHAPES[size]), _own_random_state(), quiet():
        samples = _generated(entry, usable, False, seed, None)
        for number in range(0, len(samples), max(1, -(-len(samples) // most))):
            _reseed(seed, number)
            sample = _cut(samples[number])
            with capture_calls(_is_whole, _LARGEST) as calls, torch.inference_mode(), suppress(*REFUSALS):
                entry.op(sample.input, *sample.args, **sample.kwargs)
            if calls:
                op, args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, calls[0])
                found[number] = Call(op, args, kwargs)
    return found


@cache_by_rules
def _is_whole(op: OpOverload) -> bool:
    return op.namespace == "aten" and is_composite(op) and op not in _registered() and not op._schema.is_mutable


def _generated(entry: Any, dtype: torch.dtype, differentiable: bool, seed: int, last: int | None) -> list[Any]:
    samples: list[Any] = []
    _reseed(seed, 0)
    try:
        generated = opinfo_samples(entry, dtype, requires_grad=differentiable)
        while last is None or len(samples) <= last:
            _reseed(seed, len(samples))
            sample = next(generated, None)
            if sample is None:
                break
            samples.append(sample)
    except REFUSALS:
        # the generator fails at this size or on this build; its earlier samples are good
        pass
    return samples


def _cut(sample: Any) -> Any:
    """Return the sample with its only tensor narrowed, if that tensor is too large to be captured.

    All samples of ``slice`` that drop elements have such tensors (torch 2.13.0).
    """
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) != 1 or tensors[0] is not sample.input or sample.input.numel() <= _LARGEST:
        return sample
    smaller = sample.input.detach()
    for dim in range(smaller.ndim):
        extent = _CUT_TO[dim] if dim < len(_CUT_TO) else 3
        smaller = smaller.narrow(dim, 0, min(extent, smaller.shape[dim]))
    smaller = smaller.clone().requires_grad_(sample.input.requires_grad)
    return type(sample)(smaller, args=sample.args, kwargs=sample.kwargs)


def _calls(
    entry: Any, sample: Any, differentiable: bool, wanted: Callable[[OpOverload], bool], composite: bool
) -> list[Call]:
    calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]]
    with capture_calls(wanted, _LARGEST) as calls:
        try:
            result = entry.op(sample.input, *sample.args, **sample.kwargs)
            if differentiable:
                run_backward(result)
        except REFUSALS:
            pass  # the calls dispatched before are good
    if composite and not entry.name.startswith("_foreach"):
        seen = {op for op, _, _ in calls}
        with (
            capture_calls(lambda op: hidden(op) and op not in seen and wanted(op), _LARGEST) as more,
            torch.inference_mode(),
            suppress(*REFUSALS),
        ):
            entry.op(sample.input, *sample.args, **sample.kwargs)
        # inference tensors cannot be written to outside inference mode, so they are cloned
        calls += pytree.tree_map_only(torch.Tensor, torch.clone, more)
    made = [Call(op, args, kwargs) for op, args, kwargs in calls]
    return [call for call in made if any(tensor.numel() for tensor in call.tensors)]


def run_backward(result: object) -> None:
    """Differentiate the results of a call that require a gradient, if any."""
    outputs = [
        leaf
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.layout == torch.strided
    ]
    if outputs:
        # Integers of mixed sign suit every gradient, and nothing cancels by symmetry. Numpy makes them, because torch
        # calls would be captured here.
        generator = numpy.random.default_rng(random.getrandbits(32))
        cotangents = []
        for output in outputs:
            values = generator.integers(1, 5, output.shape).astype("float64")
            values.reshape(-1)[::2] *= -1
            cotangents.append(torch.from_numpy(values).to(output.dtype))
        torch.autograd.backward(outputs, cotangents)


def _reseed(seed: int, number: int) -> None:
    torch.default_generator.manual_seed(1_000_003 * seed + number)
    random.seed(1_000_003 * seed + number)


@contextmanager
def _own_random_state() -> Iterator[None]:
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
