"""Lets DTensor weigh the rules under which nothing is sent, and no others, where only claims matter."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor._ops.single_dim_strategy import _resolve_foreach_elementwise_overload
from torch.distributed.tensor.placement_types import Placement

__all__ = ["RedistributesError", "free_rules_alone"]

_EXPAND = "expand_to_full_mesh_op_strategy"
"""The name of torch's function that makes rules for all mesh dims of those for one, and works out what each costs."""
_OF_TORCH = "torch.distributed.tensor."

Rule = Sequence[Placement | None]
Expand = Callable[..., OpStrategy]


class RedistributesError(RuntimeError):
    """DTensor is to redistribute."""


@contextlib.contextmanager
def free_rules_alone(op: OpOverload, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Let DTensor weigh only the rules that are free for a call, where any rule is.

    What each rule costs takes most of the time of a decision. A rule is free if each tensor is placed as it asks, or is
    replicated. DTensor takes a free rule wherever it has one that it can apply, so that its decision is the same.
    Nothing is cut down for a strategy of the user's for all mesh dims, which may do more with the rules.

    Parameters
    ----------
    op
        What is called. Where no rule for it is free, the block ends with an error. Of other ops, which decompositions
        call, DTensor then gets a rule that needs a redistribution.
    unless
        Whether every rule is to be weighed, asked once the strategy has made the rules.

    Raises
    ------
    RedistributesError
        If ``op`` has rules, and none is free. For an op that it decomposes DTensor makes another error of this.
    """
    if not _is_known_to_pass_on(op):
        yield
        return
    before = [(names, names[_EXPAND]) for names in _namespaces()]
    for names, expand in before:
        names[_EXPAND] = functools.partial(_expand_free, expand, op, unless)
    try:
        yield
    finally:
        for names, expand in before:
            names[_EXPAND] = expand


@functools.cache
def _namespaces() -> tuple[dict[str, Any], ...]:
    """Return the names of each module of torch's that calls the function."""
    modules = [module for name, module in sys.modules.items() if name.startswith(_OF_TORCH)]
    expand = vars(utils)[_EXPAND]
    return tuple(names for names in map(vars, modules) if names.get(_EXPAND) is expand)


def _is_known_to_pass_on(op: OpOverload) -> bool:
    """Return whether the rules of ``op`` go to DTensor just as torch's function has expanded them."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    strategy = propagator.op_strategy_funcs.get(op)
    if strategy is None or op in propagator.op_single_dim_strategy_funcs:
        return True
    names = getattr(getattr(strategy, "func", strategy), "__globals__", {})
    return str(names.get("__name__", "")).startswith(_OF_TORCH)


def _expand_free(
    expand: Expand, op: OpOverload, unless: Callable[[], bool],
    mesh: DeviceMesh, schema: OpSchema, rules: Sequence[Rule], **how: Any,
) -> OpStrategy:  # fmt: skip
    """Expand the free ones of ``rules`` in the place of ``expand``, torch's function."""
    tensors = [*schema.args_strategy, *schema.kwargs_strategy]
    placed = [one.strategies[0].output_spec.placements for one in tensors if len(one.strategies) == 1]
    results = how.get("input_index", 1)
    if (
        len(placed) != len(tensors)
        or not all(len(placements) == mesh.ndim for placements in placed)
        or not _are_well_formed(rules, results, len(tensors))
        or not _is_known_to_pass_on(schema.op)
        or unless()
    ):
        return expand(mesh, schema, rules, **how)
    free = [rule for rule in rules if _is_free([p for p in rule[results:] if p is not None], placed)]
    if (made := _applicable(expand, mesh, schema, free, how)) is not None:
        return made
    if not schema.kwargs_strategy:  # these are never redistributed, and DTensor may take a rule that is not free
        if _is_asked(op, schema.op):
            raise RedistributesError
        replicated = [rule for rule in rules if all(type(p) is Replicate for p in rule[results:] if p is not None)]
        if (made := _applicable(expand, mesh, schema, replicated, how)) is not None:
            return made
    return expand(mesh, schema, rules, **how)


def _applicable(
    expand: Expand, mesh: DeviceMesh, schema: OpSchema, rules: Sequence[Rule], how: Mapping[str, Any]
) -> OpStrategy | None:
    """Return what DTensor makes of ``rules``, if it can apply any; what it raises, it raises of all rules as well."""
    with contextlib.suppress(Exception):
        made = expand(mesh, schema, rules, **how) if rules else None
        return made if made is not None and made.strategies else None
    return None


def _is_free(rule: Sequence[Placement], placed: Sequence[tuple[Placement, ...]]) -> bool:
    """Return whether a rule for one mesh dim may be part of one that is free for tensors that are ``placed`` so."""
    return all(
        to in placements or all(type(placement) is Replicate for placement in placements)
        for to, placements in zip(rule, placed, strict=True)
    )


def _are_well_formed(rules: Sequence[Rule], results: int, tensors: int) -> bool:
    """Return whether DTensor makes a rule for all mesh dims of each of ``rules``, whatever the others are."""
    return len({tuple(p is None for p in rule) for rule in rules}) == 1 and all(
        sum(p is not None for p in rule[results:]) == tensors and all(map(_is_placement, rule)) for rule in rules
    )


def _is_placement(one: object) -> bool:
    return one is None or (isinstance(one, Placement) and not (isinstance(one, Shard) and one.dim < 0))


@functools.cache
def _is_asked(op: OpOverload, expanded: OpOverload) -> bool:
    """Return whether rules of ``expanded`` are those of ``op``: DTensor asks for each element of a list by itself."""
    return op is expanded or _resolve_foreach_elementwise_overload(op) is expanded
