"""Where DTensor keeps strategies, handlers and rules for single ops."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import (
    _resolve_foreach_elementwise_overload,
    _SingleDimStrategyInfo,
    register_single_dim_strategy,
)
from torch.distributed.tensor._ops.utils import generate_redistribute_costs
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.sharded_ops import ShardedOp

__all__ = [
    "IMPORTS_OF_OP_STRATEGY",
    "IMPORTS_OF_SINGLE_DIM",
    "asked_per_element",
    "by_register_sharding",
    "count_as_registered",
    "has_handler_of_user",
    "has_own_handler",
    "install_handler",
    "install_sharded_op",
    "installed_sharded_op",
    "is_registered_by_user",
    "keys_of_rules",
    "let_new_rules_win",
    "noted_registrations",
    "places_lists_of_results",
    "registries_of_rules",
    "replaced_handler",
    "replaced_sharded_op",
    "replaced_strategy",
    "replicated_rule",
    "results_per_element",
    "sees_mesh",
    "takes_filters",
]

IMPORTS_OF_SINGLE_DIM = """from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
"""
"""What a module imports to register a strategy for one mesh dim."""

IMPORTS_OF_OP_STRATEGY = """from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy, register_op_strategy
"""
"""What a module imports to register a strategy for all mesh dims."""


def places_lists_of_results() -> bool:
    """Return whether a strategy for one mesh dim can place the tensors of a list that an op returns: from 2.14 on."""
    return takes_filters()


def asked_per_element(op: OpOverload) -> bool:
    """Return whether DTensor asks a strategy for one mesh dim of one tensor of each list, as of a foreach op."""
    return str(op).startswith(("aten._foreach_", "aten._amp_foreach_", "aten._fused_"))


def results_per_element(op: OpOverload) -> int:
    """Return how many results such a strategy places: those of the op for one tensor, if there is one."""
    returns = (_resolve_foreach_elementwise_overload(op) or op)._schema.returns
    return sum("Tensor" in str(result.type) for result in returns)


def takes_filters() -> bool:
    """Return whether a strategy for one mesh dim can have a filter of its products, as from torch 2.14 on."""
    return "full_mesh_strategy_filter" in inspect.signature(register_single_dim_strategy).parameters


def registries_of_rules() -> tuple[dict[OpOverload, Any], ...]:
    """Return the registries that tell DTensor how to run each op, one for each way of registering.

    In order: handlers, prop rules, strategies, and strategies for one mesh dim. DTensor asks the last registry before
    those of prop rules and strategies.
    """
    dispatcher = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    return (
        dispatcher._custom_op_handlers,
        propagator.op_to_rules,
        propagator.op_strategy_funcs,
        propagator.op_single_dim_strategy_funcs,
    )


def keys_of_rules() -> tuple[dict[OpOverload, RuntimeSchemaInfo], ...]:
    """Return the registries of what the key of DTensor's cache holds: of other rules, and of those for one mesh dim.

    DTensor asks the first one first, whatever rules the op has.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    return propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy


def by_register_sharding(op: object) -> bool:
    """Return whether ``register_sharding`` registered the rules of ``op``, for which it chooses what the key holds."""
    strategy = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.get(op)  # type: ignore[call-overload]
    module = getattr(getattr(strategy, "func", None), "__module__", "")
    return str(module).startswith(register_sharding.__module__)  # the private module of the public name


def sees_mesh(op: OpOverload) -> bool:
    """Return whether the rules of ``op`` come from a function that is told the mesh, so that they may depend on it."""
    _, prop_rules, strategies, of_one_mesh_dim = registries_of_rules()
    return op not in of_one_mesh_dim and (op in prop_rules or op in strategies)


_of_the_user: dict[OpOverload, tuple[object, ...]] = {}
"""The rules and keys of the ops for which an import has registered something."""


def is_registered_by_user(op: OpOverload) -> bool:
    """Return whether an import registered the rules of ``op``, or their key; a function of torch may be among them."""
    registered = _of_the_user.get(op)
    return registered is not None and all(a is b for a, b in zip(registered, _entry_of(op), strict=True))


def count_as_registered(names: Collection[str]) -> None:
    """Let the rules of the ops with these names count as the user's, because an import has exchanged code of theirs."""
    _of_the_user.update(
        {op: _entry_of(op) for registry in registries_of_rules() for op in registry if str(op) in names}
    )


def _entry_of(op: OpOverload) -> tuple[object, ...]:
    return tuple(registry.get(op) for registry in (*registries_of_rules()[1:], *keys_of_rules()))


@contextlib.contextmanager
def let_new_rules_win() -> Iterator[list[str]]:
    """Let rules that are registered inside the block replace torch's own; yield the ops that needed help for it.

    DTensor (torch 2.13.0) asks for a strategy for one mesh dim first, then for another strategy, then for a prop rule.
    None of the functions that register a rule takes back those that are asked before. ``register_sharding`` says that
    it overrides a strategy of DTensor, and does not where that one is for one mesh dim. The key that torch's older rule
    has in the cache is asked before that of a new strategy for one mesh dim, too. An op that has a decomposition is
    decomposed before its prop rule is asked.
    """
    _, *rules = registries_of_rules()
    keys, keys_of_single = keys_of_rules()
    every = (*rules, keys, keys_of_single)
    before = [dict(registry) for registry in every]
    helped: list[str] = []
    yield helped
    new = [
        {op for op, held in registry.items() if old.get(op) is not held}
        for old, registry in zip(before, every, strict=True)
    ]
    for number, asked_first in ((1, 2), (0, 1), (0, 2)):
        for op in sorted(new[number] - new[asked_first], key=str):
            if rules[asked_first].pop(op, None) is not None:
                helped.append(str(op))
    for op in new[4] - new[3]:
        if op in rules[2]:
            keys.pop(op, None)
    if new[0]:
        helped += [str(op) for op in sorted(new[0], key=str) if str(op) not in helped and _has_decomposition(op)]
        DecompShardingStrategy.has_decomp = staticmethod(_is_decomposed)  # type: ignore[method-assign]
    _of_the_user.update({op: _entry_of(op) for op in set().union(*new)})
    clear_caches()


@contextlib.contextmanager
def noted_registrations() -> Iterator[set[str]]:
    """Yield the names of the ops for which DTensor's functions register rules inside the block, be they as before."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    noted: set[str] = set()

    def noting(register: Callable[..., None]) -> Callable[..., None]:
        def noted_one(op: OpOverload, *args: Any, **kwargs: Any) -> None:
            noted.add(str(op))
            register(op, *args, **kwargs)

        return noted_one

    names = ("register_sharding_prop_rule", "register_op_strategy", "register_single_dim_op_strategy")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(propagator, name, noting(getattr(propagator, name))))
        yield noted


_has_decomposition = DecompShardingStrategy.has_decomp


def _is_decomposed(op: OpOverload) -> bool:
    """Return whether DTensor decomposes an op without a strategy: not if it has a prop rule."""
    return op not in DTensor._op_dispatcher.sharding_propagator.op_to_rules and _has_decomposition(op)


@contextlib.contextmanager
def replaced_strategy(
    op: OpOverload, strategy: Callable[..., list[list[Placement | None]]] | None = None
) -> Iterator[None]:
    """Let DTensor use only the rules of ``strategy`` for ``op`` inside the block.

    Parameters
    ----------
    strategy
        Called with the op, its arguments and its keyword arguments, in which a tensor is its ``TensorMeta``. Returns
        rules for one mesh dim: the placements of each result, then of each tensor argument. Shards may be uneven. If
        ``strategy`` is None, the block itself registers rules.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    _, *registries = registries_of_rules()
    # the schema infos stay: whether an argument is a list of tensors does not depend on the rules
    infos = (propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy)
    with _restored(op, *registries, *infos):
        for registry in registries:
            registry.pop(op, None)
        if strategy is not None:
            info = _SingleDimStrategyInfo(func=strategy, allow_uneven_sharding=True)
            propagator.op_single_dim_strategy_funcs[op] = info
        clear_caches()
        yield


@contextlib.contextmanager
def _restored(op: OpOverload, *registries: dict[OpOverload, Any]) -> Iterator[None]:
    """Put back, after the block, what the registries had for ``op`` before it."""
    kept = [registry.get(op) for registry in registries]
    try:
        yield
    finally:
        for registry, rules in zip(registries, kept, strict=True):
            registry.pop(op, None)
            if rules is not None:
                registry[op] = rules
        clear_caches()


def install_sharded_op(sharded: ShardedOp) -> None:
    """Let DTensor run an op by ``sharded`` from now on."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    older: tuple[dict[OpOverload, Any], ...] = (
        propagator.op_strategy_funcs,
        propagator.op_to_rules,
        propagator.op_to_schema_info,
    )
    for registry in older:  # the dispatcher would ask some of them first
        registry.pop(sharded.op, None)
    info = _SingleDimStrategyInfo(func=sharded.rules_to_decide_by, allow_uneven_sharding=True)
    propagator.register_single_dim_op_strategy(sharded.op, info, RuntimeSchemaInfo(sharded.static_argnum))
    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[sharded.op] = sharded
    clear_caches()


def install_handler(op: OpOverload, handler: Callable[..., object]) -> None:
    """Let DTensor call ``handler(op, *args, **kwargs)`` in the place of ``op`` from now on.

    In a compiled function the call breaks the graph, and Dynamo does not trace what the handler does.
    """
    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[op] = _untraced(handler)


def _untraced(handler: Callable[..., object]) -> Callable[..., object]:
    """Return the handler as DTensor calls it. Dynamo, which takes seconds to load, is asked only if it is loaded."""
    untraced: Callable[..., object] | None = None

    def call(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        nonlocal untraced
        if untraced is None and (dynamo := sys.modules.get("torch._dynamo")) is not None:
            untraced = dynamo.disable(handler)
        return (untraced or handler)(op, *args, **kwargs)

    return call


@contextlib.contextmanager
def replaced_sharded_op(sharded: ShardedOp) -> Iterator[None]:
    """Let DTensor run an op by ``sharded`` inside the block, and as before after it."""
    with replaced_strategy(sharded.op), _restored(sharded.op, DTensor._op_dispatcher._custom_op_handlers):
        install_sharded_op(sharded)
        yield


@contextlib.contextmanager
def replaced_handler(op: OpOverload, handler: Callable[..., object]) -> Iterator[None]:
    """Let DTensor call ``handler`` in the place of ``op`` inside the block, and do as before after it."""
    with _restored(op, DTensor._op_dispatcher._custom_op_handlers):
        install_handler(op, handler)
        yield


@dataclass(frozen=True)
class _Guarded:
    """Rules of an op; ``guard`` is called for each rule before DTensor uses it."""

    rules: Callable[[OpSchema], Any]
    guard: Callable[..., None]

    def __call__(self, schema: OpSchema) -> Any:
        given = schema.args_schema[0]
        assert isinstance(given, OpStrategy)
        if not math.prod(given.shape):
            return replicated_rule(given)
        strategy = self.rules(schema)
        args = [arg.shape if isinstance(arg, OpStrategy) else arg for arg in schema.args_schema]
        for rule in strategy.strategies:
            (before,) = rule.input_specs
            mesh_shape = tuple(before.mesh.shape)
            self.guard(schema.op, args, mesh_shape, before.placements, rule.output_spec.placements)
        return strategy


def replicated_rule(given: OpStrategy) -> OpStrategy:
    """Return the rule that replicates both the tensor and the result, for an op with one of each."""
    everywhere = DTensorSpec(
        given.mesh, (Replicate(),) * given.mesh.ndim, tensor_meta=given.strategies[0].output_spec.tensor_meta
    )
    costs = [generate_redistribute_costs(given, everywhere)]
    return OpStrategy([OpSpec(everywhere, (everywhere,), redistribute_cost=costs)])


def install_guard(op: OpOverload, guard: Callable[..., None]) -> None:
    """Let DTensor ask ``guard`` from now on before it uses a rule of ``op``, an op with one tensor and one result.

    A tensor without elements is replicated, whatever the rules are: torch's rule for views never ends when it flattens
    such a tensor (2.13.0).

    A second call changes nothing. A call also changes nothing if DTensor has no strategy for ``op`` that sees the
    whole call.

    Parameters
    ----------
    guard
        Called with the op, its arguments with the shape in the tensor's place, the shape of the mesh, and the
        placements of the tensor and of the result. The op raises what the guard raises.
    """
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    rules = strategies.get(op)
    if rules is None or (isinstance(rules, _Guarded) and rules.guard is guard):
        return
    strategies[op] = _Guarded(rules, guard)
    clear_caches()


@contextlib.contextmanager
def guarded(op: OpOverload, guard: Callable[..., None]) -> Iterator[None]:
    """Let DTensor ask ``guard`` about the rules of ``op``, only inside the block."""
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    with _restored(op, strategies):
        install_guard(op, guard)
        yield


def installed_sharded_op(op: OpOverload) -> ShardedOp | None:
    handler = DTensor._op_dispatcher._custom_op_handlers.get(op)
    return handler if isinstance(handler, ShardedOp) else None


def has_own_handler(op: OpOverload) -> bool:
    """Return whether DTensor runs its own code, which we know nothing about, instead of ``op``."""
    handler = DTensor._op_dispatcher._custom_op_handlers.get(op)
    passes_on = handler is None or getattr(handler, "passes_on", False)  # as a remedy does
    return not passes_on and installed_sharded_op(op) is None


def has_handler_of_user(op: OpOverload) -> bool:
    """Return whether DTensor runs code instead of ``op`` that is not torch's."""
    handler = DTensor._op_dispatcher._custom_op_handlers.get(op)
    return has_own_handler(op) and getattr(handler, "__module__", "").partition(".")[0] != "torch"
