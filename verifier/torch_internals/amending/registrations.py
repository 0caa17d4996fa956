"""Amendments to what DTensor has registered, and to the order in which it enumerates rules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.distributed.tensor import DTensor, _random, experimental
from torch.distributed.tensor import _decompositions as decompositions
from torch.distributed.tensor import _sharding_prop as choosing
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo
from torch.distributed.tensor._ops import _matrix_ops as matrices
from torch.distributed.tensor._ops import _view_ops as views
from torch.distributed.tensor._ops import single_dim_strategy as single_dim

from verifier.torch_internals.amending.propagation import adds_replication, is_torchs, refusing
from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.ops import registered_overloads
from verifier.torch_internals.registries import replicated_rule

__all__ = [
    "ABSENT",
    "adjusted_like",
    "arguments_of_users_rules_keyed",
    "bias_of_cudnn_attention",
    "cached_by",
    "cached_by_keyword",
    "edited",
    "empty_choices_refused",
    "empty_views_replicated",
    "exchanged",
    "generators_heeded",
    "handled",
    "handled_where",
    "layered",
    "lost_strides_refused",
    "numbers_decided_apart",
    "numbers_refused",
    "ordered_rules",
    "scalars_replicated",
    "shape_argument",
    "unsized_results_refused",
    "users_rules_asked",
    "without_handler",
]

ABSENT = object()
"""No value, for :func:`edited`."""


@contextlib.contextmanager
def edited(registry: dict[Any, Any], key: object, value: object) -> Iterator[None]:
    """Have ``registry`` hold ``value`` under ``key``, or nothing, if ``value`` is :data:`ABSENT`."""
    before = registry.pop(key, ABSENT)
    if value is not ABSENT:
        registry[key] = value
    try:
        yield
    finally:
        registry.pop(key, None)
        if before is not ABSENT:
            registry[key] = before


@contextlib.contextmanager
def exchanged(holder: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Put ``wrap(function)`` in the place of a function of torch's, unless someone else has replaced it.

    What takes its place names the module of the function too, so that several can be put over each other. A version of
    torch that has no such function any more is left as it is.
    """
    before = getattr(holder, name, None)
    if before is None or not str(before.__module__).startswith("torch."):
        yield
        return
    after = wrap(before)
    after.__module__ = before.__module__
    setattr(holder, name, after)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def without_handler(*ops: OpOverload) -> Iterator[None]:
    """Let DTensor run ``ops`` by their rules instead of torch's handlers for them."""
    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    with contextlib.ExitStack() as stack:
        for op in ops:
            if str(getattr(handlers.get(op), "__module__", "")).startswith("torch."):
                stack.enter_context(edited(handlers, op, ABSENT))
        yield


Handler: TypeAlias = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], object]


@contextlib.contextmanager
def handled(op: OpOverload, handler: Callable[..., object]) -> Iterator[None]:
    """Let DTensor call ``handler(*args, **kwargs)`` instead of ``op``, where torch has no handler of its own."""
    with layered((op,), lambda _op, args, kwargs: handler(*args, **kwargs)):
        yield


@contextlib.contextmanager
def handled_where(
    takes: Callable[[OpOverload], bool], handler: Handler, but: Collection[OpOverload] = ()
) -> Iterator[None]:
    """Let DTensor call ``handler(op, args, kwargs)`` instead of those ops of aten that ``takes`` wants.

    A dispatch mode would see the ops as well, but changes how kernels see lazily conjugated tensors. ``takes`` is a
    function of a module, which always answers the same about an op and so is asked once. The ops in ``but`` stay as
    they are.
    """
    with layered((op for op in _overloads_that(takes) if op not in but), handler):
        yield


@contextlib.contextmanager
def layered(ops: Iterable[OpOverload], handler: Handler) -> Iterator[None]:
    """Let DTensor call ``handler(op, args, kwargs)`` instead of ``ops``; what it calls of ``op`` goes on as before.

    So several amendments may concern one op: a handler of an amendment that is in force already runs inside. Ops with
    a handler of torch's or of the user's stay as they are, and so do ops with rules of the user's.
    """
    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    befores: list[tuple[OpOverload, Any]] = []
    try:
        for op in tuple(ops):
            before = handlers.get(op, ABSENT)
            if (before is ABSENT or isinstance(before, _Layer)) and is_torchs(op):
                befores.append((op, before))
                handlers.pop(op, None)  # the last amendment decides the order, whatever was in force before
                handlers[op] = _Layer(handlers, handler, before)
        yield
    finally:
        for op, before in reversed(befores):
            handlers.pop(op, None)
            if before is not ABSENT:
                handlers[op] = before


class _Layer:
    """A handler around what was there before it, which holds the whole registry: it is told by its class alone.

    ``passes_on`` says that the op itself was there, so that the calls which the handler lets through are ordinary ones.
    """

    def __init__(self, handlers: dict[OpOverload, Any], handler: Handler, before: Any) -> None:
        self._handlers, self._handler, self._before = handlers, handler, before
        self.passes_on = before is ABSENT or before.passes_on

    def __call__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        with edited(self._handlers, op, self._before):
            return self._handler(op, args, kwargs)


@functools.cache
def _overloads() -> tuple[OpOverload, ...]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten" and hasattr(torch.ops.aten, packet):
            op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if isinstance(op, OpOverload):
                found.append(op)
    return tuple(found)


@functools.cache
def _overloads_that(takes: Callable[[OpOverload], bool]) -> tuple[OpOverload, ...]:
    return tuple(filter(takes, _overloads()))


@refusing
def _without_numbers(
    op: OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    wrong: Callable[[object], bool],
    why: str,
) -> object:
    if any(map(wrong, (*args, *kwargs.values()))):
        raise NotImplementedError(f"{op} {why}")
    return op(*args, **kwargs)


@contextlib.contextmanager
def numbers_refused(wrong: Callable[[object], bool], why: str) -> Iterator[None]:
    """Let DTensor refuse a call with an argument of which ``wrong`` is true, and say ``why``.

    Ops of which no schema takes a Python number stay as they are, and so do ops with a handler of torch's.
    """
    handler = functools.partial(_without_numbers, wrong=wrong, why=why)
    known = {*registered_overloads(), *(op for op in decomposition_table if isinstance(op, OpOverload))}
    with layered(sorted(filter(_may_take_numbers, known), key=str), handler):
        yield


@functools.cache
def _may_take_numbers(op: OpOverload) -> bool:
    return any("number" in str(one.type) for one in op._schema.arguments)


@contextlib.contextmanager
def numbers_decided_apart(*ops: OpOverload) -> Iterator[None]:
    """Let DTensor decide afresh where one of ``ops`` gets a number and had a tensor at its last call, or vice versa."""
    last: dict[OpOverload, tuple[bool, ...]] = {}

    def handler(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        kinds = tuple(isinstance(one, torch.Tensor) for one in args)
        if last.setdefault(op, kinds) != kinds:
            clear_caches()
            last.clear()
        last[op] = kinds
        return op(*args, **kwargs)

    with layered(ops, handler):
        yield


@contextlib.contextmanager
def shape_argument(op: OpOverload, position: int) -> Iterator[None]:
    """Let DTensor rewrite the argument at ``position``, the shape of the result, for each rank's shard."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    with edited(propagator.op_to_shape_and_stride_idx, op, position) if is_torchs(op) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def adjusted_like(op: OpOverload, other: OpOverload) -> Iterator[None]:
    """Let DTensor rewrite the sizes among the arguments of ``op`` for each rank's shard as it does for ``other``."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    adjusters = propagator.op_to_scalar_shape_adjuster
    with edited(adjusters, op, adjusters.get(other, ABSENT)) if is_torchs(op) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def cached_by(op: OpOverload, static_argnum: int) -> Iterator[None]:
    """Let the key of DTensor's cache hold the arguments of ``op`` from ``static_argnum`` on."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    if not is_torchs(op):
        yield
        return
    infos = propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy
    held = [one for one in infos if op in one] or [infos[0]]
    with contextlib.ExitStack() as stack:
        for one in held:
            info = one.get(op) or RuntimeSchemaInfo()
            key = RuntimeSchemaInfo(static_argnum, info.static_kwargkey, info.needs_pytree)
            stack.enter_context(edited(one, op, key))
        yield


@contextlib.contextmanager
def cached_by_keyword(op: OpOverload, name: str) -> Iterator[None]:
    """Let the key of DTensor's cache hold the keyword argument ``name`` of ``op``."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    infos = propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy
    held = [one for one in infos if op in one]
    if not held or not is_torchs(op):
        yield
        return
    with contextlib.ExitStack() as stack:
        for one in held:
            info = one[op]
            names = [*(info.static_kwargkey or ()), name]
            stack.enter_context(edited(one, op, RuntimeSchemaInfo(info.static_argnum, names, info.needs_pytree)))
        yield


@contextlib.contextmanager
def empty_choices_refused() -> Iterator[None]:
    """Let DTensor refuse a call for which no rule is left, unless it is a strategy of the user's that lists none."""
    module: Any = choosing
    choose = module._select_min_redistribute_cost

    def chosen(costs: Sequence[Any], strategies: Sequence[Any], schema: OpSchema | None = None) -> int:
        if not costs and schema is not None and (is_torchs(schema.op) or adds_replication(schema.op)):
            raise NotImplementedError(f"{schema.op} has no rule for the placements of what it writes")
        return choose(costs, strategies, schema)  # type: ignore[no-any-return]

    module._select_min_redistribute_cost = chosen
    try:
        yield
    finally:
        module._select_min_redistribute_cost = choose


@contextlib.contextmanager
def unsized_results_refused() -> Iterator[None]:
    """Let DTensor refuse a call of any op whose result has a size that depends on values, before it asks for rules."""
    propagator: Any = choosing.ShardingPropagator
    computed = propagator._propagate_tensor_meta_non_cached

    def computed_or_refused(self: Any, schema: OpSchema) -> Any:
        try:
            return computed(self, schema)
        except DynamicOutputShapeException as error:
            raise NotImplementedError(f"{schema.op} takes no values that decide about a size") from error

    propagator._propagate_tensor_meta_non_cached = computed_or_refused
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = computed


@contextlib.contextmanager
def empty_views_replicated() -> Iterator[None]:
    """Let DTensor replicate a tensor without elements before it is viewed in another shape."""
    module: Any = views
    groups = module.view_groups

    def groups_of(from_size: Sequence[int], to_size: Sequence[int]) -> Any:
        if 0 not in from_size:
            return groups(from_size, to_size)
        return tuple(views.NewDim.new(size) for size in views.infer_size(0, views.normalize_sizes(tuple(to_size))))

    module.view_groups = groups_of
    try:
        yield
    finally:
        module.view_groups = groups


def lost_strides_refused() -> contextlib.AbstractContextManager[None]:
    """Let DTensor refuse a view in which it does not find the dim again that a strided shard cuts."""

    def wrap(rewrite: Callable[..., Any]) -> Any:
        def found(self: Any, *given: Any, **options: Any) -> Any:
            try:
                return rewrite(self, *given, **options)
            except KeyError as error:
                raise NotImplementedError("this view of a strided shard is not supported") from error

        return found

    return exchanged(views._ViewShardingPropagator, "_rewrite_strided_shard", wrap)


@contextlib.contextmanager
def scalars_replicated(op: OpOverload) -> Iterator[None]:
    """Let DTensor replicate a tensor without dims, the first argument of ``op``, instead of asking the strategy."""
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    rules = strategies.get(op)
    if rules is None or not is_torchs(op):
        yield
        return

    @functools.wraps(rules)  # so that it still counts as torch's
    def replicating(schema: OpSchema) -> Any:
        given: Any = schema.args_schema[0]
        return rules(schema) if given.ndim else replicated_rule(given)

    with edited(strategies, op, replicating):
        yield


@contextlib.contextmanager
def bias_of_cudnn_attention() -> Iterator[None]:
    """Let torch's rules of the forward pass of cuDNN's attention place the bias, as they place the values."""
    name = "_scaled_dot_product_cudnn_attention_base_strategies"
    rules = vars(matrices).get(name)
    if rules is None:
        yield
        return

    @functools.wraps(rules)
    def complete(schema: OpSchema) -> list[list[Any]]:
        listed = rules(schema)
        longest = max(map(len, listed))
        return [[*rule, *rule[-1:] * (longest - len(rule))] for rule in listed]

    with edited(vars(matrices), name, complete):
        yield


@contextlib.contextmanager
def ordered_rules() -> Iterator[None]:
    """Let DTensor enumerate placements in the order of their texts, which is the same in every process."""
    tracing: Any = decompositions.DecompShardingStrategy
    candidates, neighbors = tracing._get_candidate_placements, single_dim._get_neighbor_placements
    unique = single_dim._get_unique_placements

    def ordered_candidates(schema: OpSchema) -> list[Any]:
        return sorted(candidates(schema), key=str)

    def ordered_neighbors(sharding: Any, partial: Any, *rest: Any) -> Any:
        return neighbors(sorted(sharding, key=str), sorted(partial, key=str), *rest)  # type: ignore[arg-type]

    def ordered_unique(schema: OpSchema) -> Any:
        return sorted(unique(schema), key=str)

    changes: tuple[tuple[Any, str, object], ...] = (
        (tracing, "_get_candidate_placements", staticmethod(ordered_candidates)),
        (single_dim, "_get_neighbor_placements", ordered_neighbors),
        (single_dim, "_get_unique_placements", ordered_unique),
    )
    kept = [vars(holder)[name] for holder, name, _ in changes]
    try:
        for holder, name, new in changes:
            setattr(holder, name, new)
        yield
    finally:
        for (holder, name, _), old in zip(changes, kept, strict=True):
            setattr(holder, name, old)


def generators_heeded() -> contextlib.AbstractContextManager[None]:
    """Let a random op draw from the generator that it is given, also on a device for which there is no tracker."""

    def heeding(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        given = kwargs.get("generator")
        if given is None or given.device.type != "cpu" or _random._rng_tracker is not None:
            return op(*args, **kwargs)
        default = torch.default_generator
        state = default.get_state()
        default.set_state(given.get_state())
        try:
            return op(*args, **{name: value for name, value in kwargs.items() if name != "generator"})
        finally:
            given.set_state(default.get_state())
            default.set_state(state)

    return layered(DTensor._op_dispatcher._random_ops, heeding)


def _after_registering(change: Callable[[Any, OpOverload], None]) -> contextlib.AbstractContextManager[None]:
    """Let ``register_sharding`` change the propagator for each op whose rule it has registered."""

    def wrap(register: Any) -> Any:
        def registering(op: Any) -> Any:
            keeps = register(op)

            def kept(rule: Any) -> Any:
                keeps(rule)
                for one in op if isinstance(op, list) else [op]:
                    change(DTensor._op_dispatcher.sharding_propagator, one)
                return rule

            return kept

        return registering

    return exchanged(experimental, "register_sharding", wrap)


def users_rules_asked() -> contextlib.AbstractContextManager[None]:
    """Let a rule of the user's take the place of torch's, which is asked before, and of what was decided already."""

    def change(propagator: Any, op: OpOverload) -> None:
        propagator.op_single_dim_strategy_funcs.pop(op, None)
        propagator.op_to_schema_info_for_single_dim_strategy.pop(op, None)
        clear_caches()

    return _after_registering(change)


def arguments_of_users_rules_keyed() -> contextlib.AbstractContextManager[None]:
    """Let the key of DTensor's cache hold every argument that is no tensor of an op with a rule of the user's."""

    def change(propagator: Any, op: OpOverload) -> None:
        others = [(at, one) for at, one in enumerate(op._schema.arguments) if "Tensor" not in str(one.type)]
        first = min((at for at, one in others if not one.kwarg_only), default=100)
        named = [one.name for _, one in others if one.kwarg_only]
        propagator.op_to_schema_info[op] = RuntimeSchemaInfo(first, named or None, needs_pytree=True)

    return _after_registering(change)
